"""Fixed positions."""

from __future__ import annotations

import math

import pytest
import torch

from pycls_fast.models.layers import SinCos2dPositions


def expected_position(row: int, column: int, width: int) -> list[float]:
    """`posemb_sincos_2d` of big_vision (github.com/google-research/big_vision, models/vit.py), one number at
    a time: angle = position / 10000^(i / (width / 4 - 1)); first sin x, then cos x, sin y, cos y."""
    quarter = width // 4
    angles = [[position / 10_000 ** (i / (quarter - 1)) for i in range(quarter)] for position in (column, row)]
    return [function(angle) for axis in angles for function in (math.sin, math.cos) for angle in axis]


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 5, 8), (4, 4, 24)])
def test_sincos2d_is_the_formula(rows: int, columns: int, width: int, class_token: bool) -> None:
    module = SinCos2dPositions(rows, columns, width, extra_tokens=int(class_token)).double()
    module.reset_parameters()
    expected = [expected_position(row, column, width) for row in range(rows) for column in range(columns)]
    if class_token:
        expected.insert(0, [0.0] * width)
    torch.testing.assert_close(module.value, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    features = torch.randn(2, rows * columns + class_token, width, dtype=torch.float64)
    assert torch.equal(module(features), features + module.value)
    assert not list(module.parameters())
