"""Resuming: which checkpoint a run starts from, and which settings may differ from the saved run's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pycls_fast.config import command_alone, is_command, scheduler
from pycls_fast.config.keys import as_typed, flat
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sampling import order_of
from pycls_fast.errors import UserError, first_few, refuse
from pycls_fast.files import user_path
from pycls_fast.parallel.world import World
from pycls_fast.reading import SavedState
from pycls_fast.speed import SWITCHES
from pycls_fast.train import checkpoint, saving
from pycls_fast.train.checkpoint import State
from pycls_fast.train.display import Display, epochs
from pycls_fast.train.environment import environment_command, program_words
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.run_state import Run
from pycls_fast.train.validation import early_stop

Changed = dict[str, tuple[Any, Any]]
"""Old and new values by key."""

# Settings that must equal the checkpoint's: the position in the data and the saved tensors depend on them.
_SAME_ON_RESUME = (
    "seed",
    "model",
    "data.global_batch_size",
    "data.image_size",
    "data.shuffle_buffer",
    "data.sampling",
    "data.split_seed",
    "data.folds",
    "data.fold",
    "data.group_by",
    "augment.repeats",
    "optim.name",
    "optim.ema_decay",
    "optim.trainable",
    "optim.lora_rank",
)
_SPLIT = {"data.split_seed", "data.folds", "data.fold", "data.group_by"}
# Settings that may differ without a note, except for those of the next list.
_FREE_ON_RESUME = (
    "config_name",
    "run_dir",
    "resume",
    "runtime",
    "parallel",
    "speed",
    "trackers",
    "callbacks",
    "schedule.max_steps",
)
_AFFECTS_RESULT = (
    "parallel.compression",
    "parallel.sync_batchnorm",
    *(f"speed.{switch.name}" for switch in SWITCHES.values() if switch.numerics == "training"),
)


def find_start(
    config: RunConfig, folder: RunFolder, world: World, display: Display, *, restarted: bool = False
) -> checkpoint.Checkpoint | None:
    """Open the checkpoint that the configuration says to resume from; None for a new run. All ranks call this.

    A run that was resumed from another folder's checkpoint resumes from its own newest one when it is started again, so
    that the same command works after every stop; so does one that torchrun `restarted` after a rank failed. If `resume`
    names a checkpoint of the run's own folder, the run goes back to that one, but not again in a job that Slurm has
    requeued.

    Raises:
        UserError: a checkpoint is missing or damaged, or the folder holds a run although `resume=never`.
    """
    named = _named(config)
    goes_on = named is not None and not restarted and _was_resumed_from(folder, world, named)
    if restarted or goes_on or config.resume == "auto":
        own = checkpoint.newest(folder.checkpoints, display.warn, world)
        if own is not None and goes_on:
            before = f"this run was resumed from {named} before"
            display.note(f"resume: {before}; it continues from its own newest checkpoint")
        if own is not None:
            return own.require(SavedState)
        # Only rank 0 checks, here and below: by the time another rank looks, this run's own files may be there.
        if world.from_main(world.is_main and any(folder.records("checkpoint"))):
            raise UserError(
                f"run_dir: {folder.path} has records of checkpoints, but {folder.checkpoints} holds none; bring them "
                "back (is the disk mounted?), or start again in another run_dir"
            )
    elif config.resume == "never" and world.from_main(world.is_main and folder.has_run):
        raise UserError(f"run_dir: {folder.path} already holds a run; choose another or use resume=auto")
    if named is None:
        return None
    try:
        found = checkpoint.open_checkpoint(named, world)
    except UserError as error:
        raise UserError(*(f"resume: {line}" for line in error.lines)) from error
    return found.require(SavedState)


def resume(run: Run, resumed_from: checkpoint.Checkpoint | None) -> None:
    """Load the checkpoint into a run that is built, and bring its folder to the same step; or begin at step 0."""
    if resumed_from is None:
        if run.world.is_main:
            run.folder.create()
            # Killed before its first checkpoint: start again from step 0.
            if dropped := run.folder.drop_records_after(0):
                run.display.note(f"run_dir: no checkpoint was saved; it starts again, without {dropped} old records")
        return
    path = resumed_from.path
    changed = _check_resumable(run, path, resumed_from.plain)
    run.load_state(resumed_from)
    run.start_step = resumed_from.plain["step"]
    if path.resolve().parent == run.folder.checkpoints.resolve():
        run.saved_step = run.start_step
    run.seconds_before = resumed_from.plain["seconds"]
    if run.world.is_main:
        # A checkpoint named by its path may be resumed in a new folder.
        run.folder.create()
        for aside in saving.set_aside(run.folder.checkpoints, run.start_step):
            run.display.warn(f"{aside.name}: a later checkpoint than the one resumed from; set aside")
        run.folder.drop_records_after(run.start_step)
    nothing_left = run.world.from_main(_nothing_left(run) if run.world.is_main else None)
    if nothing_left is not None:
        run.total_steps = run.start_step
    if run.finished:
        run.display.note(f"nothing to train: {nothing_left}; the run's settings and records stay as they are")
        return
    if run.world.is_main:
        asked, about = str(_named(run.config) or run.config.resume), {"path": str(path), "world_size": run.world.size}
        run.add_record("event", run.start_step, event="resumed", asked=asked, changed=changed, **about)
    _print_changes(run, changed, resumed_from.plain["world_size"])
    run.display.note(f"resumed from {path} at step {run.start_step}, epoch {run.epoch(run.start_step):.2f}")


def _nothing_left(run: Run) -> str | None:
    """Why no step follows the checkpoint; None if some do. On the main rank."""
    done, asked = run.start_step, run.total_steps
    stopped = early_stop(run)
    if done < asked and stopped is None:
        return None
    why = "early stopping ended the run" if done < asked else f"{asked:,} were asked for"
    # Fewer do not undo steps.
    return f"{epochs(run.epoch(done))} epochs ({done:,} steps) are done, and {why}"


def _named(config: RunConfig) -> Path | None:
    return None if config.resume in ("auto", "never") else user_path(config.resume).absolute()


def _was_resumed_from(folder: RunFolder, world: World, named: Path) -> bool:
    """Whether an earlier process of this run resumed from this checkpoint, of another folder or in an earlier start of
    this job; the same on all ranks."""
    is_own = named.parent.resolve() == folder.checkpoints.resolve()
    if is_own and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return False
    asked = (record.get("asked") for record in folder.records() if record.get("event") == "resumed")
    return world.from_main(world.is_main and str(named) in asked)


def _check_resumable(run: Run, path: Path, state: State) -> Changed:
    """The settings that differ from the checkpoint's and affect the result: its value and this run's by key."""
    before, now = flat(state["config"]), flat(run.config.model_dump(mode="json"))
    changed = {key: (before.get(key), now.get(key)) for key in sorted(before | now) if before.get(key) != now.get(key)}
    same = (*_SAME_ON_RESUME, *(f"optim.{key}" for key in run.config.optim.state_keys))
    fixed = {key: pair for key, pair in changed.items() if _under(key, same)}
    wrong = [
        f"{key}: {as_typed(new)} now, but {as_typed(old)} when {path} was saved; set it back, or start again in "
        "another run_dir"
        for key, (old, new) in fixed.items()
    ]
    wrong += _data_differs(run, path, state, reported=fixed.keys())
    if wrong and "config_name" in changed:
        # In place of the settings that follow from it.
        was, name = changed["config_name"]
        differs = first_few([line.partition(":")[0] for line in wrong], 3)
        wrong = [
            f"{'run_dir' if _named(run.config) is None else 'resume'}: {path} is of the experiment {was}, and this is "
            f"{name}, which differs in {differs}; use --config-name {was}, or another run_dir"
        ]
    refuse(wrong)
    return {key: pair for key, pair in changed.items() if not _under(key, _FREE_ON_RESUME) or key in _AFFECTS_RESULT}


def _data_differs(run: Run, path: Path, state: State, *, reported: Collection[str]) -> Iterator[str]:
    """Yield a line if the training images, or their order, are not those of the checkpoint.

    Another split or sampling, if it is reported with the settings, explains other images or another order. How the
    order was chosen (`data.shuffle`) does not matter.
    """
    train, ordered, start_again = run.sources["train"], state["order"], "or start again in another run_dir"
    same = state["train_images"] == len(train) and tuple(state["classes"]) == run.classes
    # The same images may have names in one layout and numbers in another.
    before, now = state["train_names"], run.train_names
    same_names = before == now or before.partition("-")[0] != now.partition("-")[0]
    if not same or not (same_names or _SPLIT & set(reported)):
        yield (
            f"data.root: the {len(train)} training images in {len(run.classes)} classes are not the "
            f"{state['train_images']} in {len(state['classes'])} of when {path} was saved, or in another order; use "
            f"the same files and data.source, {start_again}"
        )
    elif "data.sampling" not in reported and ordered != (order := order_of(train, run.config.data)[0]):
        way_out = "use data.shuffle=full" if ordered == "full" else "use the same shards and data.shuffle"
        yield (
            f"data.shuffle: the order of the images is {order} now, but {ordered} when {path} was saved; {way_out}, "
            f"{start_again}"
        )


def _print_changes(run: Run, changed: Changed, world_size: int) -> None:
    for key, (old, new) in changed.items():
        run.display.note(f"changed since the checkpoint: {key} {as_typed(old)} -> {as_typed(new)}")
    if world_size != run.world.size:
        run.display.note(f"changed since the checkpoint: ranks {world_size} -> {run.world.size}")


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def resume_notes(run: Run) -> list[str]:
    """The command that resumes the run, and what it leaves out."""
    notes = [f"resume with: {_command(run)}"]
    if command_alone() is not None:
        notes.append("that resumes only this run of the sweep; restart the other unfinished runs, too")
    return notes


def _command(run: Run) -> str:
    if not is_command():
        return f"the same configuration, run_dir={run.folder.path} and resume=auto"
    # As typed: outside of an activated environment, `python` is another one or none.
    interpreter, alone = sys.orig_argv[0], command_alone()
    command = environment_command(interpreter)
    if alone is not None:
        # Only this run of a sweep: the whole sweep would start again, or be refused because of the folder.
        command = shlex.join([interpreter, *program_words(), *alone])
    if run.config.run_dir is None or alone is not None:
        command += f" {shlex.quote(f'run_dir={run.folder.path}')}"
    if run.config.resume != "auto":
        # With any other value it would start from where this run first started, or refuse the folder.
        command += " resume=auto"
    if run.world.size > 1 and not scheduler.is_task():
        nodes = max(1, run.world.size // int(os.environ.get("LOCAL_WORLD_SIZE", run.world.size)))
        each = run.world.size // nodes
        launcher = f"torchrun --nproc_per_node {each}" + (
            f" --nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:PORT" if nodes > 1 else ""
        )
        command = command.replace(f"{shlex.join([interpreter, '-u'])} ", f"{launcher} ", 1)
    return command
