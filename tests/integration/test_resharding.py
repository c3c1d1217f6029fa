"""Saved on 4 ranks or 1, loaded on 1, 2, 3 and 4 under every strategy: the same bits, and the same losses after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast.train import checkpoint
from tests.factories import load_checkpoint
from tests.integration.runs import assert_same_state, command, records, run_process, under_torchrun
from tests.integration.strategy_worker import run_cases
from tests.integration.test_strategies import run_ranks

pytestmark = pytest.mark.slow

STRATEGIES = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.shard_degree=2"],
    # On the CPU by the stand-ins of fairscale_cpu.py.
    "fairscale": ["parallel=fairscale_fsdp"],
}
# 1, 2, 3 and 4 ranks can share a batch of 24; the 10 rows of the head do not divide by 3 or 4.
COMMON = [
    "model.width=32",
    "model.depth=2",
    "model.mlp_width=36",
    "model.patch_size=4",
    "data.image_size=8",
    "data.global_batch_size=24",
    "data.num_workers=0",
    "optim.ema_decay=0.9",
    "optim.clip_norm=0.5",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "runtime.tensorboard=false",
]
# SGD where losses are compared: AdamW makes much of the rounding of gradients that are zero.
OPTIMIZERS = {"sgd": ["optim=sgd", "optim.lr=0.05"], "adamw": ["optim=adamw", "optim.lr=1e-3"]}
SAVED_AT, MORE = 3, 20
SAVED = ("ddp", "fsdp", "hsdp", "fairscale")
LOADED = {1: ("single",), 2: ("ddp", "fsdp", "fairscale"), 3: ("ddp", "fsdp", "fairscale"), 4: SAVED}


def case(strategy: str, optimizer: str, digits: Path, steps: int, *more: str) -> dict[str, Any]:
    stop = f"schedule.max_steps={steps}"
    overrides = [*COMMON, *OPTIMIZERS[optimizer], *STRATEGIES[strategy], f"data.root={digits}", stop, *more]
    return {"config_name": "vit_digits", "overrides": overrides}


def saved(folder: Path, strategy: str, optimizer: str) -> Path:
    return folder / "runs" / f"{strategy}-{optimizer}" / "checkpoints" / f"step_{SAVED_AT:09d}"


def save(folder: Path, digits: Path, strategies: tuple[str, ...]) -> Path:
    """States saved on four ranks by the strategies, and by one process."""

    def cases(*strategies: str) -> dict[str, Any]:
        return {
            f"{strategy}-{optimizer}": {**case(strategy, optimizer, digits, SAVED_AT), "save": True}
            for strategy in strategies
            for optimizer in OPTIMIZERS
        }

    run_ranks(cases(*strategies), folder, 4)
    run_cases(cases("single"), folder)
    return folder


def go_on(folder: Path, origin: Path, strategies: tuple[str, ...], digits: Path, ranks: int) -> dict[str, Any]:
    """Each of the saved states under each strategy of LOADED; what each had and did, by name."""
    cases = {
        f"{before}-{optimizer}-{now}": case(
            now, optimizer, digits, SAVED_AT + MORE, f"resume={saved(origin, before, optimizer)}"
        )
        for before in strategies
        for optimizer in OPTIMIZERS
        for now in LOADED[ranks]
    }
    if ranks == 1:
        folder.mkdir()
        run_cases(cases, folder)
    else:
        run_ranks(cases, folder, ranks)
    return {name: torch.load(folder / f"{name}.pt") for name in cases}


def assert_goes_on(ends: dict[str, Any], origin: Path, losses: dict[str, list[float]]) -> None:
    for name, end in ends.items():
        before, optimizer, _ = name.split("-")
        state = load_checkpoint(saved(origin, before, optimizer))
        for part in ("model", "ema", "optimizer"):
            assert_same_state(end["began"][part], state[part], f"{name}.{part}")
        assert any(value.count_nonzero() for value in state["ema"].values())
        if optimizer == "sgd":
            assert len(end["losses"]) == MORE
            assert all(map(math.isfinite, end["losses"]))
            expected = losses.setdefault(before, end["losses"])
            assert end["losses"] == pytest.approx(expected, abs=1e-6), name


def test_saved_in_four_shards_and_whole_loaded_whole_and_in_three(tmp_path: Path, digits: Path) -> None:
    """The fast part of the table below."""
    origin = save(tmp_path / "saved", digits, ("fsdp",))
    losses: dict[str, list[float]] = {}
    for ranks in (1, 3):
        assert_goes_on(go_on(tmp_path / f"on{ranks}", origin, ("fsdp", "single"), digits, ranks), origin, losses)


def test_every_strategy_on_every_number_of_ranks(tmp_path: Path, digits: Path) -> None:
    origin = save(tmp_path / "saved", digits, SAVED)
    losses: dict[str, list[float]] = {}
    for ranks in LOADED:
        assert_goes_on(go_on(tmp_path / f"on{ranks}", origin, (*SAVED, "single"), digits, ranks), origin, losses)


def test_vit_h16_in_shards_is_saved_and_goes_on(tmp_path: Path) -> None:
    """The experiment as it is, but for 4 blocks and 64 pixels, on synthetic images; 0.6 GB a checkpoint."""
    overrides = [
        "parallel=fsdp",
        "data=synthetic",
        "model.depth=4",
        "data.image_size=64",
        "data.global_batch_size=8",
        "data.synthetic_train_images=32",
        "data.synthetic_val_images=4",
        "data.num_workers=0",
        "optim.accumulation_steps=2",
        "schedule.epochs=2",
        "schedule.warmup_epochs=1",
        "runtime.log_every_steps=1",
        "runtime.tensorboard=false",
        f"run_dir={tmp_path / 'run'}",
    ]
    for steps in (2, 4):
        training = command(*overrides, f"schedule.max_steps={steps}", config_name="vit_h16")
        run_process(under_torchrun(training, 2), cwd=tmp_path)
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1, 2, 3, 4]
    (event,) = records(tmp_path / "run", "event")
    assert (event["event"], event["step"]) == ("resumed", 2)
    opened = checkpoint.open_checkpoint(tmp_path / "run" / "checkpoints" / "best")
    assert opened.plain["world_size"] == 2
    assert opened.part("model").keys() == opened.part("ema").keys()
