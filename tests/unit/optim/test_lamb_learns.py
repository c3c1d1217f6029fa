"""What LAMB's trust ratio does to a head of zeros, and that it learns from `model.init=trunc_normal`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import sklearn.datasets
import torch
import torch.nn.functional as F

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.train.tasks.lr_range import lr_range_test
from tests.factories import config_of

TINY = ["data.image_size=8", "model.width=32", "model.depth=1", "model.mlp_width=64"]


@pytest.mark.parametrize(("init", "learns"), [("trunc_normal", True), ("jax", False)])
def test_lamb_trains_a_head_that_does_not_begin_with_zeros(init: str, learns: bool) -> None:
    """At |w| = 0 there is no ratio, and a step of the rate's size; after it |w| grows by exp(sum of rates) at most."""
    config = config_of(*TINY, "optim=lamb", f"model.init={init}")
    switches = Speed()
    model = build.model(config, 10, switches)
    optimizer = build.optimizer(config, model, switches)
    digits = sklearn.datasets.load_digits()
    images_BCHW = torch.tensor(digits.images[:64], dtype=torch.float32).div(8).sub(1)[:, None].expand(-1, 3, -1, -1)
    labels_B = torch.tensor(digits.target[:64])
    began = model.get_parameter("head.weight").std().item()
    losses, steps, rate = [], 60, 0.05
    for step in range(steps):
        # A warm-up of 10 steps, as in every recipe with LAMB: from 1e-6.
        for group in optimizer.param_groups:
            group["lr"] = 1e-6 + rate * min(1.0, step / 10)
        loss = F.cross_entropy(model(images_BCHW), labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ended = model.get_parameter("head.weight").std().item()
    if learns:
        assert losses[-1] < 0.5 < losses[0]
        assert ended > 2 * began > 0.03
    else:
        assert ended <= 1e-6 * math.exp(rate * steps)
        assert losses[-1] > 2.2


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
