"""8-bit groups keep their error bound; one-bit ReLU has torch's gradient to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast.parallel.memory import (
    GROUP,
    BitReLUs,
    compress,
    decompress,
    is_dense,
    pack_bits,
    unpack_bits,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, 10 * GROUP + 3])
def test_the_error_is_at_most_half_a_step_of_the_group(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    flat = (torch.randn(count, dtype=torch.float64) * torch.logspace(-3, 3, count, dtype=torch.float64)).to(dtype)
    back = decompress(compress(flat), count, dtype)
    assert back.dtype == dtype
    for start in range(0, count, GROUP):
        group, found = flat[start : start + GROUP].double(), back[start : start + GROUP].double()
        span = (group.max() - group.min()).item()
        own = torch.finfo(dtype).eps * group.abs().max().item() + 4e-7 * (span if dtype != torch.float64 else 0)
        assert (found - group).abs().max().item() <= span / 510 * (1 + 1e-6) + own
    packed = compress(flat)
    kept = sum(part.numel() * part.element_size() for part in packed)
    groups = -(-count // GROUP)
    assert kept == groups * (GROUP + 2 * packed.low_G1.element_size())


def test_ends_of_a_range_and_equal_numbers_are_exact() -> None:
    flat = torch.cat([torch.linspace(-3, 5, GROUP), torch.full((GROUP,), 0.1), torch.zeros(GROUP)])
    back = decompress(compress(flat), len(flat), flat.dtype)
    assert back[0] == -3
    assert back[GROUP - 1] == pytest.approx(5, rel=1e-6)
    assert torch.equal(back[GROUP:], flat[GROUP:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    flat = torch.randn(3 * GROUP)
    flat[GROUP + 5] = bad
    back = decompress(compress(flat), len(flat), flat.dtype)
    assert not torch.isfinite(back[GROUP + 5])
    assert torch.isfinite(back[:GROUP]).all()
    assert torch.isfinite(back[2 * GROUP :]).all()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_bits_come_back(count: int) -> None:
    mask = torch.rand(count) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-count // 8)
    assert torch.equal(unpack_bits(packed, count), mask)


def test_dense_means_no_gap_and_no_overlap() -> None:
    maps = torch.randn(2, 3, 4, 5)
    assert all(
        map(is_dense, (maps, maps.to(memory_format=torch.channels_last), maps.permute(2, 0, 3, 1), maps[:1, :1]))
    )
    assert not any(map(is_dense, (maps[:, :, ::2], maps[:, 1:], maps[:, :, :, :1].expand(2, 3, 4, 5))))


def relu_inputs() -> list[Tensor]:
    """In several layouts, with zeros and what is not a number among them."""
    maps = torch.randn(2, 6, 5, 4)
    maps[0, 0, 0] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    return [maps, maps.to(memory_format=torch.channels_last), maps.transpose(1, 3), maps[:, ::2], maps.double()]


@pytest.mark.parametrize("inplace", [False, True])
def test_one_bit_relu_is_torchs_to_the_bit(inplace: bool) -> None:
    for features in relu_inputs():
        gradient, found = torch.randn_like(features), []
        for bits in (False, True):
            leaf = features.clone(memory_format=torch.preserve_format).requires_grad_()
            if bits:
                with BitReLUs():
                    out = F.relu(leaf * 1.0, inplace=inplace)
                assert type(out.grad_fn).__name__ == "BitReLUBackward"
            else:
                out = F.relu(leaf * 1.0, inplace=inplace)
            out.backward(gradient)
            assert leaf.grad is not None
            found.append((out.detach(), leaf.grad))
        for expected, ours in zip(*found, strict=True):
            assert torch.equal(expected.nan_to_num(7.0), ours.nan_to_num(7.0))
            assert expected.stride() == ours.stride()


def test_every_spelling_of_relu_is_caught() -> None:
    for relu in (
        F.relu,
        torch.relu,
        torch.relu_,
        Tensor.relu,
        Tensor.relu_,
        torch.nn.ReLU(),
        torch.nn.ReLU(inplace=True),
    ):
        features = torch.randn(4, requires_grad=True) * 1.0
        with BitReLUs():
            assert type(relu(features).grad_fn).__name__ == "BitReLUBackward"
