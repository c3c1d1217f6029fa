"""A ladder from its name to its report: plan, dry run, work, files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.config.command_line import DONE, FAULT, STOPPED
from pycls_fast.config.ladder import Ladder, for_experiment
from pycls_fast.errors import UserError
from pycls_fast.ledger import commands
from pycls_fast.ledger.conditions import code_digest, conditions
from pycls_fast.ledger.ladder import Ledger, Settings
from pycls_fast.ledger.outcome import collect
from pycls_fast.ledger.plan import Arm, pick
from pycls_fast.ledger.processes import Finished, Process
from pycls_fast.ledger.table import markdown, print_table
from pycls_fast.train.display import Display
from pycls_fast.train.output_file import write_json
from pycls_fast.train.weights import find_weights


def conduct(
    config: RunConfig,
    ladder: Ladder,
    settings: Settings,
    *,
    switches: Sequence[str],
    base: tuple[Sequence[str], Sequence[str]],
    compose: Callable[[Sequence[str]], RunConfig],
    folder: Path,
    tools: Path,
    dry_run: bool,
    configs: Sequence[Path] = (),
    accept_code: bool = False,
) -> int:
    """Run a ladder, or say what would be run; returns the exit status: 1 where the reference's training failed, 3 where
    Ctrl-C has stopped it.

    Args:
        config: the experiment, checked.
        ladder: the changes to it.
        settings: what is measured of each arm.
        switches: rungs to pick, by name or by a key that they set; none for all.
        base: options and overrides of the experiment, for every tool.
        compose: the experiment with the overrides of an arm.
        folder: of the report and all that it is made from.
        tools: the folder of the tools.
        dry_run: print the arms and an estimate of the time, measure nothing else.
        configs: folders of configurations, as part of the code.
        accept_code: go on in a folder whose measurements are of other code.

    Raises:
        UserError: a plan that cannot be carried out.
    """
    if ladder.mode not in (None, settings.mode):
        raise UserError(
            f"mode: the rungs of this ladder are alternatives, which {settings.mode} would put together; use "
            f"mode={ladder.mode}"
        )
    display = Display(speaks=True, mode=config.runtime.progress)
    for key, instead in (("run_dir", "output="), ("seed", "first_seed= and seeds=")):
        if any(override.lstrip("+").startswith(f"{key}=") for override in base[1]):
            raise UserError(f"{key}: each run of a ledger has its own; use {instead}")
    if config.resume != "auto":
        raise UserError("resume: the trainings of a ledger resume by themselves; leave it out")
    device = "cuda" if config.runtime.device != "cpu" and torch.cuda.is_available() else "cpu"
    if config.weights is not None:
        # No timing reads them: else it would be the first training that misses them.
        find_weights(config.weights)
    chosen = for_experiment(pick(ladder, switches), config)
    ledger = Ledger(
        chosen, settings, *base, device, folder, tools, say=display.note,
        code=partial(code_digest, tools, configs), accept_code=accept_code,
    )  # fmt: skip
    if dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            _dry_run(ledger, compose, display, Path(temporary))
        return DONE
    for name, why in _rule_out(ledger, compose).items():
        display.note(f"{name}: cannot run: {why}")
    ledger.conditions = conditions(config, device)
    try:
        record = _work(ledger, config.config_name)
    except KeyboardInterrupt:
        display.note("stopped, with everything that is done saved; the same command goes on")
        return STOPPED
    print_table(record)
    display.note(f"report: {folder / 'index.html'}")
    # The report is there, and a script that asked for accuracies must not take it for whole.
    return FAULT if ledger.arms()[0].name in ledger.untrained else DONE


def _work(ledger: Ledger, config_name: str) -> dict[str, Any]:
    """All that is to be measured, and the files of the report; its record."""
    with closing(ledger):
        ledger.open()
        try:
            ledger.run()
        finally:
            record = collect(ledger, config_name)
            write_json(ledger.folder / "ledger.json", record)
        write_reports(record, ledger.folder)
    return record


def write_reports(record: dict[str, Any], folder: Path) -> None:
    """`ledger.md`, `index.html` and the charts beside it."""
    from pycls_fast.ledger.page import write_page

    (folder / "ledger.md").write_text(markdown(record), encoding="utf-8")
    write_page(record, folder)


def refusal(arm: Arm, compose: Callable[[Sequence[str]], RunConfig], device: torch.device) -> str | None:
    """Why the experiment cannot have the settings of an arm, as far as it is known without building anything."""
    try:
        config = compose(arm.overrides)
        build.switches(config, torch.device("cpu") if config.runtime.device == "cpu" else device)
    except UserError as error:
        return "; ".join(error.lines)
    return None


def _rule_out(ledger: Ledger, compose: Callable[[Sequence[str]], RunConfig]) -> dict[str, str]:
    """What is known to fail, maybe in training alone, is not timed before; the reasons, by the names of the arms."""
    return ledger.rule_out(lambda arm: refusal(arm, compose, torch.device(ledger.device)))


def _dry_run(ledger: Ledger, compose: Callable[[Sequence[str]], RunConfig], display: Display, folder: Path) -> None:
    """The arms, and how long they would take by the step of the first of them; `folder` is for what is measured."""
    _rule_out(ledger, compose)
    alone = ledger.alone()
    if alone:
        display.note("trying each rung alone, for what cannot be in 'everything' here")
    for arm in alone:
        finished, _ = _few_steps(ledger, arm, folder)
        if finished.status != 0:
            ledger.exclude(arm, finished)
    for arm in ledger.arms():
        ranks = f"  ({arm.ranks} ranks)" if arm.ranks > 1 else ""
        reason = ledger.why_not(arm)
        what = (
            f"{' '.join(arm.overrides) or 'the experiment as it is'}{ranks}" if reason is None else f"not run, {reason}"
        )
        display.note(f"{arm.name}: {what}")
    display.note("timing a few steps of the first one for the estimate")
    start, step, steps = _first_step(ledger, ledger.arms()[0], folder)
    s, count = ledger.settings, len(ledger.runnable())
    timing = (count * s.rounds + len(ledger.alone())) * (start + (s.steps + s.warmup_steps) * step)
    numerics = count * (start + s.numerics_steps * step) if s.numerics_steps is not None else 0.0
    training = count * s.seeds * (start + steps * step) / s.jobs
    for name, seconds in (("timings", timing), ("rounding", numerics), ("training", training)):
        display.note(f"{name}: about {seconds / 60:.0f} min")
    display.note(
        f"in all about {(timing + numerics + training) / 60:.0f} min, were every rung as fast as the first "
        f"({step * 1e3:.0f} ms a step, {steps:,} steps a run; evaluation not counted)"
    )


def _first_step(ledger: Ledger, arm: Arm, folder: Path) -> tuple[float, float, int]:
    """Seconds to start a process, seconds of a step, steps of a run."""
    finished, file = _few_steps(ledger, arm, folder)
    if finished.status != 0:
        raise UserError(f"ladder: '{arm.name}', with which all else is compared, does not run: {finished.reason()}")
    record = json.loads(file.read_text(encoding="utf-8"))
    step = record["train"]["step_seconds_p50"]
    return max(finished.seconds - 5 * step, 0.0), step, record["steps_per_run"]


def _few_steps(ledger: Ledger, arm: Arm, folder: Path) -> tuple[Finished, Path]:
    """A short timing of an arm in a process of its own, and the file of its record."""
    file = folder / f"{arm.slug}.json"
    arguments = commands.timing(arm, file, steps=3, warmup_steps=2)
    tool, log = ledger.tools / "time_net.py", file.with_suffix(".txt")
    return Process(tool, ledger.arguments(arguments), ranks=arm.ranks, log=log).wait(), file
