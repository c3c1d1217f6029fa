"""Run a ladder from start to end: checks, the plan or its dry run, the measurements, and the files that are written.

The time that a ladder takes is estimated as if all variants were as fast as the first.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.config.keys import key_of
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant, for_experiment
from pycls_fast.errors import DONE, STOPPED, UserError, refuse
from pycls_fast.ledger.ladder.collect import collect
from pycls_fast.ledger.ladder.folder import (
    LedgerFolder,
    SavedSpeed,
    SavedTiming,
    code_digest,
    conditions,
    files_of,
    read_measurement,
)
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import check_runs, tree_path
from pycls_fast.ledger.ladder.processes import Job, ProcessResult, timing_arguments, visible_devices
from pycls_fast.ledger.report.effects import resolution
from pycls_fast.ledger.report.record import Record
from pycls_fast.ledger.report.text import print_table
from pycls_fast.reading import Model
from pycls_fast.train.display import Display
from pycls_fast.train.folder import write_json
from pycls_fast.train.saved_weights import find_weights
from pycls_fast.train.signals import stop_requests

# A brief timing; its warm-up lasts half of this or more.
_SECONDS = 1.0
# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `ledger gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


@dataclass(frozen=True)
class Experiment:
    """What the variants of a ladder are changes to.

    Attributes:
        config: as the command has composed it.
        flags, typed: options and overrides that make it, for every tool.
        compose: composes it with the overrides of a variant.
        configs: folders of configurations, which are part of the code.
    """

    config: RunConfig
    flags: Sequence[str]
    typed: Sequence[str]
    compose: Callable[[Sequence[str]], RunConfig]
    configs: Sequence[Path] = ()


def run_ladder(
    experiment: Experiment,
    ladder: Ladder,
    settings: LadderSettings,
    folder: Path,
    *,
    dry_run: bool,
    accept_code: bool = False,
) -> int:
    """Run a ladder, or with `dry_run` only print its variants and an estimate of the time; returns the exit status. A
    `UserError` if the plan cannot be carried out."""
    config, typed = experiment.config, _checked(experiment, ladder, settings)
    display = Display(speaks=True, mode=config.runtime.progress)
    device = "cuda" if config.runtime.device != "cpu" and torch.cuda.is_available() else "cpu"
    chosen = for_experiment(ladder, config)
    code = partial(code_digest, experiment.configs, _trees(chosen), files_of(config.imports))
    place = LedgerFolder(folder, code=code, accept_code=accept_code)
    why_not = partial(refusal, compose=experiment.compose, device=torch.device(device))
    ledger = Ledger(chosen, settings, experiment.flags, typed, device, place, say=display.note, refused=why_not)
    # Before any timing: variants that are known to fail, even if only in training.
    ledger.selection.rule_out(why_not)
    check_runs(ledger.families())
    _divide_devices(ledger)
    ledger.conditions = conditions(config, device)
    if dry_run:
        place.check(ledger.plan())
        show_plan(ledger)
        return DONE
    for name, (_, why) in ledger.selection.out.items():
        display.note(f"{name}: cannot run: {why}")
    try:
        record = _work(ledger, config.config_name)
    except KeyboardInterrupt:
        display.note("stopped; everything finished so far is saved, and the same command resumes")
        return STOPPED
    print_table(record)
    display.note(f"report: {folder / 'index.html'}")
    return DONE


def _checked(experiment: Experiment, ladder: Ladder, settings: LadderSettings) -> Sequence[str]:
    """The overrides for the tools, after checks of what no measurement would notice, or only the last one."""
    config, typed = experiment.config, experiment.typed
    every = (ladder.baseline, *ladder.variants)
    apart = [v.name for v in every if v.tree is not None or v.against is not None]
    if settings.mode == "cumulative" and apart:
        raise UserError(f"mode: '{apart[0]}' has its own tree or against, which cumulative cannot combine; use crossed")
    instead = {
        "run_dir": "each run of a ledger has its own; use output=",
        "seed": "each run of a ledger has its own; use first_seed=",
        "resume": "the trainings of a ledger resume by themselves; leave it out",
    }
    keys = set(map(key_of, chain(typed, *(variant.overrides for variant in every))))
    refuse(f"{key}: {why}" for key, why in instead.items() if key in keys)
    if config.weights is not None:
        # Timing does not read them; without this check only the first training would notice that they are missing.
        find_weights(config.weights)
    # The trainings are measurements. Only if one is set: a variant's older checkout may not know the key.
    return [*typed, "trackers=[]"] if any(tracker.remote for tracker in config.trackers) else typed


def _divide_devices(ledger: Ledger) -> None:
    """Give each of several training runs at a time CUDA devices of its own, if there are enough."""
    if ledger.device != "cuda" or not ledger.settings.trains or ledger.settings.jobs == 1:
        return
    ledger.cuda_devices = visible_devices(torch.cuda.device_count())
    jobs, ranks = ledger.settings.jobs, min(variant.ranks or 1 for variant in ledger.selection.runnable())
    slots = len(ledger.cuda_devices) // ranks
    if jobs > slots:
        each = f" of {ranks} ranks each" if ranks > 1 else ""
        raise UserError(
            f"jobs: {jobs} trainings at a time{each} need {jobs * ranks} CUDA devices and this process sees "
            f"{len(ledger.cuda_devices)}; use jobs={max(slots, 1)}"
        )


def _trees(ladder: Ladder) -> list[Path]:
    """The checkouts of the variants that have one of their own."""
    trees = {v.name: tree_path(v.tree) for v in (ladder.baseline, *ladder.variants) if v.tree is not None}
    refuse(
        f"ladder: '{name}': {tree} is no checkout of pycls_fast; give the folder of one as its tree"
        for name, tree in trees.items()
        if not (tree / "pycls_fast/__main__.py").is_file()
    )
    return list(trees.values())


def _work(ledger: Ledger, config_name: str) -> Record:
    """Measure everything and write the report; returns its record."""
    with ledger.folder.opened(ledger.plan()), stop_requests("stopping; what is finished is saved") as ledger.stop:
        # There is something to save at any time.
        ledger.stop.training = True
        finished = False
        try:
            announce(ledger, *ledger.time_reference())
            ledger.time_variants()
            _report(ledger, config_name, finished=False)
            ledger.measure_numerics()
            if ledger.settings.trains:
                _report(ledger, config_name, finished=False)
                ledger.plan_trainings().run()
            finished = True
        finally:
            record = _report(ledger, config_name, finished=finished)
    return record


def _report(ledger: Ledger, config_name: str, *, finished: bool) -> Record:
    """Write `ledger.json` and the page from what is measured so far; returns the record."""
    # Only here: matplotlib takes long to import.
    from pycls_fast.ledger.report.page import write_page

    record = collect(ledger, config_name, finished=finished)
    write_json(ledger.folder.path / "ledger.json", record.model_dump(mode="json"))
    write_page(record, ledger.folder.path)
    return record


def refusal(variant: Variant, compose: Callable[[Sequence[str]], RunConfig], device: torch.device) -> str | None:
    """Why a variant's settings are refused, as far as is known without building anything; None if they are not."""
    if variant.tree is not None:
        # Its own code may have other keys, and says what it refuses when it is first timed.
        return None
    try:
        config = compose(variant.overrides)
        build.switches(config, torch.device("cpu") if config.runtime.device == "cpu" else device)
    except UserError as error:
        return "; ".join(error.lines)
    return None


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
    say(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({step * 1e3:.0f} ms a step, {timed.steps_per_run:,} steps a run)"
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
