"""Two processes and one: the same training at the same global batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.train import train
from tests.integration.runs import TINY, command, newest_checkpoint, records, run_process, under_torchrun

COMMON = (
    *TINY,
    "schedule.max_steps=20",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0.5",
    "optim.clip_norm=1.0",
)


@pytest.mark.parametrize(
    ("strategy", "accumulation"), [("ddp", 2), ("fsdp", 2), pytest.param("ddp", 1, marks=pytest.mark.slow)]
)
def test_two_ranks_equal_one(tmp_path: Path, digits: Path, strategy: str, accumulation: int) -> None:
    """float32, 20 steps: losses to 1e-5, and the same evaluation. 359 images do not divide by two ranks."""
    overrides = [
        *COMMON,
        f"data.root={digits}",
        "optim.ema_decay=0.9",
        f"optim.accumulation_steps={accumulation}",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(load_config("vit_digits", [*overrides, f"run_dir={one}"])) == 0
    run_process(under_torchrun(command(*overrides, f"parallel={strategy}", f"run_dir={two}"), 2), cwd=tmp_path)
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
        f"data.root={digits}",
        "data.image_size=8",
        "schedule.max_steps=2",
        "runtime.tensorboard=false",
        "data.global_batch_size=32",
        "augment=none",
        "optim.ema_decay=0.5",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(load_config("resnet_digits", [*overrides, f"run_dir={one}"])) == 0
    run_process(under_torchrun(command(*overrides, f"run_dir={two}", config_name="resnet_digits"), 2), cwd=tmp_path)
    ours, theirs = newest_checkpoint(two), newest_checkpoint(one)
    first = next(name for name in ours["model"] if name.endswith("running_mean"))
    # The mean over two half batches is the mean over the batch.
    for part in ("model", "ema"):
        assert ours[part][first].numpy() == pytest.approx(theirs[part][first].numpy(), rel=1e-4, abs=1e-6)
    assert not torch.equal(ours["model"][first], ours["ema"][first])


@pytest.mark.slow
def test_mistake_under_torchrun_is_told_once(tmp_path: Path, digits: Path) -> None:
    arguments = under_torchrun(command(*COMMON, f"data.root={digits}", "data.global_batch_size=63"), 2)
    done = run_process(arguments, cwd=tmp_path, expect=None)
    assert done.returncode != 0
    line = "error: data.global_batch_size: 63 is not divisible by 2 ranks x optim.accumulation_steps=1; use 62 or 64"
    assert done.stderr.count(line) == 1
    assert not (tmp_path / "runs").exists()


ALONE = """
import time
from pycls_fast import build
from pycls_fast.config import NoOptions, command_line
from pycls_fast.errors import UserError

def main(config, options):
    with build.world(config) as world:
        if world.rank > 0:
            raise UserError("data.root: this disk is broken", "data.root: and so is that")
        time.sleep(100)

command_line(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "config_name"), [("train_net", "vit_digits"), ("test_net", None)])
def test_weights_that_the_hub_does_not_have_are_one_line(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, tool: str, config_name: str | None
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = command("weights=hf:nobody/nothing", f"data.root={digits}", tool=tool, config_name=config_name)
    done = run_process(under_torchrun([*arguments, "run_dir=run"], 3), cwd=tmp_path, expect=None)
    assert done.returncode != 0
    assert "rank 1 lost" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: weights: hf:nobody/nothing could not be downloaded")
    # Only that of torchrun.
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_mistake_of_one_rank_alone_is_told_by_it(tmp_path: Path) -> None:
    """The first rank of the node hears nothing of it, nor would the user."""
    (tmp_path / "alone.py").write_text(ALONE)
    done = run_process(under_torchrun([sys.executable, str(tmp_path / "alone.py")], 3), cwd=tmp_path, expect=None)
    assert done.returncode != 0
    told = [line.split(": ", 2) for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line[2] for line in told] == ["data.root: this disk is broken", "data.root: and so is that"]
    assert [line[1] for line in told] in (["rank 1"] * 2, ["rank 2"] * 2)


SLOW = """
import os
import runpy
import sys
import time
from pycls_fast.data import FileImages

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


GRID = """
from pathlib import Path
from pycls_fast import build
from pycls_fast.config import NoOptions, command_line

def main(config, options):
    with build.world(config) as world:
        Path(f"{world.rank}.txt").write_text(f"{world.mesh.mesh_dim_names} {world.mesh.mesh.tolist()}")
        world.barrier()
    return 0

command_line(main)
"""


@pytest.mark.slow
def test_shards_and_their_copies_are_as_configured(tmp_path: Path) -> None:
    """Both ranks are on one node, which would be one group of shards by itself."""
    (tmp_path / "grid.py").write_text(GRID)
    own = ["--config-name", "vit_digits", "runtime.device=cpu", "parallel=hsdp", "parallel.shard_degree=1"]
    run_process(under_torchrun([sys.executable, str(tmp_path / "grid.py"), *own], 2), cwd=tmp_path)
    found = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert found == {"('replicate', 'shard') [[0], [1]]"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16_master", "fp16"])
def test_ranks_in_half_precision_follow_one(tmp_path: Path, digits: Path, name: str) -> None:
    """Ranks exchange rounded gradients, and skip an overflow together; 6 steps, to what float16 rounds."""
    overrides = [
        *COMMON,
        f"data.root={digits}",
        f"precision={name}",
        # Too large for the first step.
        "precision.loss_scale_start=134217728",
        "precision.loss_scale_backoff=0.0078125",
        "schedule.max_steps=6",
        "optim.accumulation_steps=2",
        "optim.ema_decay=0.9",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(load_config("vit_digits", [*overrides, f"run_dir={one}"])) == 0
    run_process(under_torchrun(command(*overrides, f"run_dir={two}"), 2), cwd=tmp_path)
    ours, theirs = records(two, "train"), records(one, "train")
    assert [r["skipped_steps"] for r in ours] == [r["skipped_steps"] for r in theirs]
    assert ours[0]["skipped_steps"] == 1
    assert ours[-1]["skipped_steps"] == 0
    assert [r["loss_scale"] for r in ours] == [r["loss_scale"] for r in theirs]
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], abs=1e-3)
    mine, other = newest_checkpoint(two)["model"], newest_checkpoint(one)["model"]
    assert all(torch.allclose(value, other[key], atol=5e-3) for key, value in mine.items())
