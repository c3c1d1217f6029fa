"""GELU by polynomials: near the exact one everywhere, rounding included, and where compiled code has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pycls_fast.models.gelu import PolynomialGelu, polynomial_gelu
from pycls_fast.models.layers import Compute, Mlp
from tests.unit.models.conftest import fill_random

Function = Callable[[Tensor], Tensor]


def value_and_slope(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    out.backward(torch.ones_like(out))
    assert leaf.grad is not None
    assert out.dtype == leaf.grad.dtype == x.dtype
    return out.detach().double(), leaf.grad.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_within_what_it_promises(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-9, 9, 100_001), torch.tensor([-1e4, -50.0, -4.5, 4.5, 50.0, 1e4])]).to(dtype)
    value, slope = value_and_slope(PolynomialGelu.apply, x)
    exact_value, exact_slope = value_and_slope(F.gelu, x.double())
    assert ((value - exact_value).abs() <= 3e-6 * x.abs().double()).all()
    assert (slope - exact_slope).abs().max() <= 9e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_it_rounds_no_more_than_torch_s(dtype: torch.dtype, size: float) -> None:
    """Rounding hides what the polynomials are off by: half as much again at most, not the fourfold of a switch."""
    generator = torch.Generator().manual_seed(0)
    x = (size * torch.randn(50_000, generator=generator)).to(dtype)
    exact = value_and_slope(F.gelu, x.double())
    plain = value_and_slope(F.gelu, x)
    found = value_and_slope(PolynomialGelu.apply, x)
    for reference, other, right in zip(plain, found, exact, strict=True):
        own = (reference - right).norm()
        assert own > 0
        assert (other - right).norm() <= 1.5 * own


def test_code_that_is_not_compiled_has_torch_s() -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    for mine, right in zip(value_and_slope(polynomial_gelu, x), value_and_slope(F.gelu, x), strict=True):
        assert torch.equal(mine, right)


def test_compiled_code_has_the_polynomials() -> None:
    """And no error function; the layer's results are the twin's within what the polynomials are off by."""
    graphs: list[str] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    twins: dict[str, Any] = {
        name: Mlp(6, 12, Compute(gelu=name))  # type: ignore[arg-type]  # a Literal
        for name in ("torch", "polynomial")
    }
    fill_random(twins["torch"])
    twins["polynomial"].load_state_dict(twins["torch"].state_dict())
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    for dtype, narrow in ((torch.bfloat16, True), (torch.float32, False)):
        graphs.clear()
        results = {name: torch.compile(mlp.to(dtype), backend=backend)(x.to(dtype)) for name, mlp in twins.items()}
        assert ["_nn.gelu(" in graph for graph in graphs] == [True, not narrow]
        assert ("clamp" in graphs[1]) == narrow
        torch.testing.assert_close(results["polynomial"], results["torch"], rtol=1e-2, atol=1e-2)
        assert narrow or torch.equal(results["polynomial"], results["torch"])
