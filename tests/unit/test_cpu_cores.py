"""The cores that are the run's, not the machine's: a container's limit on processor time counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.build import device as build_device
from pycls_fast.config import load_config
from pycls_fast.train.environment import environment

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("400000 100000", 4), ("150000 100000", 2), ("20000 100000", 1), ("max 100000", None), (None, None)],
)
def test_quotas(tmp_path: Path, text: str | None, cores: int | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert build_device.cpu_limit(tmp_path / "cpu.max") == cores


@pytest.mark.parametrize("seen", [12, 96])
def test_a_task_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch, seen: int) -> None:
    """Whether Slurm binds the tasks to them or lets each see the node's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(seen)))
    monkeypatch.setattr(build_device, "cpu_limit", lambda: None)
    for name, value in (("SLURM_CPUS_PER_TASK", "12"), ("LOCAL_WORLD_SIZE", "8"), ("SUBMITIT_EXECUTOR", "slurm")):
        monkeypatch.setenv(name, value)
    assert build_device.cores_per_rank() == 12
    # torchrun in one task: its ranks share it.
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    assert build_device.cores_per_rank() == seen // 8


@pytest.mark.slow
@pytest.mark.parametrize(("quota", "cores"), [(None, 12), (4, 4), (64, 12)])
def test_the_smaller_of_both_counts(monkeypatch: pytest.MonkeyPatch, quota: int | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(build_device, "cpu_limit", lambda: quota)
    assert build.cores() == environment(CPU, 1)["cpu_count"] == cores
    config = load_config("vit_digits", ["data.num_workers=null"])
    assert build.num_workers(config) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert build.num_workers(config) == cores // 3


def test_more_workers_than_sixteen_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(40)))
    monkeypatch.setattr(build_device, "cpu_limit", lambda: None)
    for count, workers in (("null", 16), ("20", 20)):
        assert build.num_workers(load_config("vit_digits", [f"data.num_workers={count}"])) == workers


@pytest.mark.parametrize(
    ("quota", "omp", "overrides", "threads"),
    [
        (1, None, [], 1),
        (None, None, [], 2),
        (1, "2", [], 2),
        (1, None, ["runtime.threads=2"], 2),
    ],
)
def test_threads_stay_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, omp: str | None, overrides: list[str], threads: int
) -> None:
    """Unless somebody chose their number."""
    monkeypatch.setattr(build_device, "cpu_limit", lambda: quota)
    monkeypatch.setattr(build_device, "_threads_before", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        config = load_config("vit_digits", ["runtime.threads=null", *overrides])
        build.set_backend(config, CPU, build.switches(config, CPU))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
