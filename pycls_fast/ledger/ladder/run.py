"""Run a ladder from start to end: checks, the plan or its dry run with an estimate of the time, the measurements, and
the files that are written."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.config.keys import key_of, text_override
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant, for_experiment
from pycls_fast.errors import DONE, STOPPED, UserError, refuse
from pycls_fast.ledger.ladder.collect import collect
from pycls_fast.ledger.ladder.folder import LedgerFolder, SavedTiming, code_digest, conditions, read_measurement
from pycls_fast.ledger.ladder.plan import check_reference, check_runs, families, find_factors, tree_path
from pycls_fast.ledger.ladder.processes import timing_arguments, visible_devices
from pycls_fast.ledger.ladder.work import Ledger
from pycls_fast.ledger.report.record import Record
from pycls_fast.ledger.report.text import print_table
from pycls_fast.train.display import Display
from pycls_fast.train.folder import write_json
from pycls_fast.train.signals import stop_requests
from pycls_fast.train.weights import find_weights


def run_ladder(
    config: RunConfig,
    ladder: Ladder,
    settings: LadderSettings,
    *,
    base: tuple[Sequence[str], Sequence[str]],
    compose: Callable[[Sequence[str]], RunConfig],
    folder: Path,
    dry_run: bool,
    configs: Sequence[Path] = (),
    accept_code: bool = False,
) -> int:
    """Run a ladder, or with `dry_run` only print its variants and an estimate of the time; returns the exit status.

    Args:
        base: options and overrides of the experiment, for every tool.
        compose: composes the experiment with the overrides of a variant.
        configs: folders of configurations, which are part of the code.

    Raises:
        UserError: a plan that cannot be carried out.
    """
    typed = _checked(config, ladder, settings, base[1])
    display = Display(speaks=True, mode=config.runtime.progress)
    device = "cuda" if config.runtime.device != "cpu" and torch.cuda.is_available() else "cpu"
    chosen = for_experiment(ladder, config)
    code = partial(code_digest, configs, _trees(chosen))
    place = LedgerFolder(folder, say=display.note, code=code, accept_code=accept_code)
    why_not = partial(refusal, compose=compose, device=torch.device(device))
    ledger = Ledger(chosen, settings, base[0], typed, device, place, say=display.note, refused=why_not)
    # Before any timing: variants that are known to fail, even if only in training.
    refused = ledger.selection.rule_out(why_not)
    _divide_devices(ledger)
    ledger.conditions = conditions(config, device)
    if dry_run:
        place.check(ledger.plan())
        _show_plan(ledger)
        return DONE
    for name, why in refused.items():
        display.note(f"{name}: cannot run: {why}")
    try:
        record = _work(ledger, config.config_name)
    except KeyboardInterrupt:
        display.note("stopped; everything finished so far is saved, and the same command resumes")
        return STOPPED
    print_table(record)
    display.note(f"report: {folder / 'index.html'}")
    return DONE


def _checked(config: RunConfig, ladder: Ladder, settings: LadderSettings, typed: Sequence[str]) -> Sequence[str]:
    """The overrides for the tools, after checks of what no measurement would notice, or only the last one."""
    apart = [v.name for v in (ladder.baseline, *ladder.variants) if v.tree is not None or v.against is not None]
    if settings.mode == "cumulative" and apart:
        raise UserError(f"mode: '{apart[0]}' has its own tree or against, which cumulative cannot combine; use crossed")
    instead = {
        "run_dir": "each run of a ledger has its own; use output=",
        "seed": "each run of a ledger has its own; use first_seed=",
        "resume": "the trainings of a ledger resume by themselves; leave it out",
    }
    keys = {key_of(override) for override in typed}
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


def _show_plan(ledger: Ledger) -> None:
    """Print the variants of a ledger that is not open, and an estimate of the time for what its folder does not have.

    Raises:
        UserError: the reference does not run, or see `_announce`.
    """
    if ledger.settings.trains:
        ledger.plan_trainings()
    for variant in ledger.selection.variants():
        words, ranks = " ".join(variant.overrides) or "the experiment as it is", variant.ranks or 1
        why_not = ledger.selection.why_not(variant)
        ledger.say(
            f"{variant.name}: {f'not run, {why_not}' if why_not else words + f'  ({ranks} ranks)' * (ranks > 1)}"
        )
    ledger.say("timing a few steps of the first variant for the estimate")
    first = ledger.selection.variants()[0]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "time.json"
        brief = timing_arguments(steps=3, warmup_steps=2, seconds=1.0)
        more = (*brief, text_override("output", str(file)))
        finished = ledger.process("time", first, more, log=file.with_suffix(".txt")).wait()
        if finished.status != 0:
            check_reference(first, finished.reason())
        timed = read_measurement(file, SavedTiming)
    _announce(ledger, finished.seconds, timed)


def _announce(ledger: Ledger, seconds: float | None, timed: SavedTiming) -> None:
    """Say how long the rest takes by `estimate`, if seconds are known.

    Raises:
        UserError: the margin is smaller than one image, or there are too few trainings.
    """
    s, images = ledger.settings, timed.evaluated_images
    if s.trains:
        names = [variant.name for variant in ledger.selection.runnable()]
        # Which combinations are refused is known before the trainings, after many seconds; they are hardly fewer.
        factors = ledger.folder.factors or find_factors(ledger.ladder, names, lambda variant: None)
        check_runs(families(ledger.ladder, factors, s.runs_at_most, s.first_seed))
    if s.trains and images and s.margin < 100 / images:
        raise UserError(
            f"margin: {s.margin:g} points are less than one of {images:,} images; use "
            f"margin={math.ceil(2000 / images) / 10:g}, or more images"
        )
    if seconds is None:
        return
    parts = {name: took for name, took in estimate(ledger, seconds, timed).items() if took > 0}
    for name, took in parts.items():
        most = f"at most {ledger.trainings_at_most()}, " if name == "training" else ""
        ledger.say(f"{name}: {most}about {took / 60:.0f} min")
    ledger.say(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({timed.train.step_seconds_p50 * 1e3:.0f} ms a step, {timed.steps_per_run:,} steps a run)"
    )


# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `ledger gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


def estimate(ledger: Ledger, seconds: float, timed: SavedTiming) -> dict[str, float]:
    """Seconds by kind of measurement for what the folder does not have yet, if all variants are as fast as the first
    and images are loaded in time; the most that the trainings may take.

    Args:
        seconds: what a process of the first variant took.
        timed: its record.
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
    runs = math.ceil(missing["training"] / jobs) if s.trains else 0
    return {
        "timings": missing["timings"] * (start + turn),
        "rounding": missing["rounding"] * (start + ((s.numerics_steps or 0) + _FLOAT64_STEPS) * step),
        "gradients": missing["gradients"] * (start + _GRADIENT_STEPS * step),
        "training": runs * (start + steps * step),
    }


def _work(ledger: Ledger, config_name: str) -> Record:
    """Measure everything and write the report; returns its record."""
    with ledger.folder.opened(ledger.plan()), stop_requests("stopping; what is finished is saved") as ledger.stop:
        # There is something to save at any time.
        ledger.stop.training = True
        finished = False
        try:
            _announce(ledger, *ledger.time_reference())
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
