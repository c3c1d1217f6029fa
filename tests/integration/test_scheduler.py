"""A scheduler's jobs through Hydra's submitit launcher, whose local form stands in for Slurm: two tasks, two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import TINY, command, run_process

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
LAUNCHER = ("--multirun", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2")


def test_tasks_are_ranks(tmp_path: Path, digits: Path) -> None:
    run = tmp_path / "run"
    arguments = (*TINY, *LAUNCHER, "parallel=fsdp", "schedule.max_steps=2", f"data.root={digits}", f"run_dir={run}")
    run_process(command(*arguments), cwd=tmp_path)
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    # What Slurm's tasks read, and their logs, are where all nodes see them.
    assert len(list(tmp_path.glob("multirun/.submitit/*/*_log.out"))) == 2


def test_a_mistake_comes_back(tmp_path: Path, digits: Path) -> None:
    arguments = (*TINY, *LAUNCHER, f"data.root={digits}", "data.global_batch_size=63", f"run_dir={tmp_path / 'run'}")
    done = run_process(command(*arguments), cwd=tmp_path, expect=2)
    assert (
        done.stderr.strip().splitlines()[-1].startswith("error: data.global_batch_size: 63 is not divisible by 2 ranks")
    )
    assert "Traceback" not in done.stderr
