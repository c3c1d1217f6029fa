"""FairScale's strategies where they belong: on CUDA without stand-ins, on 1, 2 or 4 ranks as there are GPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pycls_fast.config import load_config
from pycls_fast.parallel import fairscale, start_world
from pycls_fast.parallel.parallel_model import StrategySettings
from pycls_fast.train import train
from tests.factories import make_optimizer
from tests.integration.runs import TINY, command, records, run_process, under_torchrun

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COMMON = (
    *TINY,
    "runtime.device=cuda",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0.5",
    "optim.clip_norm=1.0",
    "optim.ema_decay=0.9",
    "optim.accumulation_steps=2",
)


def _ranks() -> int:
    count = torch.cuda.device_count()
    return 4 if count >= 4 else min(count, 2)


# Compilation asks tensors of the graph for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("strategy", "overrides", "tolerance"),
    [
        ("fairscale_fsdp", ["precision=fp32"], 1e-4),
        ("fairscale_fsdp", ["precision=fp32", "parallel.reshard_after_forward=false"], 1e-4),
        ("fairscale_fsdp", ["precision=fp32", "speed.recompute=full"], 1e-4),
        ("fairscale_fsdp", ["precision=fp32", "speed.compile=blocks"], 1e-3),
        ("fairscale_fsdp", ["precision=amp_bf16"], 3e-2),
        ("fairscale_fsdp", ["precision=bf16_params"], 3e-2),
        ("fairscale_fsdp", ["precision=fp16_master"], 3e-2),
        ("fairscale_sharded_ddp", ["precision=fp32"], 1e-4),
        # Fused SGD has its state before FairScale lays out the weights.
        ("fairscale_sharded_ddp", ["precision=fp32", "optim=sgd", "optim.lr=0.001"], 1e-4),
        ("fairscale_sharded_ddp", ["precision=amp_fp16"], 3e-2),
    ],
)
def test_trains_as_one_process(
    tmp_path: Path, digits: Path, strategy: str, overrides: list[str], tolerance: float
) -> None:
    """20 steps, then a second process goes on from the checkpoint under `fsdp`; losses of one process."""
    both = [*COMMON, f"data.root={digits}", *overrides]
    one, many = tmp_path / "one", tmp_path / "many"
    # One process has no shards, and refuses settings of them.
    alone = [override for override in both if not override.startswith("parallel.")]
    assert train(load_config("vit_digits", [*alone, "schedule.max_steps=22", f"run_dir={one}"])) == 0
    first = command(*both, f"parallel={strategy}", "schedule.max_steps=20", f"run_dir={many}")
    run_process(under_torchrun(first, _ranks()), cwd=tmp_path)
    second = command(*both, "parallel=fsdp", "schedule.max_steps=22", f"run_dir={many}")
    run_process(under_torchrun(second, _ranks()), cwd=tmp_path)
    ours, theirs = (records(folder, "train") for folder in (many, one))
    assert len(ours) == len(theirs) == 22
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], abs=tolerance)
    mine, other = records(many, "eval")[-1], records(one, "eval")[-1]
    assert mine["count"] == other["count"]
    assert mine["loss"] == pytest.approx(other["loss"], abs=tolerance)


def test_numbers_of_the_optimizer_are_told_from_the_host() -> None:
    """Or each rank would open a context on every other rank's GPU, where they are unpickled."""
    network = nn.Linear(4, 4).cuda()
    make = partial(make_optimizer, "adamw", lr=0.1, betas=(0.9, 0.999), eps=1e-8, implementation="fused")
    settings = StrategySettings(groups=[{"params": ["weight", "bias"], "weight_decay": 0.0}], make_optimizer=make)
    with start_world(device="cuda", backend="auto", timeout_seconds=60, strategy="fairscale_sharded_ddp") as world:
        wrapped = fairscale.shard_state(network, world, settings)
        assert wrapped.optimizer is not None
        wrapped.forward(torch.randn(2, 4, device="cuda")).sum().backward()
        wrapped.optimizer.step()
        state = wrapped.optimizer.state_dict()["state"]
    steps = [values["step"] for values in state.values()]
    assert [(step.device.type, step.item()) for step in steps] == [("cpu", 1.0)] * 2


def test_the_step_of_fsdp_never_waits_for_the_device(tmp_path: Path, digits: Path) -> None:
    """torch raises at every synchronising call of steps after the first ones."""
    from itertools import islice

    from pycls_fast import build
    from pycls_fast.data.prepare import to_device
    from pycls_fast.train.display import Display
    from pycls_fast.train.metrics import TrainMetrics
    from pycls_fast.train.start import started

    config = load_config(
        "vit_digits", [*COMMON, "parallel=fairscale_fsdp", f"data.root={digits}", f"run_dir={tmp_path}"]
    )
    with (
        start_world(device="cuda", backend="auto", timeout_seconds=60, strategy="fairscale_fsdp") as world,
        started(config, world, Display(speaks=False, mode="plain")) as run,
    ):
        loader = build.train_loader(config, run.sources["train"], world, run.switches, start_step=0, steps=6)
        batches = to_device(loader, world.device, mode="prefetch")
        metrics = TrainMetrics(world.device)
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            try:
                run.step(step, list(islice(batches, 2)), metrics)
            finally:
                torch.cuda.set_sync_debug_mode("default")
