"""A scheduler's jobs through Hydra's submitit launcher, whose local form stands in for Slurm: two tasks, two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import TINY, command, environment, records, run_process, wait_for_step
from tests.processes import Started

pytestmark = pytest.mark.slow

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
LAUNCHER = ("--multirun", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2")


def test_tasks_are_ranks(tmp_path: Path, digits: Path) -> None:
    run = tmp_path / "run"
    arguments = (*TINY, *LAUNCHER, "parallel=fsdp", "schedule.max_steps=2", f"data.root={digits}", f"run_dir={run}")
    run_process(command(*arguments), cwd=tmp_path)
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    command_line = (run / "config.yaml").read_text().splitlines()[0]
    assert command_line.startswith("# python ")
    assert "train_net.py --config-name vit_digits" in command_line
    # What Slurm's tasks read, and their logs, are where all nodes see them.
    assert len(list(tmp_path.glob("multirun/.submitit/*/*_log.out"))) == 2


def test_a_mistake_comes_back(tmp_path: Path, digits: Path) -> None:
    arguments = (*TINY, *LAUNCHER, f"data.root={digits}", "data.global_batch_size=63", f"run_dir={tmp_path / 'run'}")
    done = run_process(command(*arguments), cwd=tmp_path, expect=2)
    assert (
        done.stderr.strip().splitlines()[-1].startswith("error: data.global_batch_size: 63 is not divisible by 2 ranks")
    )
    assert "Traceback" not in done.stderr


TASK = """
import os, sys
from pycls_fast.config import Verb, command_alone, command_line
class Own(Verb):
    def __call__(self, config):
        print("alone:", sys.argv[0], *command_alone())
        if os.environ["RANK"] == "1":
            raise ValueError("broken")
        return 0
command_line(Own)
"""


def test_a_crash_of_one_task_fails_and_is_in_its_log(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(TASK)
    done = run_process([sys.executable, str(script), *LAUNCHER], cwd=tmp_path, expect=1)
    (log,) = tmp_path.glob("multirun/.submitit/*/*_1_log.err")
    assert "Traceback" in log.read_text()
    assert log.read_text().endswith("ValueError: broken\n")
    assert "ValueError: broken" in done.stderr
    # The command that resumes one run starts it through the launcher, too.
    (out,) = tmp_path.glob("multirun/.submitit/*/*_0_log.out")
    assert f"alone: {script} --config-name vit_digits {' '.join(LAUNCHER)}\n" in out.read_text()


def test_a_warned_job_saves_and_is_started_again(tmp_path: Path, digits: Path, started: Started) -> None:
    """One task gets the signal, both leave after the same step, and the job that comes after goes on from it."""
    run = tmp_path / "run"
    arguments = (*TINY, *LAUNCHER, "parallel=ddp", "schedule.epochs=4", f"data.root={digits}", f"run_dir={run}")
    process = started(
        command(*arguments), cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_step(process, run, 3)
    os.kill(int((run / ".lock").read_text().split()[1]), signal.SIGUSR2)
    out, err = process.communicate()
    assert process.returncode == 0, (out, err)
    stopped, resumed = records(run, "event")
    assert (stopped["event"], stopped["signal"], resumed["event"]) == ("stopped", "SIGUSR2", "resumed")
    assert 2 <= stopped["step"] == resumed["step"]
    steps = [record["step"] for record in records(run, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert (run / "summary.json").is_file()


def test_a_job_of_slurm(tmp_path: Path) -> None:
    """It has its cores, and one that Slurm refuses leaves no logs."""
    arguments = command(*TINY, "--multirun", "hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=12")
    done = run_process(arguments, cwd=tmp_path, expect=2)
    assert done.stderr.startswith("error: hydra/launcher: submitit_slurm needs Slurm")
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/bash\necho sbatch: $SRUN_CPUS_PER_TASK cores >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    done = run_process(arguments, cwd=tmp_path, expect=1, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stderr.splitlines()[-1] == "error: sbatch: 12 cores"
