"""The largest experiment, cut down to what two CPU ranks carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import command, records, run_process, under_torchrun


@pytest.mark.slow
def test_vit_h_in_shards_trains_saves_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (
        *("parallel=fsdp", "model.depth=4", "data.image_size=64", "data=synthetic", f"run_dir={run}"),
        # Five images on two ranks: one of them has none in the last batch.
        *("data.synthetic_train_images=16", "data.synthetic_val_images=5", "data.global_batch_size=8"),
        *("optim.accumulation_steps=2", "schedule.epochs=2", "schedule.warmup_epochs=0", "data.num_workers=0"),
        *("runtime.log_every_steps=1", "runtime.tensorboard=false"),
    )
    for steps in (2, 3):
        arguments = command(*overrides, f"schedule.max_steps={steps}", config_name="vit_h16")
        run_process(under_torchrun(arguments, 2), cwd=tmp_path)
    assert [record["step"] for record in records(run, "train")] == [1, 2, 3]
    assert [(r["step"], r["weights"], r["count"]) for r in records(run, "eval")] == [
        (step, weights, 5) for step in (2, 3) for weights in ("model", "ema")
    ]
    (resumed,) = [record for record in records(run, "event") if record["event"] == "resumed"]
    assert resumed["step"] == 2
