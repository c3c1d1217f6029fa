"""Where a run lives and where it goes on from: folders, restarts, and what may differ from the run that saved."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World, first_of_launch
from pycls_fast.paths import timestamp, user_path
from pycls_fast.train import checkpoint
from pycls_fast.train.display import Display
from pycls_fast.train.run_folder import RunFolder

if TYPE_CHECKING:
    from pycls_fast.train.run import Run

# What a checkpoint has to have in common with the run that goes on from it: the position in the data depends on it.
_SAME_ON_RESUME = (
    "seed",
    "model",
    "data.global_batch_size",
    "data.image_size",
    "data.shuffle",
    "data.shuffle_buffer",
    "data.sampling",
    "data.split_seed",
    "augment.repeats",
    "optim.name",
    "optim.ema_decay",
    "optim.min_factored",
    "optim.trainable",
)
# What may differ without a word.
_FREE_ON_RESUME = ("config_name", "run_dir", "resume", "runtime", "parallel", "speed", "schedule.max_steps")


def choose_run_dir(config: RunConfig, world: World) -> tuple[Path, bool]:
    """The run's folder, and whether torchrun started this run before: then it is the folder of that time."""
    return world.from_main(_choose(config) if world.is_main else (Path(), False))


def _choose(config: RunConfig) -> tuple[Path, bool]:
    path = _new_folder(config.config_name) if config.run_dir is None else user_path(config.run_dir)
    # Several runs of one launch (a sweep) differ in their configuration.
    name = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    # The token tells a given folder of this start from the same one of an earlier start.
    text, restarted = first_of_launch(f"run_dir/{name}", f"{secrets.token_hex(4)} {path}")
    if restarted and config.run_dir is None:
        path.rmdir()
    return Path(text.partition(" ")[2]), restarted


def _new_folder(experiment: str) -> Path:
    """Made here, so that of two runs that start in the same second each has its own."""
    time_of_start = timestamp()
    for suffix in ("", *(f"~{number}" for number in range(2, 10_000))):
        path = Path("runs") / experiment / f"{time_of_start}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"run_dir: {path} cannot be made ({error.strerror}); give another") from error
        return path
    raise AssertionError("10,000 runs in a second")


def find_start(
    config: RunConfig, folder: RunFolder, world: World, display: Display, *, restarted: bool = False
) -> checkpoint.Checkpoint | None:
    """The checkpoint that the configuration says to go on from, open; None where the run begins. All ranks call this.

    A run that went on from a checkpoint of another folder goes on from its own newest one when it is started again, so
    that the same command can be given after every stop. A checkpoint of its own, named, is where it goes back to.

    Args:
        config: of the run.
        folder: of the run, kept for it alone if it is there.
        world: the ranks.
        display: told of what is passed over.
        restarted: by torchrun, after a rank failed. Then the newest checkpoint of this run comes first, whatever
            the configuration says of the first start.

    Raises:
        UserError: a checkpoint that is missing or damaged, or a folder that has a run where it must have none.
    """
    setting, named = config.resume, _named(config)
    opened = None
    if restarted or setting == "auto":
        opened = checkpoint.newest(folder.checkpoints, display.warn, world)
    # Asked of rank 0: by the time another rank looks, this run's own files may be there.
    elif setting == "never" and world.from_main(folder.has_run):
        raise UserError(f"run_dir: {folder.path} already holds a run; choose another or use resume=auto")
    elif named is not None and _has_gone_on_from(folder, world, named):
        opened = checkpoint.newest(folder.checkpoints, display.warn, world)
        if opened is not None:
            display.note(f"resume: this run has gone on from {named} before; now from its own newest checkpoint")
    if opened is None and named is not None:
        opened = checkpoint.open_checkpoint(named, world)
    return opened


def resume(run: Run, opened: checkpoint.Checkpoint | None) -> None:
    """Go on from what `find_start` gave.

    Raises:
        UserError: a checkpoint of another run.
    """
    if opened is None:
        if run.world.is_main and run.folder.has_run:
            # Killed before its first checkpoint: all of it is done again.
            run.folder.create()
            run.folder.forget_after(0)
        return
    path = opened.path
    _check_resumable(run, path, opened.plain)
    run.load_state(opened)
    run.start_step = opened.plain["step"]
    if path.resolve().parent == run.folder.checkpoints.resolve():
        run.saved_step = run.start_step
    run.seconds_before = opened.plain["seconds"]
    if run.world.is_main:
        # A checkpoint named by its path may go on in a new folder.
        run.folder.create()
        for aside in checkpoint.set_aside(run.folder.checkpoints, run.start_step):
            run.display.warn(f"{aside.name}: a later checkpoint that this run does not go on from; set aside")
        run.folder.forget_after(run.start_step)
        run.folder.add_record(
            "event",
            run.start_step,
            run.epoch(run.start_step),
            event="resumed",
            path=str(path),
            asked=str(_named(run.config) or run.config.resume),
        )
    run.display.note(f"resumed from {path} at step {run.start_step}, epoch {run.epoch(run.start_step):.2f}")


def _named(config: RunConfig) -> Path | None:
    return None if config.resume in ("auto", "never") else user_path(config.resume).absolute()


def _has_gone_on_from(folder: RunFolder, world: World, named: Path) -> bool:
    """Whether a process before this one opened a checkpoint of another folder by this name; the same on all ranks."""
    if named.parent.resolve() == folder.checkpoints.resolve():
        return False
    asked = (record.get("asked") for record in folder.records() if record.get("event") == "resumed")
    return world.from_main(world.is_main and str(named) in asked)


def _check_resumable(run: Run, path: Path, state: checkpoint.State) -> None:
    before, now = _flat(state["config"]), _flat(run.config.model_dump(mode="json"))
    changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    wrong = [
        f"{key}: {new} now, but {old} when {path} was saved; set it back, or start anew in another run_dir"
        for key, (old, new) in sorted(changed.items())
        # A key that is younger than the checkpoint says nothing.
        if _under(key, _SAME_ON_RESUME) and key in before
    ]
    if state["train_images"] != len(run.sources["train"]) or tuple(state["classes"]) != run.classes:
        wrong.append(
            f"data.root: {len(run.sources['train'])} training images in {len(run.classes)} classes now, but "
            f"{state['train_images']} in {len(state['classes'])} (or other class names) when {path} was saved"
        )
    if wrong:
        raise UserError(*wrong)
    for key, (old, new) in sorted(changed.items()):
        if not _under(key, _FREE_ON_RESUME):
            run.display.note(f"changed since the checkpoint: {key} {old} -> {new}")


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
