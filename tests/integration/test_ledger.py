"""A ladder on the digits from its command to its page; killed, and gone on with."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import ROOT, command, environment, run_process
from tests.processes import Started

pytestmark = pytest.mark.slow

SHORT = (
    "model.width=32", "model.depth=2", "model.mlp_width=32", "schedule.epochs=1", "schedule.warmup_epochs=0",
    "trackers=[]", "runtime.log_every_steps=4", "data.num_workers=0",
)  # fmt: skip

LADDER = """
description: three changes
baseline: {name: plain, overrides: [speed=reference]}
variants:
  # Other code than the reference's, with the same bits.
  - {name: same, overrides: [speed.metrics=interval]}
  - {name: nowhere, overrides: [precision=tf32]}
  - {name: half, overrides: [precision=amp_bf16]}
"""


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(LADDER)
    return file


def ledger(ladder: Path | None, digits: Path, *more: str) -> list[str]:
    measured = (
        "runs_at_most=8", "margin=60", "rounds=1", "steps=2", "warmup_steps=1", "seconds=0", "numerics_steps=2",
        "gradients=false",
    )  # fmt: skip
    asked = () if ladder is None else (f"ladder={ladder}",)
    return command(*asked, f"data.root={digits}", *SHORT, *measured, *more, tool="ledger")


# Some twenty processes, one after the other.
def test_a_ladder_is_killed_and_goes_on(ladder: Path, digits: Path, tmp_path: Path, started: Started) -> None:
    folder = tmp_path / "report"
    arguments = ledger(ladder, digits, f"output={folder}")
    process = started(arguments, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # The last of its round: with fewer, the whole round would be timed again.
    first = _kill_when_there_is(folder, "timings/half-*/round_0.json", process)
    stamp = first.stat().st_mtime_ns
    time.sleep(1)
    assert not [pid for pid in _commands() if str(folder) in pid], "a killed ledger leaves processes behind"

    said = run_process(arguments, cwd=tmp_path).stdout
    assert first.stat().st_mtime_ns == stamp
    assert "nowhere: timing 1 of 1: cannot run: precision: tf32 needs CUDA" in said

    record = json.loads((folder / "ledger.json").read_text())
    # Both starts, the one that was killed as well.
    assert record["wall_seconds"] > sum(run["seconds"] for run in record["accuracy"]["runs"])
    assert f"{record['wall_seconds'] / 60:.0f} min with jobs=" in (folder / "index.html").read_text()
    variants = {each["name"]: each for each in record["variants"]}
    assert list(variants) == ["plain", "same", "nowhere", "half"]
    assert variants["nowhere"]["status"] == "cannot run"
    assert {each["variant"]: each["word"] for each in record["accuracy"]["effects"]} == {
        "same": "identical",
        "half": "free",
    }
    assert "2 of 2 variants are free, 1 more did not run here" in said
    assert variants["half"]["timing"]["precision"] == "amp_bf16"
    assert variants["half"]["numerics"][1]["gradient_error"] > 10 * variants["plain"]["numerics"][1]["gradient_error"]
    for name in ("index.html", "charts/decision.svg"):
        assert (folder / name).stat().st_size > 500

    # Nothing is left to do, and nothing is done.
    again = run_process(arguments, cwd=tmp_path).stdout
    assert "training, seed" not in again
    other = run_process([*arguments, "steps=3"], cwd=tmp_path, expect=2).stderr
    assert (
        other == f"error: output: {folder} holds a ledger with different steps; choose another folder, or remove it\n"
    )
    gate = [arguments[0], str(ROOT / "tools" / "ledger.py"), "check", *[str(folder / "ledger.json")] * 2]
    assert "LOST" not in run_process(gate, cwd=tmp_path).stdout
    report = [*gate[:2], "report", str(folder / "ledger.json"), f"output={tmp_path / 'again'}"]
    assert f"report: {tmp_path / 'again' / 'index.html'}" in run_process(report, cwd=tmp_path).stdout
    assert (tmp_path / "again" / "index.html").read_bytes() == (folder / "index.html").read_bytes()


def test_a_question_is_answered_in_one_sentence(digits: Path, tmp_path: Path) -> None:
    more = ("speed=reference", "numerics_steps=null", "jobs=2", f"output={tmp_path / 'report'}")
    said = run_process(ledger(None, digits, "switches=[precision.amp_bf16]", *more), cwd=tmp_path).stdout
    before, _, after = said.partition("training, seed")
    assert re.search(r"training: at most about \d+ min\n8 trainings, scored on \d+ images, show differences of", before)
    assert "1 of 1 variant is free: a loss of 60 points matters, on vit_digits." in after
    answer = r"^precision\.amp_bf16: [\d.]+x \(one round\); free: at most [\d.]+ points lost \(95%\)$"
    assert re.search(answer, after, flags=re.MULTILINE)
    assert "The verdicts hold for this workload, vit_digits" in after


def test_sigterm_leaves_the_record_and_the_same_command_resumes(
    ladder: Path, digits: Path, tmp_path: Path, started: Started
) -> None:
    ladder.write_text(
        "description: one change\nbaseline: {name: plain}\nvariants: [{name: wide, overrides: [model.width=48]}]"
    )
    folder = tmp_path / "report"
    arguments = ledger(ladder, digits, f"output={folder}", "runs_at_most=0", "numerics_steps=null")
    process = started(
        arguments, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timed = _wait_for(folder, "timings/plain-*/round_0.json", process)
    _wait_for(folder, "logs/timings-wide-*.txt", process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 3, said
    assert "stopped; everything finished so far is saved, and the same command resumes" in said
    assert not [command for command in _commands() if str(folder) in command], "a stopped ledger leaves processes"
    assert _timed(folder) == [True, False]
    assert "unfinished: 1 of 2 measurements" in (folder / "index.html").read_text()

    stamp = timed.stat().st_mtime_ns
    run_process(arguments, cwd=tmp_path)
    # Again, in the same start as the other.
    assert timed.stat().st_mtime_ns > stamp
    assert _timed(folder) == [True, True]


def _timed(folder: Path) -> list[bool]:
    return [bool(each["timing"]) for each in json.loads((folder / "ledger.json").read_text())["variants"]]


def test_a_dry_run_measures_a_few_steps(ladder: Path, digits: Path, tmp_path: Path) -> None:
    folder, weights = tmp_path / "report", tmp_path / "any.pt"
    # Of an experiment that fine-tunes; a timing reads none.
    weights.touch()
    fine_tunes = ("needs_weights=true", f"weights={weights}")
    said = run_process(ledger(ladder, digits, f"output={folder}", "dry_run=true", *fine_tunes), cwd=tmp_path).stdout
    assert "half: speed=reference precision=amp_bf16" in said
    lines = [line.partition(": ")[0] for line in said.splitlines() if re.search(": (at most )?about ", line)]
    assert lines == ["timings", "rounding", "training"]
    # 1,438 images make 22 steps of 64.
    assert re.search(r"in total about \d+ min if every variant is as fast as the first \(\d+ ms a step, 22 steps", said)
    assert not folder.exists()


def _kill_when_there_is(folder: Path, file: str, process: subprocess.Popen[bytes]) -> Path:
    """End a ledger as with kill -9 once it has made a file."""
    found = _wait_for(folder, file, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return found


def _wait_for(folder: Path, file: str, process: subprocess.Popen[Any]) -> Path:
    """Wait until a ledger has made a file."""
    while not (found := list(folder.glob(file))):
        assert process.poll() is None
        time.sleep(0.1)
    return found[0]


def _commands() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:  # It ended in between.
                continue
    return found
