"""The start of a run: its folder, its parts, the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.train import checkpoint
from pycls_fast.train.building import build_parts, check_head
from pycls_fast.train.display import Display
from pycls_fast.train.environment import environment
from pycls_fast.train.introduction import introduce
from pycls_fast.train.resume import choose_run_dir, find_start, resume
from pycls_fast.train.run import Run
from pycls_fast.train.run_folder import RunFolder
from pycls_fast.train.same_everywhere import check_same_folder, check_same_settings
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
    had_run = world.from_main(folder.has_run)
    if had_run:
        check_same_folder(folder.path, world)
    opened = find_start(config, folder, world, display, restarted=restarted)
    run = _build(config, world, display, folder, opened)
    if not had_run:
        _check_still_new(folder, world, display)
    resume(run, opened)
    if world.is_main:
        folder.create()
    if not had_run:
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
    return Run(**vars(parts), world=world, folder=folder, display=display, saver=saver, total_steps=total_steps)


def _occupy(folder: RunFolder, world: World, display: Display) -> None:
    """Lock the folder against other runs, if it exists.

    Raises:
        UserError: another run uses it, or it cannot be written to; the same on all ranks.
    """
    problem = world.from_main(_problem(folder, display) if world.is_main else None)
    if problem is not None:
        raise UserError(problem)


def _check_still_new(folder: RunFolder, world: World, display: Display) -> None:
    """Check that no other process began a run in the folder, which may not have existed, while this one was built.

    Raises:
        UserError: there is one; the same on all ranks.
    """
    _occupy(folder, world, display)
    if world.from_main(folder.has_run):
        raise UserError(
            f"run_dir: another run began in {folder.path} while this one started; give each run a folder of its own"
        )


def _problem(folder: RunFolder, display: Display) -> str | None:
    try:
        holder = folder.occupy(on_wait=display.note)
    except UserError as error:
        return str(error)
    if holder is None:
        return None
    return f"run_dir: {folder.path} is in use by {holder}; wait for it, or give each run a folder of its own"
