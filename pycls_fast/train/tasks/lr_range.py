"""The learning-rate range test (Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3).

The experiment's own step, from the weights with which it begins (a new head is fitted first, if that is configured),
with a rate that grows exponentially from step to step. The loss falls while the rate is useful, and rises again when it
is too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE
from pycls_fast.files import RUNS, atomic_write, timestamp, user_path
from pycls_fast.train.assemble import ShortTraining, short_training
from pycls_fast.train.environment import provenance
from pycls_fast.train.evaluate import Scorer
from pycls_fast.train.folder import write_json
from pycls_fast.train.head import fit_head
from pycls_fast.train.out_of_memory import enough_to_score, enough_to_train

_SMOOTHING = 0.9
# A smoothed loss above this multiple of its minimum does not recover.
_BLOWN_UP = 4.0
# The picture shows losses up to this multiple of the first.
_SHOWN = 1.5


@dataclass(frozen=True)
class LrRange:
    """The learning rates (`optim.lr`) at which the smoothed loss falls fastest (per logarithm of the rate), is lowest,
    and rises above its start for good; None for what a sweep does not show."""

    suggested: float | None
    lowest: float | None
    diverges: float | None


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Exponential moving average of the losses with bias correction, float64."""
    average, smoothed = 0.0, []
    for count, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1.0 - _SMOOTHING) * loss
        smoothed.append(average / (1.0 - _SMOOTHING**count))
    return np.array(smoothed, dtype=np.float64)


def interpret(rates: Sequence[float], losses: Sequence[float]) -> LrRange:
    """What the losses, one per rate, say about the rates; the last loss may be NaN or infinite."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return LrRange(None, None, float(rates[0]))
    smoothed = smooth(finite)
    # The average over the first few is not meaningful yet.
    first = len(smoothed) // 10
    lowest = first + int(smoothed[first:].argmin())
    # From batch to batch. A head that was fitted leaves little to fall: then places and rises may be of this alone. The
    # smoothed loss of 100 steps that only scatter falls by more in 1 to 5% of cases, by the median in 9 to 20%.
    scatter = 1.5 * np.median(np.abs(np.diff(finite, append=finite[-1])))
    # The first step from which on the loss is above its start, or not finite.
    above = int(np.flatnonzero(smoothed <= smoothed[first] + scatter)[-1]) + 1
    diverges = float(rates[above]) if above < len(losses) else None
    if lowest - first < 2 or smoothed[first] - smoothed[lowest] < scatter:
        return LrRange(None, None, diverges)
    slope = np.gradient(smoothed, np.log(np.array(rates[: len(smoothed)])))
    steepest = first + int(slope[first : lowest + 1].argmin())
    return LrRange(float(rates[steepest]), float(rates[lowest]), diverges)


def lr_range_test(config: RunConfig, *, steps: int, lr_min: float, lr_max: float, output: str | None) -> int:
    """Sweep `optim.lr`, print the result, and write `lr_find.json` and `lr_find.png`; no run folder is touched. For the
    arguments see `LrFindVerb`.
    """
    folder = user_path(output or Path(RUNS, "lr_find") / f"{config.config_name}-{timestamp()}")
    file = folder / "lr_find.json"
    rates = [lr_min * (lr_max / lr_min) ** (step / max(steps - 1, 1)) for step in range(steps)]
    with short_training(_uncompiled(config), steps=steps, output=file, several_ranks=True) as training:
        losses = _sweep(training, rates)
    config, world, file, rates = training.config, training.world, training.file, rates[: len(losses)]
    result = interpret(rates, losses)
    record = {
        "config_name": config.config_name,
        "optimizer": config.optim.name,
        "lr_batch_size": config.optim.lr_batch_size,
        "global_batch_size": config.data.global_batch_size,
        **asdict(result),
        "lr": rates,
        "loss": losses,
        **provenance(world.device, world.size),
    }
    if world.is_main:
        write_json(file, record)
        _draw(file.with_suffix(".png"), config.config_name, result, rates, losses)
        for line in (*_result_lines(result, rates), f"{file}, {file.with_suffix('.png')}"):
            training.display.note(line)
    return DONE


def _sweep(training: ShortTraining, rates: Sequence[float]) -> list[float]:
    """Train a step at each rate until the loss blows up; returns the losses."""
    config, losses = training.config, list[float]()
    # If `optim.lr_batch_size` is set, `optim.lr` is scaled with the batch.
    scale = config.optim.scaled(config.data.global_batch_size).lr / config.optim.lr
    training.step = replace(training.step, schedule=lambda number: rates[number] * scale, ema=None)
    world, display, classes = training.world, training.display, len(training.sources["train"].classes)
    with display, enough_to_train(config, world, classes):
        if training.fits_head:
            # Of rates that a random head bears, many are too high for one that fits.
            scorer = Scorer(config, training.step.wrapped, world, training.switches, display, training.damaged)
            with enough_to_score(config, world):
                fit_head(training, scorer, lambda: None, lambda line, **numbers: display.note(line))
        display.begin_training(0, len(rates))
        for number in range(len(rates)):
            training.train_step()
            losses.append(training.metrics.read(world)["loss"])
            display.advance(number + 1)
            smoothed = smooth(losses)
            # The numbers are the same on all ranks, so all of them stop here.
            if not math.isfinite(losses[-1]) or smoothed[-1] > _BLOWN_UP * smoothed.min():
                break
    return losses


def _uncompiled(config: RunConfig) -> RunConfig:
    """The configuration without the preset's compilation: a sweep is too short to pay for it. Explicit choices stay."""
    speed = config.speed
    if "compile" in speed.by_hand or speed.compile_mode != "default" or speed.gelu == "polynomial":
        return config
    return config.with_values(speed={"compile": "off"})


def _result_lines(result: LrRange, rates: Sequence[float]) -> list[str]:
    falls = "the loss did not fall by more than its scatter; try different lr_min and lr_max, or more steps"
    if result.suggested is not None:
        falls = f"the loss falls fastest at optim.lr={result.suggested:.1e}, and is lowest at {result.lowest:.1e}"
    above = f"it did not diverge up to {rates[-1]:.1e}"
    return [falls, above if result.diverges is None else f"it diverges at {result.diverges:.1e}"]


def _draw(path: Path, title: str, result: LrRange, rates: Sequence[float], losses: Sequence[float]) -> None:
    from matplotlib.figure import Figure

    finite = [loss for loss in losses if math.isfinite(loss)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    # The last steps' may be so much higher that nothing else would be seen.
    most = max(finite[:1], default=0.0) * _SHOWN
    axes.plot(rates[: len(finite)], np.minimum(finite, most), linewidth=0.8, alpha=0.4, label="loss of a step")
    axes.plot(rates[: len(finite)], np.minimum(smooth(finite), most), linewidth=1.6, label="smoothed")
    for value, name, style in ((result.suggested, "falls fastest", "--"), (result.diverges, "diverges", ":")):
        if value is not None:
            axes.axvline(value, linestyle=style, color="black", linewidth=1.0, label=f"{name}: {value:.1e}")
    axes.set_xscale("log")
    axes.set_xlabel("optim.lr")
    axes.set_ylabel("loss (nats)")
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
