"""The max-pool: torch's to the bit, and torch's own operator in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code

from pycls_fast.models.max_pool import MaxPool2d

FORMATS = pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])


def pooled(pool: Any, maps: Tensor) -> tuple[Tensor, Tensor]:
    """The maxima and the gradient of the maps, behind and before something that the compiler may fuse."""
    leaf = maps.clone().requires_grad_()
    out = pool(leaf)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "compiled", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)
def test_is_torch_s_to_the_bit(compiled: bool, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 8, 13, 10, generator=generator).to(dtype).contiguous(memory_format=memory_format)
    # ReLU: ties.
    pool, plain = (nn.Sequential(nn.ReLU(), kind(3, stride=2, padding=1)) for kind in (MaxPool2d, nn.MaxPool2d))
    expected = pooled(plain, maps)
    found = pooled(torch.compile(pool, fullgraph=True) if compiled else pool, maps)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
        assert mine.is_contiguous(memory_format=memory_format)


@pytest.mark.slow
def test_compiled_code_calls_the_operator() -> None:
    pool = torch.compile(nn.Sequential(nn.ReLU(), MaxPool2d(3, stride=2, padding=1)))
    maps = torch.randn(2, 8, 12, 12, requires_grad=True)
    _, codes = run_fw_bw_and_get_code(lambda: pool(maps))
    for name in ("max_pool2d", "max_pool2d_backward"):
        assert any(f"torch.ops.pycls_fast.{name}.default(" in code for code in codes)
