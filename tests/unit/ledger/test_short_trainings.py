"""Short trainings (`ledger gradients`, `ledger numerics`, `lr-find`) begin and end as any training; so do timings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.numerics import count_gradients, measure_numerics
from pycls_fast.ledger.measure.timing import time_variants
from pycls_fast.train.tasks.lr_range import lr_range_test
from tests.factories import config_of
from tests.integration.runs import TINY

Measure = Callable[[RunConfig, Path], int]


def gradients(config: RunConfig, folder: Path) -> int:
    return count_gradients(config, steps=1, warmup_steps=0, loss_scale=1.0, output=str(folder / "g.json"))


def numerics(config: RunConfig, folder: Path) -> int:
    return measure_numerics(config, steps=1, output=str(folder / "n.json"))


def learning_rate(config: RunConfig, folder: Path) -> int:
    return lr_range_test(config, steps=2, lr_min=1e-4, lr_max=1e-3, output=str(folder))


def configured(digits: Path, *overrides: str) -> RunConfig:
    return config_of(*TINY, f"data.root={digits}", "data.num_workers=0", *overrides)


@pytest.mark.parametrize("measure", [gradients, numerics])
def test_weights_that_are_not_there(measure: Measure, tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match=r"weights: .*nowhere is neither a weights file"):
        measure(configured(digits, f"weights={tmp_path / 'nowhere'}"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [gradients, numerics, learning_rate])
def test_damaged_images_are_named(
    measure: Measure, tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(digits, tmp_path / "images")
    bad = [str(file) for file in sorted(root.rglob("*.png"))[::3]]
    for name in bad:
        Path(name).write_bytes(b"no picture")
    assert measure(configured(root), tmp_path) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    named = [line.removeprefix("warning: ").partition(": ")[0] for line in found]
    assert named
    assert len(set(named)) == len(named)
    assert set(named) <= set(bad)
    assert all(line.endswith("; left out") for line in found)
    with pytest.raises(UserError, match=r"^data\.max_damaged: \d+ images cannot be read, more than 0:"):
        measure(configured(root, "data.max_damaged=0"), tmp_path)


@pytest.mark.parametrize("measure", [gradients, numerics])
def test_classes_weigh_as_in_a_training(
    measure: Measure, tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Built(Exception):
        pass

    def loss(config: RunConfig, switches: Any, device: Any, classes: int, class_counts: np.ndarray | None) -> None:
        del config, switches, device, classes
        raise Built(class_counts)

    monkeypatch.setattr(build, "loss", loss)
    with pytest.raises(Built) as caught:
        measure(configured(digits, "loss.class_weights=auto"), tmp_path)
    (counts,) = caught.value.args
    assert len(counts) == 10
    assert min(counts) > 50


def test_operations_of_a_frozen_network_are_left_out(tmp_path: Path, digits: Path) -> None:
    """Three forward passes would be more than it computes."""
    variants = [("all", configured(digits)), ("head", configured(digits, "optim.trainable=[head]"))]
    file = tmp_path / "t.json"
    status = time_variants(variants, mode="model", steps=1, warmup_steps=0, repeats=1, matmul_size=16, output=str(file))
    assert status == 0
    whole, frozen = json.loads(file.read_text())["variants"]
    assert {"flops_per_second", "share_of_matmul"} <= set(whole["train"])
    assert not {"flops_per_second", "share_of_matmul"} & set(frozen["train"])
    assert "flops_per_second" in frozen["inference"]
