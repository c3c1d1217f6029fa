"""A dry run of a ladder: its variants, and roughly how long the rest takes if all are as fast as the first."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.plan import slug
from pycls_fast.ledger.ladder.processes import ProcessResult, timing_arguments
from pycls_fast.ledger.ladder.work import Ledger
from pycls_fast.train.display import Display

# A brief timing; its warm-up lasts half of this or more.
_SECONDS = 1.0
# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `mode=gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


@dataclass(frozen=True)
class Pace:
    """How long the parts of the work take, in seconds.

    Attributes:
        start: a process, apart from its steps: imports, building, writing.
        step: a training step on images that are on the device.
        fed_step: a training step together with the loading of its images.
        steps: training steps of a run.
        evaluation_steps: as many steps take as long as all evaluations of a run.
    """

    start: float
    step: float
    fed_step: float
    steps: int
    evaluation_steps: float = 0.0


def show_plan(ledger: Ledger, display: Display) -> None:
    """Print the variants of a ledger and an estimate of the time for what its folder does not have yet.

    Args:
        ledger: not open; variants that are refused have been left out.
        display: prints.

    Raises:
        UserError: the reference does not run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if ledger.settings.trains:
            ledger.plan_trainings()
        for variant in ledger.selection.variants():
            display.note(f"{variant.name}: {_what(ledger, variant)}")
        display.note("timing a few steps of the first variant for the estimate")
        pace = _pace(ledger, folder)
    parts = {name: seconds for name, seconds in estimate(ledger, pace).items() if seconds > 0}
    for name, seconds in parts.items():
        display.note(f"{name}: about {seconds / 60:.0f} min")
    left_out = f"; what {ledger.folder.path} already has is not counted" if ledger.folder.path.is_dir() else ""
    display.note(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({pace.step * 1e3:.0f} ms a step, {pace.steps:,} steps a run){left_out}"
    )


def _what(ledger: Ledger, variant: Variant) -> str:
    reason, ranks = ledger.selection.why_not(variant), variant.ranks or 1
    if reason is not None:
        return f"not run, {reason}"
    return " ".join(variant.overrides or ["the experiment as it is"]) + (f"  ({ranks} ranks)" if ranks > 1 else "")


def _pace(ledger: Ledger, folder: Path) -> Pace:
    finished, record = _measured(ledger, folder, "train")
    step = record["train"]["step_seconds_p50"]
    fed_step, evaluation_steps = step, 0.0
    if ledger.settings.trains:
        _, fed = _measured(ledger, folder, "both")
        fed_step = fed["both"]["step_seconds_p50"]
        # A forward pass is a third of a step, and each evaluation starts its own workers.
        evaluation_steps = fed.get("evaluated_images_per_run", 0) / fed["both"]["images_per_step"] / 2
    # The warm-up takes half as long as the timed steps.
    start = max(finished.seconds - 1.5 * sum(map(sum, record["train"]["step_seconds_each"])), 0.0)
    return Pace(start, step, fed_step, record["steps_per_run"], evaluation_steps)


def _measured(ledger: Ledger, folder: Path, mode: str) -> tuple[ProcessResult, dict[str, Any]]:
    """Time the reference briefly; returns how the process ended and its record.

    Raises:
        UserError: it failed.
    """
    first = ledger.selection.variants()[0]
    finished, file = _few_steps(ledger, first, folder, mode)
    if finished.status != 0:
        raise UserError(f"ladder: the reference '{first.name}' does not run: {finished.reason()}")
    return finished, json.loads(file.read_text(encoding="utf-8"))


def _few_steps(ledger: Ledger, variant: Variant, folder: Path, mode: str) -> tuple[ProcessResult, Path]:
    """Time a variant briefly in a separate process; returns how it ended and the file of its record."""
    file = folder / f"{slug(variant)}.{mode}.json"
    arguments = timing_arguments(variant, file, steps=3, warmup_steps=2, seconds=_SECONDS, mode=mode)
    log = file.with_suffix(".txt")
    return ledger.process("time", variant, arguments, ranks=variant.ranks or 1, log=log).wait(), file


def estimate(ledger: Ledger, pace: Pace) -> dict[str, float]:
    """Seconds by kind of measurement for what the folder does not have yet."""
    s, selection, folder = ledger.settings, ledger.selection, ledger.folder
    timings = [folder.timing_file(variant, number) for variant in selection.runnable() for number in range(s.rounds)]
    rounding = [folder.numerics_file(v) for v in ledger.with_rounding()] if s.numerics_steps is not None else []
    gradients = [folder.gradients_file(selection.variants()[0])] if s.gradients else []
    turn = max(s.steps * pace.step, s.seconds) + max(s.warmup_steps * pace.step, s.seconds / 2)
    # On a CPU, concurrent runs share the cores.
    jobs = s.jobs if ledger.device == "cuda" else 1
    planned = ledger.crossed.planned() if ledger.crossed is not None else []
    runs = math.ceil(sum(not run.is_done for run in planned) / jobs)
    return {
        "timings": _missing(timings) * (pace.start + turn),
        "rounding": _missing(rounding) * (pace.start + ((s.numerics_steps or 0) + _FLOAT64_STEPS) * pace.fed_step),
        "gradients": _missing(gradients) * (pace.start + _GRADIENT_STEPS * pace.fed_step),
        "training": runs * (pace.start + (pace.steps + pace.evaluation_steps) * pace.fed_step),
    }


def _missing(files: list[Path]) -> int:
    return sum(not file.is_file() for file in files)
