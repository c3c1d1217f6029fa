"""The attention kernels against the formula; fixed positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pycls_fast.models.cpu_kernels import CONVOLUTION, GELU, LINEAR
from pycls_fast.models.layers import ATTENTION, SinCos2dPositions
from pycls_fast.speed import SWITCHES
from tests.unit.models.conftest import draw

# What runs on the CPU; the others are in tests/cuda.
ON_CPU: tuple[str, ...] = ("reference", "sdpa", "sdpa_math", "sdpa_flash", "products")


def test_every_value_of_a_switch_has_a_kernel() -> None:
    kernels = {"attention": ATTENTION, "linear": LINEAR, "gelu": GELU, "convolution": CONVOLUTION}
    assert {name: tuple(found) for name, found in kernels.items()} == {name: SWITCHES[name].values for name in kernels}


@pytest.mark.parametrize("name", ON_CPU)
def test_kernel_is_the_formula_one_query_at_a_time(name: str) -> None:
    batch, heads, tokens, head_width = 2, 3, 5, 4
    queries, keys, values = (2 * draw(batch, heads, tokens, head_width, seed=seed) for seed in range(3))
    found = ATTENTION[name](queries, keys, values)
    for b in range(batch):
        for h in range(heads):
            for n in range(tokens):
                logits = [float(queries[b, h, n] @ key) / math.sqrt(head_width) for key in keys[b, h]]
                weights = [math.exp(logit) for logit in logits]
                expected = sum(w * v for w, v in zip(weights, values[b, h], strict=True)) / sum(weights)
                torch.testing.assert_close(found[b, h, n], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU[1:])
@pytest.mark.parametrize("head_width", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_larger_than_four_times_the_reference_s(name: str, head_width: int, dtype: torch.dtype) -> None:
    """197 tokens, and the head widths of ViT-B (64) and ViT-H (80)."""
    weights = draw(2, 2, 197, head_width, seed=9)

    def results(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [draw(2, 2, 197, head_width, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
        out = ATTENTION[kernel](*inputs)
        (out * weights.to(dtype)).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    exact = results("reference", torch.float64)
    plain, found = results("reference", dtype), results(name, dtype)
    assert len(exact) == 4
    for right, reference, other in zip(exact, plain, found, strict=True):
        own = (reference.double() - right).norm()
        assert own > 0
        assert (other.double() - right).norm() <= 4 * own


def test_reference_stays_finite_in_float16_where_unscaled_scores_overflow() -> None:
    queries = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert torch.isinf(queries @ queries.transpose(-2, -1)).any()
    assert ATTENTION["reference"](queries, queries, torch.ones_like(queries)).isfinite().all()


def expected_position(row: int, column: int, width: int) -> list[float]:
    """`posemb_sincos_2d` of big_vision (github.com/google-research/big_vision, models/vit.py), one number at
    a time: angle = position / 10000^(i / (width / 4 - 1)); first sin x, then cos x, sin y, cos y."""
    quarter = width // 4
    angles = [[position / 10_000 ** (i / max(quarter - 1, 1)) for i in range(quarter)] for position in (column, row)]
    return [function(angle) for axis in angles for function in (math.sin, math.cos) for angle in axis]


@pytest.mark.parametrize(("rows", "columns", "width", "extra"), [(3, 5, 8, 0), (4, 4, 24, 2), (2, 3, 4, 1)])
def test_sincos2d_is_the_formula(rows: int, columns: int, width: int, extra: int) -> None:
    module = SinCos2dPositions(rows, columns, width, extra_tokens=extra).double()
    module.reset_parameters()
    expected = [expected_position(row, column, width) for row in range(rows) for column in range(columns)]
    expected = [[0.0] * width] * extra + expected
    torch.testing.assert_close(module.value, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    features = torch.randn(2, rows * columns + extra, width, dtype=torch.float64)
    assert torch.equal(module(features), features + module.value)
    assert not list(module.parameters())
