"""How long a ladder takes, if all variants are as fast as the first, and the smallest difference that it can show."""

from __future__ import annotations

import math
import tempfile
from itertools import chain
from pathlib import Path

from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.folder import SavedSpeed, SavedTiming, read_measurement
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.processes import Job, ProcessResult, timing_arguments
from pycls_fast.ledger.report.effects import resolution
from pycls_fast.reading import Model

# A brief timing; its warm-up lasts half of this or more.
_SECONDS = 1.0
# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `ledger gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


def show_plan(ledger: Ledger) -> None:
    """Print the variants of a ledger that is not open, and an estimate of the time for what its folder does not have.

    Raises:
        UserError: the reference does not run, or see `announce`.
    """
    if ledger.settings.trains:
        ledger.plan_trainings()
    for variant in ledger.selection.variants():
        words = " ".join(variant.overrides) or "the experiment as it is"
        if variant.name in ledger.selection.out:
            words = f"not run, {ledger.selection.out[variant.name][1]}"
        elif (variant.ranks or 1) > 1:
            words += f"  ({variant.ranks} ranks)"
        ledger.say(f"{variant.name}: {words}")
    ledger.say("timing a few steps of the first variant for the estimate")
    with tempfile.TemporaryDirectory() as temporary:
        ended, timed = _measured(ledger, Path(temporary), "train", SavedTiming)
        fed_step = None
        if ledger.settings.trains:
            fed_step = _measured(ledger, Path(temporary), "both", SavedSpeed)[1].step_seconds_p50
    announce(ledger, ended.seconds, timed, fed_step)


def announce(ledger: Ledger, seconds: float | None, timed: SavedTiming, fed_step: float | None = None) -> None:
    """Say how long the rest takes by `estimate`, if seconds are known, and the smallest difference that it can show. A
    `UserError` if the margin is smaller than one image."""
    say, margin = ledger.say, ledger.settings.margin
    errors = [error for family in chain(*ledger.families()) for error in family.errors.tolist()]
    runs, images, step = ledger.trainings_at_most(), timed.evaluated_images, timed.train.step_seconds_p50
    if errors and images and margin < 100 / images:
        raise UserError(
            f"margin: {margin:g} points are less than one of {images:,} images; use "
            f"margin={math.ceil(2000 / images) / 10:g}, or more images"
        )
    if seconds is None:
        return
    parts = {name: took for name, took in estimate(ledger, seconds, timed, fed_step or step).items() if took > 0}
    for name, took in parts.items():
        say(f"{name}: {'at most ' if name == 'training' else ''}about {took / 60:.0f} min")
    if errors and images:
        # If one image in a hundred, each by itself, changes from one training to the next.
        finest = resolution(100 * math.sqrt(0.01 / (2 * images)) * min(errors))
        say(
            f"{runs} trainings, scored on {images:,} images, show differences of {finest:.2f} points at best; the "
            "first ones will say more"
        )
    left_out = f"; what {ledger.folder.path} already has is not counted" if ledger.folder.path.is_dir() else ""
    say(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({step * 1e3:.0f} ms a step, {timed.steps_per_run:,} steps a run){left_out}"
    )


def _measured(ledger: Ledger, folder: Path, mode: str, kind: type[Model]) -> tuple[ProcessResult, Model]:
    """Time the reference briefly in a separate process; returns how it ended and its record."""
    first, file = ledger.selection.variants()[0], folder / f"{mode}.json"
    own = timing_arguments(file, steps=3, warmup_steps=2, seconds=_SECONDS, mode=mode)
    ended = ledger.start(Job("timing", "time", first, own, file), log=file.with_suffix(".txt")).wait()
    if ended.status != 0:
        ledger.selection.leave_out(first, "failed", ended.reason())
    return ended, read_measurement(file, kind)


def estimate(ledger: Ledger, seconds: float, timed: SavedTiming, fed_step: float) -> dict[str, float]:
    """Seconds by kind of measurement for what the folder does not have yet; the most that the trainings may take.

    Args:
        seconds: what a process of the first variant took.
        timed: its record.
        fed_step: seconds of a training step together with the loading of its images.
    """
    s, missing, train = ledger.settings, ledger.missing(), timed.train
    # Imports, building, writing. The warm-up takes half as long as the timed steps.
    start = max(seconds - 1.5 * sum(map(sum, train.step_seconds_each)), 0.0)
    step = train.step_seconds_p50
    turn = max(s.steps * step, s.seconds) + max(s.warmup_steps * step, s.seconds / 2)
    # A forward pass is a third of a step, and each evaluation starts its own workers.
    steps = timed.steps_per_run + timed.evaluated_images_per_run / train.images_per_step / 2
    # On a CPU, concurrent runs share the cores.
    jobs = s.jobs if ledger.device == "cuda" else 1
    return {
        "timings": missing["timings"] * (start + turn),
        "rounding": missing["rounding"] * (start + ((s.numerics_steps or 0) + _FLOAT64_STEPS) * fed_step),
        "gradients": missing["gradients"] * (start + _GRADIENT_STEPS * fed_step),
        "training": math.ceil(missing["training"] / jobs) * (start + steps * fed_step),
    }
