"""A dry run of a ladder: its arms, and an estimate of the time from a few steps of the first one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.ledger import commands
from pycls_fast.ledger.estimate import Pace, estimate
from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.processes import ProcessResult
from pycls_fast.ledger.runner import Ledger
from pycls_fast.speed import SwitchName
from pycls_fast.train.display import Display

# A brief timing; its warm-up lasts half of this or more.
_SECONDS = 1.0

Compose = Callable[[Sequence[str]], RunConfig]


def show_plan(ledger: Ledger, config: RunConfig, compose: Compose, display: Display) -> None:
    """Print the arms of a ledger and an estimate of the time for what its folder does not have yet.

    Args:
        ledger: not open; arms that are refused have been left out.
        config: the experiment.
        compose: composes the experiment with the overrides of an arm.
        display: prints.

    Raises:
        UserError: the reference arm does not run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _try_alone(ledger, display, folder)
        for arm in ledger.selection.arms():
            display.note(f"{arm.name}: {_what(ledger, arm)}")
        display.note("timing a few steps of the first rung for the estimate")
        pace = _pace(ledger, config, compose, folder)
    parts = {name: seconds for name, seconds in estimate(ledger, pace).items() if seconds > 0}
    for name, seconds in parts.items():
        display.note(f"{name}: about {seconds / 60:.0f} min")
    left_out = f"; what {ledger.folder.path} already has is not counted" if ledger.folder.path.is_dir() else ""
    display.note(
        f"in total about {sum(parts.values()) / 60:.0f} min if every rung is as fast as the first "
        f"({pace.step * 1e3:.0f} ms a step, {pace.steps:,} steps a run){left_out}"
    )


def _try_alone(ledger: Ledger, display: Display, folder: Path) -> None:
    alone = ledger.selection.alone()
    if alone:
        display.note("trying each rung on its own, to find those that cannot be part of 'everything' here")
    for arm in alone:
        finished, _ = _few_steps(ledger, arm, folder)
        if finished.status != 0:
            ledger.selection.exclude(arm, finished)


def _what(ledger: Ledger, arm: Arm) -> str:
    reason = ledger.selection.why_not(arm)
    if reason is not None:
        return f"not run, {reason}"
    return " ".join(arm.overrides or ["the experiment as it is"]) + (f"  ({arm.ranks} ranks)" if arm.ranks > 1 else "")


def _pace(ledger: Ledger, config: RunConfig, compose: Compose, folder: Path) -> Pace:
    first = ledger.selection.arms()[0]
    finished, record = _measured(ledger, first, folder, "train")
    start, step = _start(finished, record), record["train"]["step_seconds_p50"]
    compiling, compiled = _compiling(ledger, compose, folder, start)
    fed_step, core_seconds, evaluation_steps = step, 0.0, 0.0
    if ledger.settings.seeds:
        _, fed = _measured(ledger, first, folder, "both")
        batch, fed_step = fed["both"]["images_per_step"], fed["both"]["step_seconds_p50"]
        threads = config.runtime.threads or max(build.cores() // first.ranks, 1)
        # On a GPU's host each rank has one busy thread besides its loader's workers.
        busy = first.ranks * (threads if ledger.device == "cpu" else 1)
        core_seconds = step * busy + batch / fed["input_pipeline"]["images_per_second_per_core"]
        # A forward pass is a third of a step, and each evaluation starts its own workers.
        evaluation_steps = fed.get("evaluated_images_per_run", 0) / batch / 2
    return Pace(
        start=start,
        step=step,
        fed_step=fed_step,
        core_seconds=core_seconds,
        cores=build.cores(),
        steps=record["steps_per_run"],
        evaluation_steps=evaluation_steps,
        compiling=compiling,
        compiled=compiled,
    )


def _compiling(ledger: Ledger, compose: Compose, folder: Path, start: float) -> tuple[float, frozenset[str]]:
    """How much longer processes of compiled arms take, and the names of these arms.

    Zero if the first arm, with whose `start` in seconds they are compared, is one of them.
    """
    arms = ledger.selection.runnable()
    compiled = [arm for arm in arms if _compiles(arm, compose, torch.device(ledger.device))]
    if not compiled or compiled[0] == arms[0]:
        return 0.0, frozenset()
    finished, file = _few_steps(ledger, compiled[0], folder)
    if finished.status != 0:
        return 0.0, frozenset()
    # Half, because only an arm's first process finds nothing in the compiler's cache on disk.
    longer = max(_start(finished, json.loads(file.read_text(encoding="utf-8"))) - start, 0.0) / 2
    return longer, frozenset(arm.name for arm in compiled)


def _compiles(arm: Arm, compose: Compose, device: torch.device) -> bool:
    if arm.tree is not None:
        # Its own code may have other keys.
        return False
    try:
        config = compose(arm.overrides)
        device = torch.device("cpu") if config.runtime.device == "cpu" else device
        return build.switches(config, device)[SwitchName.COMPILE] != "off"
    except UserError:
        # A combination of rungs that the ledger will mark.
        return False


def _start(finished: ProcessResult, record: dict[str, Any]) -> float:
    """Seconds of a timing's process apart from its steps, of which the warm-up takes half as long as the timed ones."""
    return max(finished.seconds - 1.5 * sum(map(sum, record["train"]["step_seconds_each"])), 0.0)


def _measured(ledger: Ledger, arm: Arm, folder: Path, mode: str) -> tuple[ProcessResult, dict[str, Any]]:
    """Time the reference arm briefly; returns how the process ended and its record.

    Raises:
        UserError: it failed.
    """
    finished, file = _few_steps(ledger, arm, folder, mode)
    if finished.status != 0:
        raise UserError(f"ladder: the reference '{arm.name}' does not run: {finished.reason()}")
    return finished, json.loads(file.read_text(encoding="utf-8"))


def _few_steps(ledger: Ledger, arm: Arm, folder: Path, mode: str = "train") -> tuple[ProcessResult, Path]:
    """Time an arm briefly in a separate process; returns how it ended and the file of its record."""
    file = folder / f"{arm.slug}.{mode}.json"
    arguments = commands.timing(arm, file, steps=3, warmup_steps=2, seconds=_SECONDS, mode=mode)
    return ledger.process("time_net", arm, arguments, ranks=arm.ranks, log=file.with_suffix(".txt")).wait(), file
