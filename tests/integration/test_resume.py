"""Stopped in the middle and started again: the same bits as a run that was never stopped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.files import checkpoints
from pycls_fast.train import train
from pycls_fast.train.loop import Loop, Stopped
from tests.factories import assert_same_bits
from tests.integration.runs import (
    TINY,
    assert_same_records,
    command,
    environment,
    newest_checkpoint,
    records,
    run,
    run_process,
    under_torchrun,
    wait_for_step,
)
from tests.processes import Started

# Everything that could carry state from step to step.
EVERYTHING = (
    "model.drop_path=0.2", "augment.mixup_alpha=0.4", "augment.cutmix_alpha=1.0", "augment.erase_probability=0.5",
    "augment.erase_value=noise", "augment.policy={name: rand_augment, num_ops: 1, magnitude: 5}",
    "optim.accumulation_steps=2", "optim.ema_decay=0.95", "data.num_workers=1", "runtime.checkpoint_every_steps=5",
)  # fmt: skip


def arguments(run_dir: Path, digits: Path, *overrides: str) -> list[str]:
    return command(*TINY, *EVERYTHING, f"data.root={digits}", f"run_dir={run_dir}", *overrides)


def start_and_interrupt(
    started: Started,
    arguments: Sequence[str],
    run_dir: Path,
    at_step: int,
    number: signal.Signals,
) -> tuple[int, str, str]:
    """Start, wait until the step is done, send a signal; returns (status, standard output, standard error).

    The whole process group is signalled, as a terminal and launchers do, workers included.
    """
    pipe = subprocess.PIPE
    process = started(list(arguments), cwd=run_dir.parent, env=environment(), text=True, stdout=pipe, stderr=pipe)
    wait_for_step(process, run_dir, at_step)
    os.killpg(process.pid, number)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """A run from beginning to end."""
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run(run_dir, digits, *EVERYTHING) == 0
    return run_dir


def assert_same_run(run_dir: Path, reference: Path) -> None:
    ours, theirs = newest_checkpoint(run_dir), newest_checkpoint(reference)
    for state in (ours, theirs):
        for key in ("seconds", "config"):
            del state[key]
    assert_same_bits(ours, theirs)
    assert_same_records(run_dir, reference)


@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch(tmp_path: Path, digits: Path, uninterrupted: Path, started: Started) -> None:
    """Twice, the second time in the second epoch, and never at a step that was saved."""
    run_dir = tmp_path / "run"
    for at_step in (8, 32):
        status, _, _ = start_and_interrupt(started, arguments(run_dir, digits), run_dir, at_step, signal.SIGKILL)
        assert status == -signal.SIGKILL
    done = run_process(arguments(run_dir, digits), cwd=tmp_path)
    assert "resumed from" in done.stdout
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_eight_steps_are_five_and_three(tmp_path: Path, digits: Path, adapted: bool) -> None:
    keys = [*EVERYTHING, "data.num_workers=0"]
    if adapted:
        assert run(tmp_path / "first", digits, *keys, "schedule.max_steps=1") == 0
        keys += [f"weights={tmp_path / 'first'}", "optim.trainable=head", "optim.lora_rank=2"]
    for name, steps in (("whole", 8), ("parts", 5), ("parts", 8)):
        assert run(tmp_path / name, digits, *keys, f"schedule.max_steps={steps}") == 0
    whole, parts = newest_checkpoint(tmp_path / "whole"), newest_checkpoint(tmp_path / "parts")
    for part in ("model", "ema", "optimizer"):
        assert_same_bits(parts[part], whole[part])
    losses = [[record["loss"] for record in records(tmp_path / name, "train")] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_three_ranks_that_resume_add_in_the_same_order(tmp_path: Path, digits: Path) -> None:
    """Two have no other order."""
    keys = [*TINY, f"data.root={digits}", "data.global_batch_size=48", "runtime.deterministic=true"]
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        run_process(under_torchrun(command(*keys, f"run_dir={name}", f"schedule.max_steps={steps}"), 3), cwd=tmp_path)
    whole, parts = newest_checkpoint(tmp_path / "whole"), newest_checkpoint(tmp_path / "parts")
    assert_same_bits(parts["optimizer"], whole["optimizer"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_says_how_to_go_on(
    tmp_path: Path, digits: Path, uninterrupted: Path, number: signal.Signals, started: Started
) -> None:
    run_dir = tmp_path / "run"
    status, out, err = start_and_interrupt(started, arguments(run_dir, digits), run_dir, 12, number)
    assert status == 3, err
    assert "Traceback" not in err
    saved = newest_checkpoint(run_dir)["step"]
    assert saved >= 12
    assert f"stopped by {number.name}; everything up to step {saved} is saved" in out
    (how,) = [line for line in out.splitlines() if line.startswith("resume with: ")]
    assert f"run_dir={run_dir}" in how
    # As it is printed, whichever Python the shell finds first.
    run_process(shlex.split(how.removeprefix("resume with: ")), cwd=tmp_path)
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.slow
def test_finished_run_stays_as_it_is(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, digits, "schedule.max_steps=3") == 0
    files = ("metrics.jsonl", "summary.json", "config.yaml", "environment.json")
    before = {name: (tmp_path / name).read_text() for name in files}
    summary = json.loads((tmp_path / "summary.json").read_text())
    capsys.readouterr()
    # Fewer steps than there are do not undo any, and settings with which no step is trained are not the run's.
    assert run(tmp_path, digits, "schedule.max_steps=2", "optim.lr=1e-5") == 0
    assert {name: (tmp_path / name).read_text() for name in before} == before
    printed = capsys.readouterr().out
    assert "nothing to train: 0.14 epochs (3 steps) are done, and 2 were asked for; the run's" in printed
    assert "done: top-1" in printed
    assert "changed since" not in printed
    assert run(tmp_path, digits, "schedule.max_steps=3") == 0
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert "nothing to train: 0.14 epochs (3 steps) are done, and 3 were asked for; " in capsys.readouterr().out
    # A summary that a kill has prevented has the times of the steps, not of a process that trained none.
    (tmp_path / "summary.json").unlink()
    assert run(tmp_path, digits, "schedule.max_steps=3") == 0
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again == summary | {key: again[key] for key in ("wall_seconds", "memory_peak_bytes")}
    assert again["memory_peak_bytes"] == max(record["memory_peak_bytes"] for record in records(tmp_path, "train"))
    # More steps than before: it continues from where it ended, and the records say with which changes.
    assert run(tmp_path, digits, "schedule.max_steps=5", "optim.lr=1e-5") == 0
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2, 3, 4, 5]
    (resumed,) = records(tmp_path, "event")
    assert (resumed["event"], resumed["step"], resumed["changed"]) == ("resumed", 3, {"optim.lr": [0.002, 1e-5]})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["optim"]["lr"] == 1e-5


@pytest.mark.slow
def test_stopped_while_the_average_is_evaluated(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    """The last evaluation is done again, both halves of it, and stands in the records once."""
    own = ("schedule.max_steps=3", "optim.ema_decay=0.5")

    def stop_in_the_average(loop: Loop) -> None:
        if records(tmp_path, "eval"):
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_stop_if_asked", stop_in_the_average)
        assert run(tmp_path, digits, *own) == 3
    assert [record["weights"] for record in records(tmp_path, "eval")] == ["model"]
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == "a signal to another rank"
    assert (tmp_path / "confusion.png").is_file()
    assert run(tmp_path, digits, *own) == 0
    assert [(record["step"], record["weights"]) for record in records(tmp_path, "eval")] == [(3, "model"), (3, "ema")]
    assert json.loads((tmp_path / "summary.json").read_text())["final"]["step"] == 3
    best = tmp_path / "checkpoints" / "best"
    assert best.resolve().name == "step_000000003"
    # Killed between the record and the link.
    best.unlink()
    assert run(tmp_path, digits, *own) == 0
    assert best.resolve().name == "step_000000003"


@pytest.mark.slow
def test_goes_on_from_a_named_checkpoint_in_a_new_folder(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert run(old, digits, "schedule.max_steps=3") == 0
    saved = f"resume={old / 'checkpoints' / 'step_000000003'}"
    assert run(new, digits, "schedule.max_steps=5", saved) == 0
    assert [record["step"] for record in records(new, "train")] == [4, 5]
    # The same command again, with more steps to do: from its own newest checkpoint, even if the old ones are gone.
    shutil.rmtree(old)
    assert run(new, digits, "schedule.max_steps=8", saved) == 0
    assert [record["step"] for record in records(new, "train")] == [4, 5, 6, 7, 8]
    assert not list((new / "checkpoints").glob("set_aside*"))
    # A checkpoint of its own is where it goes back to, every time.
    for _ in range(2):
        own = f"resume={new / 'checkpoints' / 'step_000000005'}"
        assert run(new, digits, "schedule.max_steps=6", own) == 0
        assert [record["step"] for record in records(new, "train")] == [4, 5, 6]
    assert len(list((new / "checkpoints").glob("set_aside*"))) == 2
    # But a job that is requeued has the same command, and goes on.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run(new, digits, "schedule.max_steps=7", own) == 0
    assert [record["step"] for record in records(new, "train")] == [4, 5, 6, 7]
    assert len(list((new / "checkpoints").glob("set_aside*"))) == 2


def test_resuming_another_run_is_refused(tmp_path: Path, digits: Path) -> None:
    run(tmp_path, digits, "schedule.max_steps=2")
    line = rf"run_dir: {tmp_path}/.* is of the experiment vit_digits, and this is resnet"
    with pytest.raises(UserError, match=line) as one:
        train(load_config("resnet_digits", [f"data.root={digits}", f"run_dir={tmp_path}"]))
    assert len(one.value.lines) == 1
    for override, line in (
        ("resume=never", r"run_dir: .* already holds a run; choose another or use resume=auto"),
        ("data.shuffle=blocks", r"^data.shuffle: blocks is for tar shards"),
        (f"resume={tmp_path / 'nothing'}", r"^resume: .*nothing: no such checkpoint"),
        (f"resume={'a' * 300}", r"^resume: .*aa: cannot be read \(File name too long\)"),
    ):
        with pytest.raises(UserError, match=line):
            run(tmp_path, digits, "schedule.max_steps=2", override)
    for path in checkpoints(tmp_path / "checkpoints"):
        (path / "state.json").unlink()
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"run_dir: none of the checkpoints in .* can be resumed from; repair one"):
        run(tmp_path, digits)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=r"run_dir: .* has records of checkpoints, but .* holds none; bring them back"):
        run(tmp_path, digits)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    # Who was refused keeps nobody out.
    assert not (tmp_path / ".lock").exists()


@pytest.mark.slow
def test_killed_before_its_first_checkpoint(tmp_path: Path, digits: Path) -> None:
    """It begins anew, and the records do not hold its steps twice."""
    assert run(tmp_path, digits, "schedule.max_steps=3") == 0
    before = [record["loss"] for record in records(tmp_path, "train")]
    shutil.rmtree(tmp_path / "checkpoints")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in lines if '"checkpoint"' not in line))
    assert run(tmp_path, digits, "schedule.max_steps=3") == 0
    assert [record["loss"] for record in records(tmp_path, "train")] == before
