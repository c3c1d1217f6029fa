"""How long a ladder takes and what it can show, before it starts; if all variants are as fast as the first."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.folder import read_measurement
from pycls_fast.ledger.ladder.processes import ProcessResult, timing_arguments
from pycls_fast.ledger.ladder.work import Ledger
from pycls_fast.ledger.report.effects import best_resolution

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


def pace_of(seconds: float, timed: Mapping[str, Any], fed_step: float | None = None) -> Pace:
    """The pace of a variant, from the seconds of a process, and its record of mode=train; `fed_step` if it is known."""
    train = timed["train"]
    # The warm-up takes half as long as the timed steps.
    start = max(seconds - 1.5 * sum(map(sum, train["step_seconds_each"])), 0.0)
    # A forward pass is a third of a step, and each evaluation starts its own workers.
    evaluation_steps = timed["evaluated_images_per_run"] / train["images_per_step"] / 2
    step = train["step_seconds_p50"]
    return Pace(start, step, step if fed_step is None else fed_step, timed["steps_per_run"], evaluation_steps)


def announce(ledger: Ledger, timed: Mapping[str, Any], pace: Pace | None, say: Callable[[str], None]) -> None:
    """Say how long the rest takes and the smallest difference that it can show; nothing without a pace.

    Raises:
        UserError: the margin is smaller than one image.
    """
    images, margin = timed["evaluated_images"], ledger.settings.margin
    if ledger.settings.trains and images and margin < 100 / images:
        raise UserError(
            f"margin: {margin:g} points are less than one of {images:,} images; use "
            f"margin={math.ceil(2000 / images) / 10:g}, or more images"
        )
    if pace is None:
        return
    parts = {name: seconds for name, seconds in estimate(ledger, pace).items() if seconds > 0}
    for name, seconds in parts.items():
        say(f"{name}: {'at most ' if name == 'training' else ''}about {seconds / 60:.0f} min")
    runs = ledger.trainings()
    if ledger.settings.trains and runs and images:
        say(
            f"{runs} trainings, scored on {images:,} images, show differences of {best_resolution(images, runs):.2f} "
            "points at best; the first ones will say more"
        )
    left_out = f"; what {ledger.folder.path} already has is not counted" if ledger.folder.path.is_dir() else ""
    say(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({pace.step * 1e3:.0f} ms a step, {pace.steps:,} steps a run){left_out}"
    )


def show_plan(ledger: Ledger, say: Callable[[str], None]) -> None:
    """Print the variants of a ledger that is not open, and an estimate of the time for what its folder does not have.

    Raises:
        UserError: the reference does not run, or the margin is smaller than one image.
    """
    if ledger.settings.trains:
        ledger.plan_trainings()
    for variant in ledger.selection.variants():
        say(f"{variant.name}: {_what(ledger, variant)}")
    say("timing a few steps of the first variant for the estimate")
    with tempfile.TemporaryDirectory() as temporary:
        finished, timed = _measured(ledger, Path(temporary), "train")
        fed_step = None
        if ledger.settings.trains:
            fed_step = _measured(ledger, Path(temporary), "both")[1]["both"]["step_seconds_p50"]
    announce(ledger, timed, pace_of(finished.seconds, timed, fed_step), say)


def before_the_rest(ledger: Ledger, seconds: float | None, say: Callable[[str], None]) -> None:
    """Announce the rest of a ledger after its first timing, which took so long; None if an earlier start made it."""
    timed = read_measurement(ledger.folder.timing_file(ledger.selection.variants()[0], 0))
    announce(ledger, timed, None if seconds is None else pace_of(seconds, timed), say)


def _what(ledger: Ledger, variant: Variant) -> str:
    reason, ranks = ledger.selection.why_not(variant), variant.ranks or 1
    if reason is not None:
        return f"not run, {reason}"
    return " ".join(variant.overrides or ["the experiment as it is"]) + (f"  ({ranks} ranks)" if ranks > 1 else "")


def _measured(ledger: Ledger, folder: Path, mode: str) -> tuple[ProcessResult, dict[str, Any]]:
    """Time the reference briefly in a separate process; returns how it ended and its record.

    Raises:
        UserError: it failed.
    """
    first, file = ledger.selection.variants()[0], folder / f"{mode}.json"
    arguments = timing_arguments(first, file, steps=3, warmup_steps=2, seconds=_SECONDS, mode=mode)
    finished = ledger.process("time", first, arguments, log=file.with_suffix(".txt")).wait()
    if finished.status != 0:
        raise UserError(f"ladder: the reference '{first.name}' does not run: {finished.reason()}")
    return finished, json.loads(file.read_text(encoding="utf-8"))


def estimate(ledger: Ledger, pace: Pace) -> dict[str, float]:
    """Seconds by kind of measurement for what the folder does not have yet; the most that the trainings may take."""
    s, missing = ledger.settings, ledger.missing()
    turn = max(s.steps * pace.step, s.seconds) + max(s.warmup_steps * pace.step, s.seconds / 2)
    # On a CPU, concurrent runs share the cores.
    jobs = s.jobs if ledger.device == "cuda" else 1
    runs = math.ceil(missing["training"] / jobs) if s.trains else 0
    return {
        "timings": missing["timings"] * (pace.start + turn),
        "rounding": missing["rounding"] * (pace.start + ((s.numerics_steps or 0) + _FLOAT64_STEPS) * pace.fed_step),
        "gradients": missing["gradients"] * (pace.start + _GRADIENT_STEPS * pace.fed_step),
        "training": runs * (pace.start + (pace.steps + pace.evaluation_steps) * pace.fed_step),
    }
