"""Strategies by number formats, compiled or not: ten losses as in one process, and three more under another strategy.

With one rank and with as many as there are GPUs, without a call that waits for the device from the third step on.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_strategies import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

STEPS, MORE = 10, 3
STRATEGIES = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.shard_degree=1"],
    # Where they belong, without the stand-ins of fairscale_cpu.py.
    "flat": ["parallel=fairscale_fsdp"],
    "oss": ["parallel=fairscale_sharded_ddp"],
}
# What goes on from whose checkpoint.
AFTER = {"ddp": "fsdp", "fsdp": "hsdp", "hsdp": "ddp", "flat": "fsdp", "oss": "flat"}
PRECISIONS = ("amp_bf16", "bf16_params", "amp_fp16")
COMPILED = ("off", "blocks")
CASES = [
    *product(("ddp", "fsdp", "hsdp"), PRECISIONS, COMPILED),
    *product(("ddp", "fsdp"), ("amp_bf16",), ("model",)),
    *product(("flat",), ("amp_bf16", "bf16_params"), ("off",)),
    ("flat", "amp_bf16", "blocks"),
    *product(("oss",), ("amp_bf16", "amp_fp16"), ("off",)),
]
# How far losses of about 2.3 may be apart: other sums, and in compiled code other roundings.
BAND = {"amp_bf16": 3e-3, "bf16_params": 1e-2, "amp_fp16": 1e-3}
COMMON = [
    "model.width=32", "model.depth=2", "model.heads=2", "model.mlp_width=64", "model.patch_size=4",
    "model.drop_path=0", "model.init=trunc_normal", "data.image_size=16", "data.global_batch_size=32",
    "data.num_workers=0", "optim=sgd", "optim.lr=0.05", "optim.clip_norm=0.5", "optim.ema_decay=0.9",
    "optim.accumulation_steps=2", "schedule.epochs=1", "schedule.warmup_epochs=0", "augment=none", "speed=fast",
    "trackers=[]",
]  # fmt: skip


def _name(*parts: str) -> str:
    return "-".join(parts)


def _case(strategy: str, precision: str, compiled: str, digits: Path, *more: str) -> dict[str, Any]:
    chosen = [f"precision={precision}", f"speed.compile={compiled}", "runtime.device=cuda", f"data.root={digits}"]
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

    def alone(self) -> Path:
        """One process without a strategy, uncompiled, to the end."""
        stop = f"schedule.max_steps={STEPS + MORE}"
        cases = {precision: _case("single", precision, "off", self._digits, stop) for precision in PRECISIONS}
        return self._run("alone", cases, 1)

    def ranks(self, ranks: int) -> Path:
        """The first ten steps of every case, and the steps of the strategy that goes on."""
        # The worker makes a folder of its runs here.
        runs = self._folder / str(ranks) / "runs"
        cases = {_name(*case): _case(*case, self._digits, f"schedule.max_steps={STEPS}") for case in CASES}
        for strategy, precision, compiled in CASES:
            saved = runs / _name(strategy, precision, compiled) / "checkpoints" / f"step_{STEPS:09d}"
            more = f"schedule.max_steps={STEPS + MORE}", f"resume={saved}"
            case = _case(AFTER[strategy], precision, compiled, self._digits, *more)
            cases[_name(strategy, precision, compiled, "on")] = case
        return self._run(str(ranks), cases, ranks)

    def _run(self, name: str, cases: dict[str, Any], ranks: int) -> Path:
        folder = self._folder / name
        return folder if folder.exists() else run_ranks(cases, folder, ranks, "cuda")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Grid:
    return Grid(tmp_path_factory.mktemp("grid"), digits)


@pytest.mark.parametrize("many", [False, True], ids=["one rank", "ranks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: _name(*case))
def test_losses_are_those_of_one_process(grid: Grid, case: tuple[str, str, str], many: bool) -> None:
    # The batch of 32 in two microbatches.
    ranks = min(torch.cuda.device_count(), 8) if many else 1
    if many and ranks == 1:
        pytest.skip("one GPU")
    expected = torch.load(grid.alone() / f"{case[1]}.pt")["losses"]
    folder = grid.ranks(ranks)
    losses = [
        loss for name in (_name(*case), _name(*case, "on")) for loss in torch.load(folder / f"{name}.pt")["losses"]
    ]
    assert len(losses) == len(expected) == STEPS + MORE
    assert max(expected) - min(expected) > 5 * BAND[case[1]]
    assert losses == pytest.approx(expected, abs=BAND[case[1]])
