"""LAMB is not given a head of zeros, which its trust ratio would leave as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.train.tasks.lr_range import lr_range_test
from tests.factories import config_of

TINY = ["data.image_size=8", "model.width=32", "model.depth=1", "model.mlp_width=64"]


def sweep(config: RunConfig) -> int:
    return lr_range_test(config, steps=3, lr_min=1e-4, lr_max=1e-2, output=config.run_dir)


@pytest.mark.parametrize("use", [train, sweep])
def test_a_head_that_weights_do_not_fill_is_refused(tmp_path: Path, use: Callable[[RunConfig], int]) -> None:
    small = [*TINY, "data=synthetic", "data.image_size=8", "data.num_workers=0", "data.synthetic_classes=3"]
    small += ["data.synthetic_train_images=64", "data.global_batch_size=64", "model.init=jax", "runtime.progress=plain"]
    seven = build.model(config_of(*small), 7, Speed())
    torch.save(seven.state_dict(), tmp_path / "seven.pt")
    own = [f"weights={tmp_path / 'seven.pt'}", "optim=lamb", f"run_dir={tmp_path / 'run'}"]
    config = config_of(*small, *own)
    with pytest.raises(UserError, match=r"^optim\.name: lamb hardly changes head, which begins with zeros"):
        use(config)
