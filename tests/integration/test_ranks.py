"""Two processes and one: the same training at the same global batch, also with gradients as low-rank matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.train import train
from tests.integration.runs import TINY, command, newest_checkpoint, records, run_process, under_torchrun

COMMON = (*TINY, "schedule.max_steps=20", "schedule.epochs=1", "schedule.warmup_epochs=0.5", "optim.clip_norm=1.0")
SAME = (*COMMON, "optim.ema_decay=0.9", "optim.accumulation_steps=2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[..., Path]:
    """What one process trains, once for each model."""

    @cache
    def run(*model: str) -> Path:
        folder = tmp_path_factory.mktemp("one")
        assert train(load_config("vit_digits", [*SAME, *model, f"data.root={digits}", f"run_dir={folder}"])) == 0
        return folder

    return run


# With room for all tokens; the balancing loss is of each rank's own tokens.
EXPERTS = ["model=vit_moe_digits", "model.expert_capacity=8", "model.balance_loss=0"]


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (["ddp"], []),
        (["fsdp"], []),
        pytest.param(["fsdp", "parallel.tensor_degree=2"], [], marks=pytest.mark.slow),
        pytest.param(["ddp", "parallel.pipeline_degree=2"], [], marks=pytest.mark.slow),
        pytest.param(["ddp"], EXPERTS, marks=pytest.mark.slow),
        pytest.param(["fsdp", "speed.recompute=full"], EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(
    alone: Callable[..., Path], tmp_path: Path, digits: Path, strategy: list[str], model: list[str]
) -> None:
    """float32, 20 steps: losses to 1e-5, and the same evaluation. 359 images do not divide by two ranks."""
    one, two = alone(*model), tmp_path / "two"
    overrides = [*SAME, *model, f"data.root={digits}", f"parallel={strategy[0]}", *strategy[1:], f"run_dir={two}"]
    out = run_process(under_torchrun(command(*overrides), 2), cwd=tmp_path).stdout
    assert ("2 ranks, 1f1b: idle for 50% of the time of its work" in out) == ("parallel.pipeline_degree=2" in strategy)
    for record in records(two, "train") if model else ():
        assert 1 < record["expert_load"] <= 4
        assert record["dropped_tokens"] == 0
    for name in ("loss", "grad_norm"):
        ours = [record[name] for record in records(two, "train")]
        theirs = [record[name] for record in records(one, "train")]
        assert len(ours) == 20
        assert ours == pytest.approx(theirs, abs=1e-5)
    for ours, theirs in zip(records(two, "eval"), records(one, "eval"), strict=True):
        assert ours["count"] == theirs["count"] == 359
        assert ours["top1"] == theirs["top1"]
        assert ours["top5"] == theirs["top5"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert json.loads((two / "summary.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_batch_norm_statistics_are_averaged(tmp_path: Path, digits: Path) -> None:
    """Ranks see other images; what is saved is the mean of their statistics, of the average, too."""
    overrides = [
        f"data.root={digits}", "data.image_size=8", "schedule.max_steps=2", "trackers=[]",
        "data.global_batch_size=32", "augment=none", "optim.ema_decay=0.5",
    ]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(load_config("resnet_digits", [*overrides, f"run_dir={one}"])) == 0
    run_process(under_torchrun(command(*overrides, f"run_dir={two}", config_name="resnet_digits"), 2), cwd=tmp_path)
    ours, theirs = newest_checkpoint(two), newest_checkpoint(one)
    first = next(name for name in ours["model"] if name.endswith("running_mean"))
    # The mean over two half batches is the mean over the batch.
    for part in ("model", "ema"):
        assert ours[part][first].numpy() == pytest.approx(theirs[part][first].numpy(), rel=1e-4, abs=1e-6)
    assert not torch.equal(ours["model"][first], ours["ema"][first])


SLOW = """
import os
import runpy
import sys
import time
from pycls_fast.data.sources.files import FileImages

read = FileImages.read

def slow_read(self, index):
    time.sleep(0.03 if os.environ["RANK"] == "1" else 0)
    return read(self, index)

FileImages.read = slow_read
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_scoring_may_take_longer_than_the_timeout(tmp_path: Path, digits: Path) -> None:
    """Rank 0 waits for rank 1 for about 4 seconds, in which rank 1 makes progress."""
    (tmp_path / "slow.py").write_text(SLOW)
    run = tmp_path / "run"
    train(load_config("vit_digits", [*COMMON, f"data.root={digits}", f"run_dir={run}", "schedule.max_steps=1"]))
    settings = ["parallel.timeout_seconds=2", "data.eval_batch_size=16", "data.num_workers=0", "output=scores.json"]
    scoring = command(f"weights={run}", *settings, tool="test_net", config_name=None)
    run_process(under_torchrun([scoring[0], str(tmp_path / "slow.py"), *scoring[1:]], 2), cwd=tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["count"] == 359
