"""Leaving dropped samples out is multiplying them by zero, for the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.drop_path import DropPath
from pycls_fast.models.layers import Mlp
from pycls_fast.models.vit import VisionTransformer
from tests.unit.models.conftest import fill_random


def vit(compute: str, **arguments: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=8, patch_size=2, width=16, depth=3, heads=2, mlp_width=32, num_classes=5, drop_path=0.6,
        drop_path_compute=compute, **arguments,  # type: ignore[arg-type]
    )  # fmt: skip
    fill_random(model)
    return model


def run(
    model: nn.Module, dtype: torch.dtype, *, count: int = 12, amp: bool = False, seed: int = 3
) -> dict[str, Tensor]:
    """Logits and all gradients of a batch, and the generator's state behind it."""
    generator = torch.Generator().manual_seed(1)
    images_BCHW = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels_B = torch.randint(5, (count,), generator=generator)
    model.to(dtype).zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logits_BK = model(images_BCHW)
    F.cross_entropy(logits_BK.to(dtype), labels_B).backward()
    found = {"logits": logits_BK.detach(), "state": torch.get_rng_state(), "images": images_BCHW.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    assert all(value is not None for value in found.values())
    return found  # type: ignore[return-value]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    assert torch.equal(left["state"], right["state"])
    pairs = [(left[name].double(), right[name].double()) for name in right if name != "state"]
    return max((((a - b).norm() / b.norm().clamp_min(1e-3)).item()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_equal_in_float64(count: int, layout: str) -> None:
    """Over several draws; with one or two samples also all kept and none kept."""
    for seed in range(6):
        multiplied = run(vit("multiply", layout=layout), torch.float64, count=count, seed=seed)
        skipped = run(vit("skip", layout=layout), torch.float64, count=count, seed=seed)
        assert distance(skipped, multiplied) < 1e-12


@pytest.mark.slow
def test_rounding_is_no_worse_in_float32_and_autocast() -> None:
    exact = run(vit("multiply"), torch.float64)
    for amp, floor in ((False, 1e-6), (True, 1e-2)):
        own = distance(run(vit("multiply"), torch.float32, amp=amp), exact)
        assert distance(run(vit("skip"), torch.float32, amp=amp), exact) <= 4 * max(own, floor)


def test_only_kept_samples_reach_the_branch() -> None:
    rows = []
    drop_path = DropPath(0.5, compute="skip")
    features = torch.randn(200, 3, 4)

    def branch(part: Tensor) -> Tensor:
        rows.append(part)
        return part * 2

    torch.manual_seed(0)
    out = drop_path.residual(features, branch)
    torch.manual_seed(0)
    kept = DropPath(0.5)(features).flatten(1).ne(0).any(dim=1)
    assert torch.equal(rows[0], features[kept])
    assert torch.equal(out[~kept], features[~kept])
    torch.testing.assert_close(out[kept], features[kept] * 5)
    assert 60 < len(rows[0]) < 140


def test_parameters_get_gradients_when_no_sample_is_kept() -> None:
    mlp = Mlp(4, 8)
    mlp.reset_parameters()
    drop_path = DropPath(0.999999, compute="skip")
    features = torch.randn(3, 2, 4)
    out = drop_path.residual(features, mlp)
    out.sum().backward()
    assert torch.equal(out, features)
    assert all(p.grad is not None and not p.grad.any() for p in mlp.parameters())


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_nothing_is_drawn_when_nothing_is_dropped(rate: float, training: bool) -> None:
    features, state = torch.randn(4, 3), torch.get_rng_state()
    for compute in ("multiply", "skip"):
        out = DropPath(rate, compute=compute).train(training).residual(features, torch.sin)  # type: ignore[arg-type,operator]
        assert torch.equal(out, features + features.sin())
    assert torch.equal(torch.get_rng_state(), state)


def test_half_precision_branches_keep_a_wide_residual_stream() -> None:
    features = torch.randn(64, 5)
    outs = []
    for compute in ("multiply", "skip"):
        torch.manual_seed(1)
        outs.append(DropPath(0.3, compute=compute).residual(features, lambda part: part.bfloat16().sin()))  # type: ignore[arg-type]
    assert outs[0].dtype == outs[1].dtype == torch.float32
    assert torch.equal(*outs)
