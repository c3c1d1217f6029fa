"""The cores that are the run's, not the machine's: a container's limit on processor time counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.build import cpu_cores
from pycls_fast.build import device as build_device
from pycls_fast.config import load_config
from pycls_fast.train.environment import environment

CPU = torch.device("cpu")


def limit(place: Path, own: str, files: dict[str, str]) -> int | None:
    for name, text in files.items():
        (place / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "mount" / name).write_text(f"{text}\n")
    (place / "own").write_text(own)
    return cpu_cores.cpu_limit(place / "mount", place / "own")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "20000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "900000 100000"}, 3),
        # Another group's is not ours.
        ("0::/a/b\n", {"a/c/cpu.max": "100000 100000"}, None),
        ("1:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        # The host's path, in a container.
        ("9:cpu:/docker/12\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, 2),
        ("5:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "25000"}, None),
    ],
)
def test_quotas(tmp_path: Path, own: str, files: dict[str, str], cores: int | None) -> None:
    assert limit(tmp_path, own, files) == cores


@pytest.mark.parametrize("seen", [12, 96])
def test_a_task_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch, seen: int) -> None:
    """Whether Slurm binds the tasks to them or lets each see the node's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(seen)))
    monkeypatch.setattr(cpu_cores, "cpu_limit", lambda: None)
    for name, value in (("SLURM_CPUS_PER_TASK", "12"), ("LOCAL_WORLD_SIZE", "8"), ("SUBMITIT_EXECUTOR", "slurm")):
        monkeypatch.setenv(name, value)
    assert cpu_cores.cores_per_rank() == 12
    # torchrun in one task: its ranks share it.
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    assert cpu_cores.cores_per_rank() == seen // 8


def test_without_control_groups(tmp_path: Path) -> None:
    assert cpu_cores.cpu_limit(tmp_path, tmp_path / "missing") is None


@pytest.mark.slow
@pytest.mark.parametrize(("quota", "cores"), [(None, 12), (4, 4), (64, 12)])
def test_the_smaller_of_both_counts(monkeypatch: pytest.MonkeyPatch, quota: int | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(cpu_cores, "cpu_limit", lambda: quota)
    assert build.cores() == environment(CPU, 1)["cpu_count"] == cores
    config = load_config("vit_digits", ["data.num_workers=null"])
    assert build.num_workers(config) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert build.num_workers(config) == cores // 3


def test_more_workers_than_sixteen_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(40)))
    monkeypatch.setattr(cpu_cores, "cpu_limit", lambda: None)
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
    monkeypatch.setattr(cpu_cores, "cpu_limit", lambda: quota)
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
