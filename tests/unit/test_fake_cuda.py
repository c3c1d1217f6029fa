"""Training and evaluation on a stand-in for a GPU, which computes nothing: a tensor that is left on the CPU, a format
that a kernel does not have and a wait for the device are found without a GPU. What is computed, tests/cuda shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.cuda.test_strategies import _case, _name
from tests.integration.runs import ROOT, run_process

LIBRARIES = sorted((Path(torch.__file__).parent / "lib").glob("lib*.so"))
TRITON = find_spec("triton")

pytestmark = pytest.mark.skipif(
    # Functions of other versions have other names and arguments.
    not ((torch.version.cuda or "").startswith("13.") and TRITON and shutil.which("gcc") and shutil.which("nm")),
    reason="needs gcc, nm and torch with CUDA 13",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fake_cuda.c`, and functions that return 0 for whatever else torch calls of CUDA."""
    assert TRITON is not None
    assert TRITON.origin is not None
    headers = Path(TRITON.origin).parent / "backends" / "nvidia" / "include"
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", *LIBRARIES], text=True)
    called = sorted(set(re.findall(r" U ((?:(?:__)?cuda|cublas|cudnn|nccl|cu[A-Z])\w*)", listed)))
    folder = tmp_path_factory.mktemp("library")
    made, others = folder / "fake_cuda.so", folder / "others.c"
    others.write_text("\n".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}" for name in called))
    options = ["-shared", "-fPIC", "-w", "-isystem", headers, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", made, ROOT / "tests" / "fake_cuda.c", others], check=True)
    return made


@pytest.fixture(autouse=True)
def fake_cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that the test starts see a GPU."""
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


STEP = "tests/cuda/test_train.py::test_step_never_waits_for_the_device"
QUICK = [f"vit_digits-amp_bf16-{chosen}" for chosen in ("", "speed.cuda_graphs=on")] + ["resnet_digits-amp_fp16-"]
CHOSEN = [
    pytest.param([f"{STEP}[{case}]" for case in QUICK], id="quick"),
    # Compiling takes more of the driver.
    pytest.param([STEP, "-k", "not compile"], id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_the_step_never_waits_for_the_device(chosen: list[str]) -> None:
    # Without the cache: `pytest --lf` would try the CUDA tests that fail here.
    options = ["-m", "cuda", "--tb=short", "-p", "no:cacheprovider"]
    done = run_process([sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT)
    assert " passed" in done.stdout


@pytest.mark.slow
def test_strategies_with_one_rank(tmp_path: Path, digits: Path) -> None:
    """Without evaluation, which counts by what it reads from the device."""
    formats = [("ddp", "amp_fp16"), ("fsdp", "amp_bf16"), ("fsdp", "bf16_params"), ("hsdp", "amp_bf16")]
    cases = {_name(*each): _case("cuda", (*each, "off"), digits, "schedule.max_steps=4") for each in formats}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({name: {**case, "evaluate": False} for name, case in cases.items()}))
    worker = ROOT / "tests" / "integration" / "strategy_worker.py"
    run_process([sys.executable, str(worker), str(file), str(tmp_path), "cuda"], cwd=ROOT)
