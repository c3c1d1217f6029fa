"""Saved on 4 ranks or 1, loaded on 1, 2, 3 and 4 under every strategy: the same bits, and the same losses after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factories import assert_same_bits, load_checkpoint
from tests.integration.strategy_worker import run_cases
from tests.integration.test_strategies import MODELS, STRATEGIES, run_ranks

pytestmark = pytest.mark.slow

# 1, 2, 3 and 4 ranks can share a batch of 24, in the two parts that stages need; the 10 rows of the head do not divide
# by 3 or 4.
COMMON = [
    *MODELS["vit"][1], "data.global_batch_size=24", "data.num_workers=0", "optim.ema_decay=0.9",
    "optim.clip_norm=0.5", "schedule.epochs=1", "schedule.warmup_epochs=0", "trackers=[]",
    "optim.accumulation_steps=2",
]  # fmt: skip
# With a large eps, for AdamW makes much of the rounding of gradients that are zero (the biases of the keys).
COMMON += ["optim=adamw", "optim.lr=0.005", "optim.eps=0.001", "optim.weight_decay=0.1", "optim.layer_decay=0.6"]
SAVED_AT, MORE = 3, 10
SAVED = ("ddp", "zero3", "hsdp", "tensor", "pipeline", "pipeline tensor", "fairscale3", "oss")
LOADED = {
    1: ("single",),
    2: ("ddp", "zero3", "tensor", "pipeline", "fairscale3", "oss"),
    3: ("zero3", "fairscale3"),
    4: ("zero3", "pipeline tensor"),
}


def case(strategy: str, digits: Path, steps: int, *more: str) -> dict[str, Any]:
    chosen = STRATEGIES.get(strategy, ["parallel=single"])
    overrides = [*COMMON, *chosen, f"data.root={digits}", f"schedule.max_steps={steps}", *more]
    return {"config_name": "vit_digits", "overrides": overrides, "save": steps == SAVED_AT, "evaluate": False}


def saved(folder: Path, strategy: str) -> Path:
    return folder / "runs" / strategy / "checkpoints" / f"step_{SAVED_AT:09d}"


def go_on(folder: Path, origin: Path, digits: Path, ranks: int) -> dict[str, Any]:
    """Each of the saved states under each strategy of LOADED; what each had and did, by name."""
    cases = {
        f"{before}-{now}": case(now, digits, SAVED_AT + MORE, f"resume={saved(origin, before)}")
        for before in (*SAVED, "single")
        for now in LOADED[ranks]
    }
    if ranks == 1:
        folder.mkdir()
        run_cases(cases, folder)
    else:
        run_ranks(cases, folder, ranks)
    return {name: torch.load(folder / f"{name}.pt") for name in cases}


def test_every_strategy_on_every_number_of_ranks(tmp_path: Path, digits: Path) -> None:
    """To the bit: parameters, buffers, average and optimizer state; and the losses after it."""
    origin = tmp_path / "saved"
    run_ranks({strategy: case(strategy, digits, SAVED_AT) for strategy in SAVED}, origin, 4)
    run_cases({"single": case("single", digits, SAVED_AT)}, origin)
    states = {before: load_checkpoint(saved(origin, before)) for before in (*SAVED, "single")}
    # All files hold the same names and shapes, and the values that one process comes to.
    for before in SAVED:
        for part in ("model", "ema", "optimizer"):
            assert_near(states[before][part], states["single"][part], f"{before}.{part}")
    losses: dict[str, list[float]] = {}
    for ranks in LOADED:
        for name, end in go_on(tmp_path / f"on{ranks}", origin, digits, ranks).items():
            before, _ = name.split("-")
            for part in ("model", "ema", "optimizer"):
                assert_same_bits(end["began"][part], states[before][part])
            assert len(end["losses"]) == MORE
            assert all(map(math.isfinite, end["losses"]))
            assert end["losses"] == pytest.approx(losses.setdefault(before, end["losses"]), abs=1e-5), name


@pytest.mark.parametrize("strategy", ["experts", "experts tensor"])
def test_divided_experts_are_saved_whole(tmp_path: Path, digits: Path, strategy: str) -> None:
    """Saved with 2 x 2 ranks, loaded by one, by several that divide them and by several that do not."""
    # With room for all tokens; the balancing loss is of each rank's own tokens.
    model = ["model=vit_moe_digits", *COMMON[:5], "model.expert_capacity=8", "model.balance_loss=0"]
    origin = run_ranks({strategy: case(strategy, digits, SAVED_AT, *model)}, tmp_path / "saved", 4)
    state = load_checkpoint(saved(origin, strategy))
    resume = [*model, f"resume={saved(origin, strategy)}"]
    ends = {}
    for ranks, strategies in {1: ["single"], 2: ["tensor", "experts"], 4: ["zero3", "experts tensor"]}.items():
        cases = {name: case(name, digits, SAVED_AT + MORE, *resume) for name in strategies}
        folder = run_ranks(cases, tmp_path / str(ranks), ranks)
        ends |= {name: torch.load(folder / f"{name}.pt") for name in cases}
    for name, end in ends.items():
        for part in ("model", "ema", "optimizer"):
            assert_same_bits(end["began"][part], state[part])
        assert end["losses"] == pytest.approx(ends["single"]["losses"], abs=1e-5), name


def assert_near(ours: Any, theirs: Any, place: str) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), place
        for key, value in theirs.items():
            assert_near(ours[key], value, f"{place}.{key}")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=place)
