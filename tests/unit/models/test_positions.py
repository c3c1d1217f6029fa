"""Class token and positions."""

from __future__ import annotations

import math

import pytest
import torch

from pycls_fast.models.layers import ClassToken, LearnedPositions, PatchStem, SinCos2dPositions


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


def test_class_token_comes_first_and_positions_follow_the_tokens() -> None:
    token, positions = ClassToken(4), LearnedPositions(4, 4)
    with torch.no_grad():
        token.value.copy_(torch.arange(4.0))
        positions.value.copy_(torch.arange(16.0).view(4, 4) * 10)
    features = torch.randn(2, 3, 4)
    out = token(features)
    for sample in range(2):
        assert torch.equal(out[sample, 0], token.value)
        assert torch.equal(out[sample, 1:], features[sample])
        assert torch.equal(positions(out)[sample], out[sample] + positions.value)


def test_patch_stem_projects_squares_in_row_major_order() -> None:
    """Against squares cut out by hand: forward, and the gradient of a weight and of a pixel."""
    stem = PatchStem(2, 3, 5).double()
    assert stem.projection.bias is not None
    stem.projection.bias.data.normal_()
    images = torch.randn(2, 2, 6, 9, dtype=torch.float64, requires_grad=True)
    weight = stem.projection.weight
    tokens = []
    for row in range(2):
        for column in range(3):
            square = images[:, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            tokens.append(square.flatten(1) @ weight.flatten(1).T + stem.projection.bias)
    expected, found = torch.stack(tokens, dim=1), stem(images)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(found)
    expected_grads = torch.autograd.grad(expected, (images, weight), cotangent)
    for grad, expected_grad in zip(
        torch.autograd.grad(found, (images, weight), cotangent), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
