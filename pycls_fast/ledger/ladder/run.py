"""Run a ladder from start to end: checks, the plan or its dry run, the measurements, and the files that are written."""

from __future__ import annotations

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
from pycls_fast.ledger.ladder.estimate import announce, show_plan
from pycls_fast.ledger.ladder.folder import LedgerFolder, code_digest, conditions, files_of
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import check_runs, tree_path
from pycls_fast.ledger.ladder.processes import visible_devices
from pycls_fast.ledger.report.record import Record
from pycls_fast.ledger.report.text import print_table
from pycls_fast.train.display import Display
from pycls_fast.train.folder import write_json
from pycls_fast.train.saved_weights import find_weights
from pycls_fast.train.signals import stop_requests


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
