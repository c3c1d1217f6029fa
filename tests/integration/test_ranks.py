"""Two processes and one: the same training at the same global batch. Ranks that differ, or leave while others wait."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.train import train
from tests.factories import class_folders
from tests.integration.runs import ROOT, TINY, command, newest_checkpoint, records, run_process, under_torchrun

COMMON = (*TINY, "schedule.max_steps=20", "schedule.epochs=1", "schedule.warmup_epochs=0.5", "optim.clip_norm=1.0")
# The last of the 359 validation images is alone: one of two ranks has none.
SAME = (*COMMON, "optim.ema_decay=0.9", "optim.accumulation_steps=2", "data.eval_batch_size=179")


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
        pytest.param(["ddp", "parallel.pipeline_degree=2"], [], marks=pytest.mark.slow),
        pytest.param(["fsdp", "speed.recompute=full"], EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(
    alone: Callable[..., Path], tmp_path: Path, digits: Path, strategy: list[str], model: list[str]
) -> None:
    """float32, 20 steps: losses to 1e-5, and the same evaluation."""
    one, two = alone(*model), tmp_path / "two"
    overrides = [*SAME, *model, f"data.root={digits}", f"parallel={strategy[0]}", *strategy[1:], f"run_dir={two}"]
    run_process(under_torchrun(command(*overrides), 2), cwd=tmp_path)
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


@pytest.mark.slow
def test_a_sweep_over_layouts(tmp_path: Path, digits: Path) -> None:
    """The second run has other groups of the same ranks."""
    keys = [*COMMON, f"data.root={digits}", "schedule.max_steps=1", "parallel.tensor_degree=2", "speed.compile=blocks"]
    keys += ["parallel=hsdp,fsdp"]
    run_process(under_torchrun(command("--multirun", *keys), 2), cwd=tmp_path)


# gloo's groups are destroyed at once. NCCL's wait for ranks that are in a collective, as this stand-in does.
LEAVING = """
import time
import torch.distributed as dist
from pycls_fast.config import Verb, command_line
from pycls_fast.errors import UserError

destroy = dist.destroy_process_group
def destroy_like_nccl():
    print("destroyed", flush=True)
    time.sleep({wait})
    destroy()
dist.destroy_process_group = destroy_like_nccl

class Own(Verb):
    def __call__(self, config):
        from pycls_fast import build
        with build.world(config) as world:
            world.barrier()
            if world.rank >= {first}:
                raise {error}
            world.barrier()
        return 0

command_line(Own)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "lines"),
    [
        ('ValueError("broken")', ("ValueError: broken", "(rank 1 of 2)")),
        ('UserError("the disk: full")', ("error: rank 1: the disk: full",)),
    ],
)
def test_a_rank_that_leaves_with_an_error_prints_it_and_ends(
    tmp_path: Path, error: str, lines: tuple[str, ...]
) -> None:
    script = tmp_path / "tool.py"
    script.write_text(LEAVING.format(wait=300, first=1, error=error))
    done = run_process(under_torchrun([sys.executable, str(script)], 2), cwd=tmp_path, expect=1)
    printed = done.stderr.splitlines()
    for line in lines:
        assert printed.count(line) == 1, done.stderr
    assert "destroyed" not in done.stdout


@pytest.mark.slow
def test_ranks_that_leave_together_destroy_their_group(tmp_path: Path) -> None:
    """Although the nodes' agents count restarts differently."""
    script = tmp_path / "tool.py"
    count = 'import os\nos.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]\n'
    script.write_text(count + LEAVING.format(wait=0, first=0, error='UserError("the disk: full")'))
    done = run_process(under_torchrun([sys.executable, str(script)], 2), cwd=tmp_path, expect=1)
    assert done.stdout.count("destroyed") == 2
    assert done.stderr.count("the disk: full") == 1


# Each rank in a folder of its own.
APART = """
import os, runpy, sys
os.chdir(["first", "second"][int(os.environ["RANK"])])
sys.argv = [{tool!r}, *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "run_dir", "error"),
    [
        # As many images, but one of them in the other class.
        ({"a": 31, "b": 39}, "../run", "data.root: train: "),
        ({"a": 30, "b": 40}, "run", "run_dir: run on rank 1 "),
    ],
)
def test_ranks_that_differ_end_with_one_line(tmp_path: Path, second: dict[str, int], run_dir: str, error: str) -> None:
    class_folders(tmp_path / "first" / "images", a=30, b=40)
    class_folders(tmp_path / "second" / "images", **second)
    script = tmp_path / "tool.py"
    script.write_text(APART.format(tool=str(ROOT / "tools" / "train_net.py")))
    common = (
        "--config-name=vit_digits",
        "data=folder",
        *TINY,
        "data.global_batch_size=8",
        "data.num_workers=0",
        "schedule.max_steps=1",
    )
    chosen = ("data.root=images", f"run_dir={run_dir}")
    done = run_process(under_torchrun([sys.executable, str(script), *common, *chosen], 2), cwd=tmp_path, expect=1)
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {error}")
    assert not list(tmp_path.glob("**/metrics.jsonl"))
