"""The start of a run: its folder, its parts, the checkpoint that it resumes from, the table of what is trained."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from pycls_fast import build
from pycls_fast.config import overrides_name
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import World
from pycls_fast.plan.memory_plan import MemoryPlan, device_memory
from pycls_fast.plan.race import Race, race
from pycls_fast.train.agreement import check_same_settings, on_main
from pycls_fast.train.assemble import build_parts
from pycls_fast.train.display import Display, duration, epochs, human, one_line
from pycls_fast.train.environment import Call, device_name, environment
from pycls_fast.train.folder import RunFolder, choose_run_dir
from pycls_fast.train.resume import find_start, resume
from pycls_fast.train.run_state import Run
from pycls_fast.train.saving import Saver


@contextmanager
def start_run(config: RunConfig, world: World, display: Display, call: Call | None = None) -> Iterator[Run]:
    """A context with a run that is built, resumed from its checkpoint if it has one, and described in its folder. The
    folder is locked until the end of the context, and then removed if it is new and no training began in it
    (`RunFolder.keep`)."""
    check_same_settings(config, world)
    settings = overrides_name() if call is None else call.settings
    # The key depends only on the given configuration, so that a restart with fewer ranks finds the same folder.
    run_dir, restarted = on_main(world, lambda: choose_run_dir(config, settings))
    with RunFolder(run_dir, is_new=world.is_main and config.run_dir is None) as folder:
        on_main(world, lambda: folder.lock(on_wait=display.note))
        check_same_folder(folder, world)
        resumed_from = find_start(config, folder, world, display, restarted=restarted)
        parts = build_parts(config, world, display, resumed_from)
        runtime = parts.config.runtime
        saver = Saver(folder.checkpoints, world, keep=runtime.keep_checkpoints, asynchronous=runtime.checkpoint_async)
        total_steps = build.total_steps(parts.config, parts.steps_per_epoch)
        run = Run(**vars(parts), world=world, folder=folder, display=display, saver=saver, total_steps=total_steps)
        resume(run, resumed_from)
        # Settings with which nothing is trained are not the run's.
        if world.is_main and not run.finished:
            command = None if call is None else call.code
            folder.write_config(run.settings(), command)
            folder.write_json("environment.json", environment(world.device, world.size, command))
        print_table(run)
        yield run


def check_same_folder(folder: RunFolder, world: World) -> None:
    """Refuse, on all ranks, a run folder that is not the same one for all, as each writes its part of the checkpoints
    there: every rank has to see rank 0's lock."""
    # NFS clients may believe for 60 s that a folder does not exist (acdirmax in nfs(5)), but only if they have looked
    # for it before; of a new folder, no other rank has. (`os.path.exists` never raises, unlike the method of `Path`.)
    seen = world.gather((os.path.exists(folder.lock_file), platform.node()))  # noqa: PTH110
    for rank, (is_seen, host) in enumerate(seen):
        if not is_seen:
            raise UserError(
                f"run_dir: {folder.path} on rank {rank} ({host}) is not the folder of rank 0 ({seen[0][1]}); give an "
                "absolute path to a folder that all nodes share"
            )


_MUCH_SLOWER = 2.0
_UNBALANCED = 3


def print_table(run: Run) -> None:
    """Print the table of what is trained, on what, how and for how long, and notes on what could be better."""
    config, world = run.config, run.world
    train, val = run.sources["train"], run.sources["val"]
    flops = human(run.complexity.forward_flops, "FLOP")
    ranks = f"{world.size} ranks, " if world.size > 1 else ""
    count = torch.get_num_threads()
    threads = "" if world.device.type == "cuda" else f"{count} thread{'s' * (count > 1)}, "
    rows = {
        "model": f"{config.model.called}, {human(run.complexity.parameters)} parameters, {flops} per image",
        "weights": config.weights or "random",
        "training images": f"{len(train):,} in {_classes(train)}",
        "validation images": _validation(val),
        "preprocessing": build.preprocessing(config),
        "training": _training(run),
        "optimizer": _optimizer(config),
        "steps": _steps(run),
        "time": _time(run),
        "memory": _memory(run),
        "device": f"{device_name(world.device)}, {ranks}{threads}{config.precision.name}",
        "switches": _switches(run),
        "run folder": str(run.folder.path),
    }
    run.display.table(config.config_name, [(name, text) for name, text in rows.items() if text])
    for note in _notes(run):
        run.display.note(note)


def _classes(train: Images) -> str:
    """The number of classes, and which have the most and the fewest images."""
    counts = train.class_counts()
    if counts.min() == counts.max():
        return f"{len(counts):,} classes, {counts.min():,} of each"
    most, fewest = (f"{one_line(train.classes[k])} ({counts[k]:,})" for k in (counts.argmax(), counts.argmin()))
    return f"{len(counts):,} classes, most of {most}, fewest of {fewest}"


def _validation(val: Images) -> str:
    """How many images there are, and where from: without others, those of a test split choose the best checkpoint."""
    # Of a long path the end says more.
    first = val.name(0)[-80:]
    return f"{len(val):,}, " + ("drawn at random" if val.drawn else f"from {one_line(first, 80)} on")


def _training(run: Run) -> str:
    """What will happen to which layers."""
    config, trained = run.config, [parameter.numel() for parameter in run.step.parameters]
    what = "all layers"
    if "all" not in config.optim.trainable:
        rank = config.optim.lora_rank
        names = ", ".join([*config.optim.trainable, *([] if rank is None else [f"the rest with LoRA of rank {rank}"])])
        what = f"{names}: {human(sum(trained))} parameters in {len(trained)} tensors"
    what = f"first a new head, fitted to the images' features, then {what}" if run.fits_head else what
    return what if config.distill.teacher is None else f"{what}, also taught by {config.distill.teacher}"


def _optimizer(config: RunConfig) -> str:
    """What a recipe does to the rate and the weights that other training programs would not."""
    optim, batch = config.optim, config.data.global_batch_size
    said = f"{optim.name}, rate {optim.scaled(batch).lr:.3g}"
    if optim.lr_batch_size not in (None, batch):
        said += f" (optim.lr={optim.lr:g} is for {optim.lr_batch_size} images)"
    if optim.layer_decay not in (None, 1.0):
        said += f", {optim.layer_decay:g} of it in each layer below"
    said += f", weight decay {optim.weight_decay:g}" if optim.weight_decay else ""
    return said if optim.ema_decay is None else f"{said}, moving average {optim.ema_decay:g}"


def _steps(run: Run) -> str:
    config, world = run.config, run.world
    batch = f"{config.data.global_batch_size}"
    if world.data_size * config.optim.microbatches > 1:
        each = config.data.global_batch_size // world.data_size // config.optim.microbatches
        batch += f" = {world.data_size} ranks x {config.optim.microbatches} microbatches x {each}"
    # A finished run may have more than are asked for now.
    whole = epochs(run.epoch(max(run.total_steps, run.start_step)))
    return f"{run.total_steps:,} of {batch} images ({whole} epochs of {run.steps_per_epoch:,})"


def _time(run: Run) -> str | None:
    """Roughly how long the steps and evaluations take; None if that cannot be known in advance."""
    raced = _raced(run.config, run.world)
    if raced is None or run.world.size > 1:
        return None
    steps = range(run.start_step, run.total_steps)
    images = len(steps) * run.config.data.global_batch_size
    # A forward pass is a third of a step.
    every = build.steps_between_evaluations(run.config, run.steps_per_epoch)
    averaged = 1 if run.step.ema is None else 2
    images += len(steps) // every * averaged * len(run.sources["val"]) // 3
    seconds = images * raced.seconds_per_image
    if seconds < 60:
        return "a few minutes at most"
    return f"about {duration(seconds) if seconds > 7200 else f'{seconds / 60:.0f} min'}"


def _switches(run: Run) -> str:
    """The switches that the user has set; config.yaml has all."""
    speed = run.config.speed
    chosen = [f"{name}={value}" for name, value in speed.by_hand.items()]
    return "  ".join(chosen if speed.preset == "fast" else [speed.preset, *chosen])


def _notes(run: Run) -> Iterator[str]:
    """Notes on settings that are allowed, but slower or worse than others."""
    config, world, optim = run.config, run.world, run.config.optim
    on_gpu = world.device.type == "cuda"
    gpus = torch.cuda.device_count() if on_gpu else 1
    if world.size == 1 and gpus > 1 and config.parallel.name == "auto":
        yield (
            f"parallel: only one of {gpus} GPUs is used; use torchrun --nproc_per_node {gpus} ... for all of them, or "
            "parallel=single to stay with one"
        )
    if (raced := _raced(config, world)) is not None:
        computes_in_16_bits = build.compute_dtype(config) == torch.bfloat16
        faster, slower = ("fp32", 1 / raced.ratio) if computes_in_16_bits else ("amp_bf16", raced.ratio)
        if slower > _MUCH_SLOWER:
            yield (
                f"precision: a step takes {slower:.2g} times as long as with precision={faster} on this CPU; "
                "precision=auto chooses the faster one"
            )
    train = run.sources["train"]
    counts = train.class_counts()
    by_class = config.data.sampling != "uniform" or config.loss.class_weights != "none"
    if not by_class and train.label_sets is None and counts.max() > _UNBALANCED * max(counts.min(), 1):
        yield (
            f"classes have {counts.min():,} to {counts.max():,} images; data.sampling=balanced shows all equally "
            "often, and with schedule.best_metric=class_top1 all count equally"
        )
    if train.label_sets is not None and (train.label_sets.sum(axis=1) == 1).all():
        yield (
            f"data.label_separator: every image has exactly one label, such as {one_line(train.classes[0])}; if labels "
            "are separated by other characters, give these"
        )
    if run.switches.compile != "off":
        yield "speed.compile: the first step compiles the network, which takes 20 to 100 s; speed.compile=off avoids it"
    elif on_gpu and config.speed.preset == "fast" and not build.has_compiler("cuda"):
        yield "speed.compile: off, because no C compiler or no Python.h was found; install gcc and python3-dev"
    if optim.ema_decay is not None and not optim.ema_warmup:
        # A recipe's decay is chosen for that recipe's number of steps; `finetune` wants a fifth after 160.
        initial = optim.ema_decay**run.total_steps
        if initial > 0.25:
            yield (
                f"optim.ema_decay: after all {run.total_steps:,} steps the initial weights are still {initial:.0%} of "
                "the average, and it is the average that is scored; use optim.ema_warmup=true, or a smaller decay"
            )


def _raced(config: RunConfig, world: World) -> Race | None:
    """How fast this CPU computes in float32 and bfloat16; None on a GPU, or if the run uses neither."""
    is_raced = build.compute_dtype(config) in (torch.float32, torch.bfloat16) and not build.level(config).float8
    return race(config) if world.device.type == "cpu" and world.is_main and is_raced else None


def _memory(run: Run) -> str:
    """What each rank's device has to hold according to the memory plan."""
    steps = run.config.optim.microbatches
    made = MemoryPlan(run.config, run.world, len(run.classes))
    average = "" if run.config.optim.ema_decay is None else " their average,"
    text = f"{human(made.state(steps), 'B')} for weights,{average} gradients and optimizer"
    memory = device_memory(run.config, run.world)
    if memory is None:
        return text
    # What activations take is not known if the number of microbatches was given.
    with suppress(UserError):
        text += f"; {human(made.peak(steps), 'B')} with activations"
    return f"{text} out of {human(memory, 'B')}"
