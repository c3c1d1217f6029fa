"""Settings of the whole process: those of one run do not stay for the next; the cores that are the run's.

Tests and figures of a CPU are those of a CPU on a machine with a GPU, too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.build import device as build_device
from pycls_fast.errors import UserError
from pycls_fast.train.environment import environment
from tests.conftest import is_about_cuda
from tests.factories import config_of
from tests.integration import runs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def set_backend(*overrides: str, threads: str = "null", device: torch.device = CPU) -> None:
    found = config_of(*overrides, f"runtime.threads={threads}")
    build.set_backend(found, device, build.switches(found, device))


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    # Takes back what tests before these have set.
    set_backend()
    before = cudnn.benchmark, cudnn.allow_tf32
    products = torch.get_float32_matmul_precision()
    yield
    cudnn.benchmark, cudnn.allow_tf32 = before
    set_backend()
    torch.set_float32_matmul_precision(products)


def test_deterministic_ranks_do_not_add_up_in_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads the variable when ranks connect."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_ALGO")
    found = []
    for asked in (False, True):
        with build.world(config_of(f"runtime.deterministic={asked}", "parallel=single")):
            found.append(os.environ.get("NCCL_ALGO"))
    assert found == [None, "^NVLS"]


OFFLOADS, RANK = ["speed.param_offload=cpu"], {"TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("overrides", "environment", "limit", "chosen", "threads"),
    [
        # Those of the process, here 2, stay if no run chose others.
        ([], {}, None, "null", 2),
        ([], {}, None, "3", 3),
        # Ranks of torchrun that update weights have their share of the cores.
        (OFFLOADS, RANK, None, "null", 3),
        (OFFLOADS, RANK, None, "4", 4),
        (OFFLOADS, RANK | {"OMP_NUM_THREADS": "2"}, None, "null", 2),
        (OFFLOADS, {"OMP_NUM_THREADS": "1"}, None, "null", 2),
        ([], RANK, None, "null", 2),
        # They stay within a container's limit, unless somebody chose their number.
        ([], {}, 1, "null", 1),
        ([], {"OMP_NUM_THREADS": "2"}, 1, "null", 2),
        ([], {}, 1, "2", 2),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    environment: dict[str, str],
    limit: int | None,
    chosen: str,
    threads: int,
) -> None:
    monkeypatch.setattr(build_device, "cores_per_rank", lambda: limit or 3)
    monkeypatch.setattr(build_device, "_threads_before", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(build_device, "cpu_limit", lambda: limit)
            for name, value in environment.items():
                patch.setenv(name, value)
            set_backend(*overrides, threads=chosen, device=CUDA if overrides else CPU)
            assert torch.get_num_threads() == threads
        monkeypatch.setattr(build_device, "cpu_limit", lambda: None)
        set_backend()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_float32_is_float32_unless_tf32_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, and after a run that had it: torch's own default for convolutions is TF32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = []
    for precision in ("tf32", "fp32", "tf32", "amp_bf16"):
        set_backend(f"precision={precision}", "speed.compile=off", device=CUDA)
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    assert found == [("high", True), ("highest", False)] * 2


@pytest.mark.parametrize(("device", "capability"), [(CPU, (9, 0)), (CUDA, (7, 5))])
def test_devices_without_tf32(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    line = r"^precision: tf32 needs CUDA of compute capability 8.0 .* on (the CPU|T4); use precision=fp32$"
    with pytest.raises(UserError, match=line):
        set_backend("precision=tf32", device=device)


def test_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(build_device, "keep_freed_memory", kept.append)
    for value in ("keep", "default"):
        set_backend(f"speed.allocator={value}")
    assert kept == [True, False]


def test_determinism() -> None:
    """On CUDA without a device: nothing here is computed."""
    found = []
    for device, asked in itertools.product((CPU, CUDA), ("true", "false")):
        set_backend(f"runtime.deterministic={asked}", device=device)
        found.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))
    # The choice of the fastest kernel differs from start to start.
    assert found == [(True, False), (False, False), (True, False), (False, True)]


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


@pytest.mark.parametrize(("quota", "cores"), [(4, 4), (64, 12)])
def test_the_smaller_of_both_counts(monkeypatch: pytest.MonkeyPatch, quota: int | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    monkeypatch.setattr(build_device, "cpu_limit", lambda: quota)
    assert build.cores() == environment(CPU, 1)["cpu_count"] == cores
    assert build.num_workers(config_of("data.num_workers=null")) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert build.num_workers(config_of("data.num_workers=null")) == cores // 3


def test_more_workers_than_sixteen_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_device, "cores", lambda: 40)
    for count, workers in (("null", 16), ("20", 20)):
        assert build.num_workers(config_of(f"data.num_workers={count}")) == workers


def test_a_process_of_a_pool_starts_no_workers() -> None:
    """As a daemon it cannot."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(build.num_workers, (config_of("data.num_workers=null"),)) == 0


def test_neither_a_test_nor_its_processes_see_a_gpu(request: pytest.FixtureRequest) -> None:
    if is_about_cuda(request.config.option.markexpr):
        pytest.skip("with tests of a GPU")
    assert not torch.cuda.is_available()
    assert runs.environment()["CUDA_VISIBLE_DEVICES"] == ""
