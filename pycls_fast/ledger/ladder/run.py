"""Run a ladder from start to end: plan, estimate or dry run, measurements, the record of what its folder holds, files.

The estimate is for variants that are all as fast as the first.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.config.keys import key_of, text_override
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant, for_experiment
from pycls_fast.errors import DONE, STOPPED, UserError, refuse
from pycls_fast.ledger.ladder.folder import (
    Headline,
    LedgerFolder,
    Rounded,
    Timed,
    code_digest,
    conditions,
    read_measurement,
)
from pycls_fast.ledger.ladder.plan import check_reference, check_runs, crossing, families, tree_path
from pycls_fast.ledger.ladder.processes import ProcessResult, timing_arguments, visible_devices
from pycls_fast.ledger.ladder.work import Ledger
from pycls_fast.ledger.report.effects import best_resolution
from pycls_fast.ledger.report.record import (
    Commit,
    GradientCounts,
    Machine,
    Measured,
    Record,
    Status,
    Timing,
    Unfinished,
    VariantRecord,
    compare_speed,
)
from pycls_fast.ledger.report.statistics import geometric_mean
from pycls_fast.ledger.report.text import print_table
from pycls_fast.reading import Model
from pycls_fast.train.display import Display
from pycls_fast.train.environment import environment, environment_command, git_state, versions
from pycls_fast.train.folder import write_json
from pycls_fast.train.signals import stop_requests
from pycls_fast.train.weights import find_weights

# A brief timing; its warm-up lasts half of this or more.
_SECONDS = 1.0
# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `ledger gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


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
        show_plan(ledger)
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
        words, ranks = " ".join(variant.overrides) or "the experiment as it is", variant.ranks or 1
        why_not = ledger.selection.why_not(variant)
        ledger.say(
            f"{variant.name}: {f'not run, {why_not}' if why_not else words + f'  ({ranks} ranks)' * (ranks > 1)}"
        )
    ledger.say("timing a few steps of the first variant for the estimate")
    with tempfile.TemporaryDirectory() as temporary:
        finished, timed = _measured(ledger, Path(temporary), "train", Timed)
        fed_step = None
        if ledger.settings.trains:
            fed_step = _measured(ledger, Path(temporary), "both", Headline)[1].step_seconds_p50
    announce(ledger, finished.seconds, timed, fed_step)


def announce(ledger: Ledger, seconds: float | None, timed: Timed, fed_step: float | None = None) -> None:
    """Say how long the rest takes by `estimate`, if seconds are known, and the smallest difference that it can show.

    Raises:
        UserError: the margin is smaller than one image, or there are too few trainings.
    """
    say, trains, margin = ledger.say, ledger.settings.trains, ledger.settings.margin
    if trains:
        names = [variant.name for variant in ledger.selection.runnable()]
        # Which combinations are refused is known before the trainings, after many seconds; they are hardly fewer.
        known = ledger.folder.crossing or crossing(ledger.ladder, names, lambda variant: None)
        check_runs(families(ledger.ladder, known, ledger.settings.runs_at_most, ledger.settings.first_seed))
    runs, images, step = ledger.trainings(), timed.evaluated_images, timed.train.step_seconds_p50
    if trains and images and margin < 100 / images:
        raise UserError(
            f"margin: {margin:g} points are less than one of {images:,} images; use "
            f"margin={math.ceil(2000 / images) / 10:g}, or more images"
        )
    if seconds is None:
        return
    parts = {name: took for name, took in estimate(ledger, seconds, timed, fed_step or step).items() if took > 0}
    for name, took in parts.items():
        say(f"{name}: {'at most ' if name == 'training' else ''}about {took / 60:.0f} min")
    if trains and runs and images:
        say(
            f"{runs} trainings, scored on {images:,} images, show differences of {best_resolution(images, runs):.2f} "
            "points at best; the first ones will say more"
        )
    left_out = f"; what {ledger.folder.path} already has is not counted" if ledger.folder.path.is_dir() else ""
    say(
        f"in total about {sum(parts.values()) / 60:.0f} min if every variant is as fast as the first "
        f"({step * 1e3:.0f} ms a step, {timed.steps_per_run:,} steps a run){left_out}"
    )


def _measured(ledger: Ledger, folder: Path, mode: str, kind: type[Model]) -> tuple[ProcessResult, Model]:
    """Time the reference briefly in a separate process; returns how it ended and its record."""
    first, file = ledger.selection.variants()[0], folder / f"{mode}.json"
    more = (*timing_arguments(steps=3, warmup_steps=2, seconds=_SECONDS, mode=mode), text_override("output", str(file)))
    finished = ledger.process("time", first, more, log=file.with_suffix(".txt")).wait()
    if finished.status != 0:
        check_reference(first, finished.reason())
    return finished, read_measurement(file, kind)


def estimate(ledger: Ledger, seconds: float, timed: Timed, fed_step: float) -> dict[str, float]:
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
    runs = math.ceil(missing["training"] / jobs) if s.trains else 0
    return {
        "timings": missing["timings"] * (start + turn),
        "rounding": missing["rounding"] * (start + ((s.numerics_steps or 0) + _FLOAT64_STEPS) * fed_step),
        "gradients": missing["gradients"] * (start + _GRADIENT_STEPS * fed_step),
        "training": runs * (start + steps * fed_step),
    }


_MODEL = (
    "model", "parameters", "forward_flops_per_image", "image_size", "train_forward_flops_per_image",
    "train_image_size", "num_classes", "data", "global_batch_size",
)  # fmt: skip


def collect(ledger: Ledger, config_name: str, *, finished: bool = True) -> Record:
    variants, total = ledger.selection.variants(), ledger.total()
    records = [_variant(ledger, variant) for variant in variants]
    compare_speed(records)
    rounds, gradients = ledger.settings.rounds, ledger.folder.file("gradients", variants[0])
    timed = next((record for variant in variants for record in ledger.folder.timings(variant, rounds)), None)
    # Device and ranks of this process, which measures nothing, are not the variants'.
    here = environment(torch.device("cpu"), 1)
    return Record(
        config_name=config_name,
        time=time.time(),
        wall_seconds=ledger.folder.seconds,
        command=environment_command(),
        ladder=ledger.ladder,
        settings=ledger.settings,
        base=[*ledger.flags, *ledger.typed],
        model=Measured(**timed.model_dump(include=set(_MODEL))) if timed else None,
        device=timed.device if timed else None,
        versions=versions(),
        code=ledger.folder.codes,
        environment=Machine(**{key: value for key, value in here.items() if key not in ("device", "world_size")}),
        gradients=read_measurement(gradients, GradientCounts) if gradients.is_file() else None,
        unmeasured=ledger.unmeasured,
        unfinished=None if finished else Unfinished(done=total - sum(ledger.missing().values()), of=total),
        accuracy=ledger.crossed.record() if ledger.crossed else None,
        variants=records,
    )


def _variant(ledger: Ledger, variant: Variant) -> VariantRecord:
    name, selection = variant.name, ledger.selection
    status: Status = (
        "failed" if name in selection.failed else "cannot run" if name in selection.impossible else "measured"
    )
    reason, numerics = selection.why_not(variant), ledger.folder.file("numerics", variant)
    git = None if variant.tree is None else git_state(tree_path(variant.tree))
    return VariantRecord(
        name=name,
        note="; ".join(filter(None, [variant.note, _code_note(variant, git)])),
        overrides=list(variant.overrides),
        ranks=variant.ranks or 1,
        tree=variant.tree,
        git=Commit(**git) if git else None,
        before=variant.against,
        status=status,
        reason=reason,
        # Only on the CPU: on CUDA other errors (out of memory, an old GPU) may contain these words.
        needs="CUDA" if status == "cannot run" and ledger.device == "cpu" and "needs CUDA" in str(reason) else None,
        timing=_timing(ledger.folder.timings(variant, ledger.settings.rounds)),
        numerics=read_measurement(numerics, Rounded).errors if numerics.is_file() else None,
    )


def _code_note(variant: Variant, git: Mapping[str, Any] | None) -> str | None:
    """The checkout that a variant runs and its commit, if it is known; None for a variant with this code."""
    if variant.tree is None:
        return None
    commit = "" if git is None else f" (commit {git['commit'][:10]}{', changed' if git['changed'] else ''})"
    return f"the code in {variant.tree}{commit}"


def _timing(rounds: Sequence[Timed]) -> Timing | None:
    if not rounds:
        return None
    parts = [record.train for record in rounds]
    steps = [seconds for part in parts for turn in part.step_seconds_each for seconds in turn]
    p50, p90 = (float(np.quantile(steps, q)) for q in (0.5, 0.9))
    rate = geometric_mean([part.images_per_second for part in parts]).ratio
    memory = [record.memory_peak_bytes for record in rounds if record.memory_peak_bytes is not None]
    products = [record.matmul.flops_per_second for record in rounds if record.matmul]
    shares = [part.share_of_matmul for part in parts if part.share_of_matmul is not None]
    return Timing(
        images_per_second=rate,
        step_seconds_p50=p50,
        step_seconds_p90=p90,
        images_per_step=parts[0].images_per_step,
        samples=len(steps),
        flops_per_second=None
        if parts[0].flops_per_second is None
        else 3 * rounds[0].train_forward_flops_per_image * rate,
        share_of_matmul=float(np.median(shares)) if shares else None,
        memory_peak_bytes=max(memory, default=None),
        rounds=[part.images_per_second for part in parts],
        matmul_flops_per_second=products if len(products) == len(rounds) else None,
        image_size=rounds[0].train_image_size,
        precision=rounds[0].precision,
        switches=rounds[0].switches,
    )
