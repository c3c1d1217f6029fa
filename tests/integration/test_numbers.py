"""What a run writes down of itself against what it was told to do; and the checkpoints that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.files import checkpoints, step_of
from pycls_fast.train import start, train
from pycls_fast.train.run import Run
from pycls_fast.train.saving import Saver
from tests.integration.runs import TINY, records


def test_rates_times_and_checkpoints(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savers: list[dict[str, Any]] = []

    def saver(*arguments: Any, **named: Any) -> Saver:
        savers.append(named)
        return Saver(*arguments, **named)

    monkeypatch.setattr(start, "Saver", saver)
    overrides = [
        *TINY, f"data.root={digits}", f"run_dir={tmp_path}", "optim.accumulation_steps=2",
        "runtime.checkpoint_every_steps=1", "runtime.keep_checkpoints=4", "runtime.checkpoint_async=false",
    ]  # fmt: skip
    config = load_config("vit_digits", [*overrides, "schedule.max_steps=6"])
    with monkeypatch.context() as patched:
        # Longer than the process that goes on.
        patched.setattr(Run, "seconds", lambda run: 1000.0)
        assert train(config) == 0
    assert savers == [{"keep": 4, "asynchronous": False}]
    # The last one is the best as well, which is when those before it are looked through again.
    kept = [step_of(path) for path in checkpoints(tmp_path / "checkpoints")]
    assert sorted(kept) == [3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000000006"

    schedule = build.schedule(config, 1438 // 64)
    trained = records(tmp_path, "train")
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    for record in trained:
        assert record["lr"] == schedule(record["step"] - 1)
        assert record["images_per_second"] * record["step_seconds"] == pytest.approx(64)

    assert train(load_config("vit_digits", [*overrides, "schedule.max_steps=7"])) == 0
    assert 1000 < json.loads((tmp_path / "summary.json").read_text())["wall_seconds"] < 2000
