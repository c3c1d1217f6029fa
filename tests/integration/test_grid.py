"""Strategies by number formats, compiled or not: ten losses as in one process, and three more under another strategy.

On CUDA (`-m cuda`) with one rank and with as many as there are GPUs, without a call that waits for the device from the
third step on; on a CPU with one rank and with two.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast.build import has_compiler
from tests.integration.test_strategies import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS, MORE = 10, 3
STRATEGIES = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.shard_degree=1"],
}
# What goes on from whose checkpoint.
AFTER = {"ddp": "fsdp", "fsdp": "hsdp", "hsdp": "ddp"}
PRECISIONS = ("amp_bf16", "bf16_params", "amp_fp16")
COMPILED = ("off", "blocks")
CASES = [*product(AFTER, PRECISIONS, COMPILED), *product(("ddp", "fsdp"), ("amp_bf16",), ("model",))]
# How far losses of about 2.3 may be apart: other sums, and in compiled code other roundings.
BAND = {"amp_bf16": 3e-3, "bf16_params": 1e-2, "amp_fp16": 1e-3}
COMMON = [
    "model.width=32",
    "model.depth=2",
    "model.heads=2",
    "model.mlp_width=64",
    "model.patch_size=4",
    "model.drop_path=0",
    "model.init=trunc_normal",
    "data.image_size=16",
    "data.global_batch_size=32",
    "data.num_workers=0",
    "optim=sgd",
    "optim.lr=0.05",
    "optim.clip_norm=0.5",
    "optim.ema_decay=0.9",
    "optim.accumulation_steps=2",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "augment=none",
    "speed=fast",
    "runtime.tensorboard=false",
]
DEVICES = [
    pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.skipif(not has_compiler("cpu"), reason="no compiler")]),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def _name(*parts: str) -> str:
    return "-".join(parts)


def _goes_on(device: str, case: tuple[str, str, str]) -> bool:
    """Compiling again takes a CPU minutes."""
    return device == "cuda" or case[2] == "off" or case[1] == "amp_bf16"


def _case(strategy: str, precision: str, compiled: str, device: str, digits: Path, *more: str) -> dict[str, Any]:
    chosen = [f"precision={precision}", f"speed.compile={compiled}", f"runtime.device={device}", f"data.root={digits}"]
    return {
        "config_name": "vit_digits",
        "overrides": [*COMMON, *STRATEGIES[strategy], *chosen, *more],
        "save": True,
        "evaluate": False,
    }


class Grid:
    """What one process and the ranks of each number end with, trained when it is first asked for."""

    def __init__(self, folder: Path, digits: Path) -> None:
        self._folder, self._digits = folder, digits

    def alone(self, device: str) -> Path:
        """One process without a strategy, uncompiled, to the end."""
        stop = f"schedule.max_steps={STEPS + MORE}"
        return self._run(
            f"{device}-alone",
            {precision: _case("single", precision, "off", device, self._digits, stop) for precision in PRECISIONS},
            1,
            device,
        )

    def ranks(self, device: str, ranks: int) -> Path:
        """The first ten steps of every case, and the steps of the strategy that goes on."""
        name = f"{device}-{ranks}"
        # The worker makes a folder of its runs here.
        runs = self._folder / name / "runs"
        cases = {}
        for case in CASES:
            cases[_name(*case)] = _case(*case, device, self._digits, f"schedule.max_steps={STEPS}")
        for strategy, precision, compiled in filter(partial(_goes_on, device), CASES):
            saved = runs / _name(strategy, precision, compiled) / "checkpoints" / f"step_{STEPS:09d}"
            more = f"schedule.max_steps={STEPS + MORE}", f"resume={saved}"
            case = _case(AFTER[strategy], precision, compiled, device, self._digits, *more)
            cases[_name(strategy, precision, compiled, "on")] = case
        return self._run(name, cases, ranks, device)

    def _run(self, name: str, cases: dict[str, Any], ranks: int, device: str) -> Path:
        folder = self._folder / name
        return folder if folder.exists() else run_ranks(cases, folder, ranks, device)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Grid:
    return Grid(tmp_path_factory.mktemp("grid"), digits)


@pytest.mark.parametrize("many", [False, True], ids=["one rank", "ranks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: _name(*case))
@pytest.mark.parametrize("device", DEVICES)
def test_losses_are_those_of_one_process(grid: Grid, device: str, case: tuple[str, str, str], many: bool) -> None:
    ranks = 1
    if many:
        # The batch of 32 in two microbatches.
        ranks = 2 if device == "cpu" else min(torch.cuda.device_count(), 8)
        if ranks == 1:
            pytest.skip("one GPU")
    expected = torch.load(grid.alone(device) / f"{case[1]}.pt")["losses"]
    folder = grid.ranks(device, ranks)
    names = [_name(*case), *([_name(*case, "on")] if _goes_on(device, case) else [])]
    losses = [loss for name in names for loss in torch.load(folder / f"{name}.pt")["losses"]]
    assert len(expected) == STEPS + MORE
    assert max(expected) - min(expected) > 5 * BAND[case[1]]
    assert len(losses) >= STEPS
    assert losses == pytest.approx(expected[: len(losses)], abs=BAND[case[1]])
