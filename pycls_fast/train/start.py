"""The start of a run: its folder, its parts, the checkpoint that it resumes from, the table of what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pycls_fast import build, plan
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.speed import SWITCHES
from pycls_fast.train import checkpoint
from pycls_fast.train.agreement import check_same_folder, check_same_settings
from pycls_fast.train.assemble import build_parts, check_head
from pycls_fast.train.display import Display, epochs, human
from pycls_fast.train.environment import device_name, environment
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.resume import choose_run_dir, find_start, resume
from pycls_fast.train.run import Run
from pycls_fast.train.saving import Saver
from pycls_fast.train.trackers import check_installed


@contextmanager
def started(config: RunConfig, world: World, display: Display, command: str | None = None) -> Iterator[Run]:
    """A context with a run whose every part is built, resumed from its checkpoint, and described in its folder.

    The folder is locked until the context ends. If nobody named it, it is then removed, unless a step was trained or
    `RunFolder.keep` was called.

    Args:
        config: a checked configuration.
        world: the ranks.
        display: reports what is built.
        command: what started the run; None for this process's command line.

    Raises:
        UserError: any obstacle in the configuration, the data or the machine.
    """
    check_same_settings(config, world)
    check_installed(config, world)
    # The key depends only on the given configuration, so that a restart with fewer ranks finds the same folder.
    run_dir, restarted = choose_run_dir(config, world)
    with RunFolder(run_dir, remove_unused=world.is_main and config.run_dir is None) as folder:
        yield _start(config, world, display, command, folder, restarted=restarted)


def _start(
    config: RunConfig, world: World, display: Display, command: str | None, folder: RunFolder, *, restarted: bool
) -> Run:
    _occupy(folder, world, display)
    opened = find_start(config, folder, world, display, restarted=restarted)
    run = _build(config, world, display, folder, opened)
    # Again: it may not have existed before, and another run may have begun in it meanwhile.
    _occupy(folder, world, display)
    resume(run, opened)
    if world.is_main:
        folder.create()
    check_same_folder(folder.path, world)
    _occupy(folder, world, display)
    # Settings with which nothing is trained are not the run's.
    if world.is_main and not run.finished:
        folder.write_config(run.settings(), command)
        folder.write_json("environment.json", environment(world.device, world.size, command))
    introduce(run)
    return run


def _build(
    config: RunConfig, world: World, display: Display, folder: RunFolder, opened: checkpoint.Checkpoint | None
) -> Run:
    parts = build_parts(config, world, display, opened)
    if opened is None:
        check_head(config, parts.network, world)
    config = parts.config
    saver = Saver(
        folder.checkpoints,
        world,
        keep=config.runtime.keep_checkpoints,
        asynchronous=config.runtime.checkpoint_async,
    )
    total_steps = build.total_steps(config, parts.steps_per_epoch)
    return Run(parts=parts, world=world, folder=folder, display=display, saver=saver, total_steps=total_steps)


def _occupy(folder: RunFolder, world: World, display: Display) -> None:
    """Lock the folder against other runs, if it exists.

    Raises:
        UserError: another run uses it, or it cannot be written to; the same on all ranks.
    """
    problem = world.from_main(_problem(folder, display) if world.is_main else None)
    if problem is not None:
        raise UserError(problem)


def _problem(folder: RunFolder, display: Display) -> str | None:
    try:
        holder = folder.occupy(on_wait=display.note)
    except UserError as error:
        return str(error)
    if holder is None:
        return None
    return f"run_dir: {folder.path} is in use by {holder}; wait for it, or give each run a folder of its own"


# A GPU is seldom busy with fewer.
_FEW_IMAGES = 16
_MUCH_SLOWER = 2.0
_UNBALANCED = 3


def introduce(run: Run) -> None:
    """Print the table: model, data, steps, memory, device and switches."""
    config, world = run.config, run.world
    train, val = run.parts.sources["train"], run.parts.sources["val"]
    batch = f"{config.data.global_batch_size}"
    if world.data_size * config.optim.microbatches > 1:
        each = config.data.global_batch_size // world.data_size // config.optim.microbatches
        batch += f" = {world.data_size} ranks x {config.optim.microbatches} microbatches x {each}"
    chosen = "  ".join(
        f"{switch.name}={getattr(run.parts.speed, switch.name)}"
        for switch in SWITCHES.values()
        if switch.concerns(config.model.kind) and getattr(run.parts.speed, switch.name) != switch.reference
    )
    # A finished run may have more than are asked for now.
    asked = epochs(max(config.schedule.epochs, run.epoch(run.start_step)))
    rows = [
        ("model", f"{config.model.kind}, {human(run.parts.complexity.parameters)} parameters"),
        (
            "one image",
            f"{config.data.image_size} px, {human(run.parts.complexity.forward_flops, 'FLOP')} forward, "
            f"{human(run.parts.complexity.activations)} activations",
        ),
        *_trainable_row(run),
        ("training images", f"{len(train):,} in {len(train.classes)} classes"),
        ("validation images", f"{len(val):,}"),
        ("steps", f"{run.total_steps:,} ({asked} epochs of {run.parts.steps_per_epoch:,})"),
        ("global batch", batch),
        ("preprocessing", build.preprocessing(config)),
        ("memory per rank", _memory(run)),
        (
            "device",
            f"{device_name(world.device)}, {world.size} rank{'s' if world.size > 1 else ''}, {_threads(world)}"
            f"{_precision(run)}",
        ),
        ("switches", chosen or "all at their reference"),
        ("run folder", str(run.folder.path)),
    ]
    run.display.table(config.config_name, rows)
    for note in _notes(run):
        run.display.note(note)


def _threads(world: World) -> str:
    count = torch.get_num_threads()
    return "" if world.device.type == "cuda" else f"{count} thread{'s' if count > 1 else ''}, "


def _precision(run: Run) -> str:
    """The precision and, on a CPU, why it was chosen."""
    name = run.config.precision.name
    if run.world.device.type == "cuda" or not run.world.is_main:
        return name
    return f"{name} (bfloat16 is {build.race(run.config).ratio:.2g} times as fast as float32)"


def _slow_precision(run: Run) -> Iterator[str]:
    """A note if the precision is more than twice slower than another one here."""
    if run.world.device.type == "cuda" or not run.world.is_main or build.level(run.config).float8:
        return
    ratio, compute = build.race(run.config).ratio, build.compute_dtype(run.config)
    slower = {torch.bfloat16: 1 / ratio, torch.float32: ratio}.get(compute, 0.0)
    if slower > _MUCH_SLOWER:
        faster = "amp_bf16" if compute == torch.float32 else "fp32"
        yield (
            f"precision: a step takes {slower:.2g} times as long as with precision={faster} on this CPU; "
            "precision=auto takes the faster one"
        )


def _unbalanced(run: Run) -> Iterator[str]:
    config = run.config
    train = run.parts.sources["train"]
    if config.data.sampling != "uniform" or config.loss.class_weights != "none":
        return
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if counts.max() > _UNBALANCED * max(counts.min(), 1):
        yield (
            f"classes have {counts.min():,} to {counts.max():,} images; data.sampling=balanced shows all alike, "
            "schedule.best_metric=class_top1 judges by all alike"
        )


def _notes(run: Run) -> Iterator[str]:
    world, images = run.world, build.microbatch_size(run.config, run.world)
    if world.device.type == "cuda" and world.size > 1 and images < _FEW_IMAGES:
        yield (
            f"data.global_batch_size: {images} images at a time keep few GPUs busy; use fewer than {world.size} ranks, "
            "less accumulation, or a larger batch with a higher optim.lr"
        )
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 1
    if world.size == 1 and gpus > 1 and run.config.parallel.name == "auto":
        yield (
            f"parallel: one of {gpus} GPUs is used; torchrun --nproc_per_node {gpus} ... trains on all, and "
            "parallel=single says that one is meant"
        )
    yield from _slow_precision(run)
    yield from _unbalanced(run)
    if _emulates_bfloat16(run.config, world.device):
        yield (
            f"precision: {run.config.precision.name} is slow on this GPU, which has no units for bfloat16; "
            "use precision=amp_fp16"
        )
    if world.device.type == "cpu" and build.compute_dtype(run.config) == torch.float16:
        # torch has no fast float16 convolution for most CPUs: a step of a ResNet may take minutes.
        yield (
            f"precision: {run.config.precision.name} computes in float16, which CPUs do slowly, convolutions most of "
            "all; use precision=amp_bf16 or fp32"
        )
    if run.parts.speed.compile != "off":
        yield "speed.compile: compiling in the first step, which takes 20 to 100 s; speed.compile=off does not"
    elif world.device.type == "cuda" and run.config.speed.preset == "fast" and not build.has_compiler("cuda"):
        yield "speed.compile: off, because no C compiler or no Python.h was found; install gcc and python3-dev"
    elif build.level(run.config).float8 and not run.config.precision.fp8_emulate:
        yield (
            "precision: the scales and casts of fp8 are expected to take longer than its products save unless they are "
            "compiled; use speed.compile=blocks, or precision=amp_bf16"
        )
    # Not an error: a ladder may leave out the variant that sets a 16-bit precision, or run others without it.
    if run.parts.speed.gelu == "polynomial" and build.compute_dtype(run.config).itemsize > 2:
        yield f"speed.gelu: polynomial is for 16 bits; with precision={run.config.precision.name} torch's GELU is used"
    optim = run.config.optim
    if optim.ema_decay is not None and not optim.ema_warmup:
        # A recipe's decay is chosen for that recipe's number of steps.
        initial = optim.ema_decay**run.total_steps
        if initial > 0.01:
            yield (
                f"optim.ema_decay: after all {run.total_steps:,} steps the initial weights are still {initial:.0%} of "
                "the average, which is what is scored; use optim.ema_warmup=true, or a smaller decay"
            )


def _emulates_bfloat16(config: RunConfig, device: torch.device) -> bool:
    """Whether the products are in bfloat16 on a GPU before Ampere, whose tensor cores compute float16 only."""
    if device.type != "cuda" or build.level(config).float8 or build.compute_dtype(config) != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def _memory(run: Run) -> str:
    """What a rank's device has to hold, by the memory plan."""
    steps = run.config.optim.microbatches
    made = plan.MemoryPlan(run.config, run.world.device, run.world.data_size, len(run.classes))
    text = f"{human(made.state(steps), 'B')} for weights, gradients and optimizer"
    memory = plan.device_memory(run.config, run.world)
    return text if memory is None else f"{text}; {_at_the_peak(made, steps)} of {human(memory, 'B')}"


def _at_the_peak(made: plan.MemoryPlan, steps: int) -> str:
    try:
        return f"{human(made.peak(steps), 'B')} with activations"
    except UserError:
        # The number of microbatches was given.
        return "activations not known"


def _trainable_row(run: Run) -> list[tuple[str, str]]:
    if "all" in run.config.optim.trainable:
        return []
    trained = [parameter.numel() for parameter in run.parts.network.parameters() if parameter.requires_grad]
    names = ", ".join(run.config.optim.trainable)
    return [("trained", f"{names}: {human(sum(trained))} parameters in {len(trained)} tensors")]
