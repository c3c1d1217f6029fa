"""Strategies by number formats, compiled or not: ten losses as in one process, and three more under another strategy,
and evaluations.

On CUDA (`-m cuda`) with one rank and with as many as there are GPUs, without a call that waits for the device from the
third step on; on a CPU (`-m slow`) with two ranks, which shows that this file works. Only what is selected is trained.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast.build import has_compiler
from tests.integration.test_strategies import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS, MORE = 10, 3
# With room for all tokens; the balancing loss is of each rank's own tokens.
EXPERTS = ["model=vit_moe_digits", "model.expert_capacity=8", "model.balance_loss=0"]
STRATEGIES = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.shard_degree=1"],
    # Where they belong, without the stand-ins of fairscale_cpu.py.
    "flat": ["parallel=fairscale_fsdp"],
    "oss": ["parallel=fairscale_sharded_ddp"],
    # On several ranks.
    "tensor": ["parallel=fsdp", "parallel.tensor_degree=2"],
    "pipeline": ["parallel=ddp", "parallel.pipeline_degree=2"],
    "pipeline fsdp": ["parallel=fsdp", "parallel.pipeline_degree=2"],
    "experts": ["parallel=fsdp", "parallel.expert_degree=2", *EXPERTS],
    "experts gathered": ["parallel=fsdp", *EXPERTS],
    "experts alone": ["parallel=single", *EXPERTS],
}
DIVIDED = ("tensor", "pipeline", "pipeline fsdp", "experts")
# What goes on from whose checkpoint.
AFTER = {
    "ddp": "fsdp", "fsdp": "hsdp", "hsdp": "ddp", "flat": "fsdp", "oss": "flat",
    "tensor": "ddp", "pipeline": "fsdp", "pipeline fsdp": "tensor", "experts": "experts gathered",
}  # fmt: skip
PRECISIONS = ("amp_bf16", "bf16_params", "amp_fp16")
COMPILED = {
    **{what: ["optim.accumulation_steps=2", f"speed.compile={what}"] for what in ("off", "blocks", "model")},
    # What `speed=fast` takes for small steps on CUDA: one microbatch is replayed.
    "graphs": ["optim.accumulation_steps=1", "speed.compile=model", "speed.compile_mode=reduce-overhead"],
}
CASES = [
    *product(("ddp", "fsdp", "hsdp"), PRECISIONS, ("off", "blocks")),
    *product(("ddp", "fsdp"), ("amp_bf16",), ("model",)),
    ("ddp", "amp_bf16", "graphs"),
    *product(("flat",), ("amp_bf16", "bf16_params"), ("off",)),
    ("flat", "amp_bf16", "blocks"),
    *product(("oss",), ("amp_bf16", "amp_fp16"), ("off",)),
    *product(DIVIDED, ("amp_bf16",), ("off", "blocks")),
]
# Evaluation is the same code in all formats.
EVALUATED = ("amp_bf16", "off")
# How far losses of about 2.3 may be apart: other sums, and in compiled code other roundings.
BAND = {"amp_bf16": 3e-3, "bf16_params": 1e-2, "amp_fp16": 1e-3}
COMMON = [
    "model.width=32", "model.depth=2", "model.heads=2", "model.mlp_width=64", "model.patch_size=4",
    "model.drop_path=0", "model.init=trunc_normal", "data.image_size=16", "data.global_batch_size=32",
    "data.num_workers=0", "optim=sgd", "optim.lr=0.05", "optim.clip_norm=0.5", "optim.ema_decay=0.9",
    "schedule.epochs=1", "schedule.warmup_epochs=0", "augment=none", "speed=fast",
    "trackers=[]",
]  # fmt: skip


GPUS = min(torch.cuda.device_count(), 8)
# A device, and a number of ranks on it.
ON = [
    pytest.param(each, id=name, marks=[mark, pytest.mark.skipif(not there, reason="not on this machine")])
    for name, each, mark, there in (
        ("cpu", ("cpu", 2), pytest.mark.slow, has_compiler("cpu")),
        ("cuda-one", ("cuda", 1), pytest.mark.cuda, GPUS > 0),
        ("cuda-all", ("cuda", GPUS), pytest.mark.cuda, GPUS > 1),
    )
]


def _name(*parts: str) -> str:
    return "-".join(parts).replace(" ", "-")


def _alone(case: tuple[str, str, str]) -> tuple[str, str]:
    """The strategy and precision of the process with which a case is compared."""
    return "experts alone" if case[0] == "experts" else "single", case[1]


def _case(device: str, case: tuple[str, str, str], digits: Path, *more: str) -> dict[str, Any]:
    strategy, precision, compiled = case
    # A CPU replays nothing.
    chosen = [key for key in COMPILED[compiled] if device == "cuda" or "compile_mode" not in key]
    chosen += [f"precision={precision}", f"runtime.device={device}", f"data.root={digits}"]
    return {
        "config_name": "vit_digits",
        "overrides": [*COMMON, *STRATEGIES[strategy], *chosen, *more],
        "save": True,
        "evaluate": (precision, compiled) == EVALUATED,
    }


class Grid:
    """What one process and the ranks of each number end with, trained when it is first asked for."""

    def __init__(self, folder: Path, digits: Path, wanted: list[tuple[str, str, str]]) -> None:
        self._folder, self._digits, self._wanted = folder, digits, wanted

    def alone(self, device: str) -> Path:
        """One process without a strategy, uncompiled, to the end."""
        stop = f"schedule.max_steps={STEPS + MORE}"
        wanted = {_alone(case) for case in self._wanted}
        cases = {_name(*each): _case(device, (*each, "off"), self._digits, stop) for each in wanted}
        return self._run(device, 1, "alone", cases)

    def ranks(self, device: str, ranks: int) -> Path:
        """The first ten steps of every case, and the steps of the strategy that goes on."""
        # The worker makes a folder of its runs here.
        runs = self._folder / f"{device}-{ranks}" / "runs"
        stop = f"schedule.max_steps={STEPS}"
        wanted = [case for case in self._wanted if ranks > 1 or case[0] not in DIVIDED]
        cases = {_name(*case): _case(device, case, self._digits, stop) for case in wanted}
        for case in wanted:
            strategy, precision, compiled = case
            saved = runs / _name(*case) / "checkpoints" / f"step_{STEPS:09d}"
            more = f"schedule.max_steps={STEPS + MORE}", f"resume={saved}"
            # Shards cannot be replayed.
            after = (AFTER[strategy], precision, "model" if compiled == "graphs" else compiled)
            cases[_name(*case, "on")] = _case(device, after, self._digits, *more)
        return self._run(device, ranks, str(ranks), cases)

    def _run(self, device: str, ranks: int, name: str, cases: dict[str, Any]) -> Path:
        folder = self._folder / f"{device}-{name}"
        return folder if folder.exists() else run_ranks(cases, folder, ranks, device)


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Grid:
    here = (item for item in request.session.items if item.path == request.path)
    selected = [item.callspec.params["case"] for item in here if isinstance(item, pytest.Function)]
    return Grid(tmp_path_factory.mktemp("grid"), digits, [case for case in CASES if case in selected])


# One rank has nothing to divide.
TRIED = [
    pytest.param(case, *on.values, id=f"{_name(*case)}-{on.id}", marks=on.marks)
    for case in CASES
    for on in ON
    if on.id != "cuda-one" or case[0] not in DIVIDED
]


@pytest.mark.parametrize(("case", "on"), TRIED)
def test_losses_are_those_of_one_process(grid: Grid, case: tuple[str, str, str], on: tuple[str, int]) -> None:
    alone = torch.load(grid.alone(on[0]) / f"{_name(*_alone(case))}.pt")
    ours = [torch.load(grid.ranks(*on) / f"{name}.pt") for name in (_name(*case), _name(*case, "on"))]
    expected, losses = alone["losses"], [loss for part in ours for loss in part["losses"]]
    assert len(losses) == len(expected) == STEPS + MORE
    assert max(expected) - min(expected) > 5 * BAND[case[1]]
    assert losses == pytest.approx(expected, abs=BAND[case[1]])
    if case[1:] == EVALUATED:
        # After the first ten steps by this strategy, at the end by the one that went on.
        assert {record["count"] for part in ours for record in part["evaluations"]} == {359}
        scored, whole = ([record["loss"] for record in each["evaluations"]] for each in (ours[1], alone))
        assert scored == pytest.approx(whole, abs=BAND[case[1]])
