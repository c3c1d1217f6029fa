"""What only a CUDA device can show: the step never waits for it, and it computes what the CPU computes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.data import to_device
from pycls_fast.parallel import start_world
from pycls_fast.precision import LEVELS
from pycls_fast.speed import SwitchName
from pycls_fast.train import train
from pycls_fast.train.display import Display
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.run import start_run
from tests.integration.runs import TINY, records

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", list(LEVELS))
@pytest.mark.parametrize("config_name", ["vit_digits", "resnet_digits"])
def test_step_never_waits_for_the_device(tmp_path: Path, digits: Path, config_name: str, precision: str) -> None:
    """torch raises at every synchronising call between the first copy and the end of the step."""
    if precision == "fp8" and (config_name == "resnet_digits" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("no float8 here")
    overrides = [
        f"data.root={digits}",
        f"run_dir={tmp_path}",
        f"precision={precision}",
        "runtime.device=cuda",
        "optim.ema_decay=0.9",
        "optim.clip_norm=1.0",
        "optim.accumulation_steps=2",
        "augment.mixup_alpha=0.4",
        "augment.cutmix_alpha=1.0",
        "augment.erase_probability=0.5",
        "augment.erase_value=noise",
        "model.drop_path=0.1",
    ]
    config = load_config(config_name, overrides)
    with start_world(device="cuda", backend="auto", timeout_seconds=60, strategy="single") as world:
        run = start_run(config, world, Display(speaks=False, mode="plain"))
        loader = build.train_loader(config, run.sources["train"], world, start_step=0, steps=6)
        batches = to_device(loader, world.device, mode=run.switches[SwitchName.INPUT_COPY])  # type: ignore[arg-type]
        metrics = TrainMetrics(world.device)
        for step in range(6):
            # The first steps create optimizer state and choose kernels.
            torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
            try:
                run.step(step, list(islice(batches, 2)), metrics)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert metrics.read(world)["loss"] > 0


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_follows_the_cpu(tmp_path: Path, digits: Path, precision: str) -> None:
    common = [*TINY, f"data.root={digits}", "schedule.max_steps=10", "optim.clip_norm=1.0"]
    assert train(load_config("vit_digits", [*common, f"run_dir={tmp_path / 'cpu'}", "runtime.device=cpu"])) == 0
    on_cuda = [*common, f"run_dir={tmp_path / 'cuda'}", "runtime.device=cuda", f"precision={precision}"]
    assert train(load_config("vit_digits", on_cuda)) == 0
    tolerance = 1e-4 if precision == "fp32" else 0.02
    losses = [[record["loss"] for record in records(tmp_path / name, "train")] for name in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert records(tmp_path / "cuda", "train")[-1]["memory_peak_bytes"] > 0


def test_prefetch_changes_no_bit(tmp_path: Path, digits: Path) -> None:
    losses = []
    for mode in ("blocking", "prefetch"):
        run_dir = tmp_path / mode
        overrides = [*TINY, f"data.root={digits}", f"run_dir={run_dir}", f"speed.input_copy={mode}"]
        assert train(load_config("vit_digits", [*overrides, "runtime.device=cuda", "schedule.max_steps=20"])) == 0
        losses.append([record["loss"] for record in records(run_dir, "train")])
    assert losses[0] == losses[1]
