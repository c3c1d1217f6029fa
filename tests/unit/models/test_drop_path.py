"""Drop-path: what it drops, how often, that leaving samples out is the same, and where models have it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.drop_path import DropPath, drop_path_rates
from pycls_fast.models.layers import Mlp
from pycls_fast.models.resnet import BasicBlock, Bottleneck, ResNet
from pycls_fast.models.vit import Block
from tests.factories import randomise, small_vit


def test_drops_whole_samples_at_the_rate_and_keeps_the_expectation() -> None:
    torch.manual_seed(0)
    rate, count = 0.3, 20_000
    branch = torch.randn(count, 2, 3, dtype=torch.float64)
    out = DropPath(rate)(branch)
    kept = out.flatten(1).ne(0).any(dim=1)
    assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
    torch.testing.assert_close(out[kept], branch[kept] / 0.7, rtol=1e-14, atol=0)
    sigma = (rate * (1 - rate) / count) ** 0.5
    assert abs(1 - kept.double().mean().item() - rate) < 4 * sigma
    ones = DropPath(rate)(torch.ones(count, 1, dtype=torch.float64))
    assert abs(ones.mean().item() - 1) < 4 * sigma / 0.7


def test_same_seed_same_drops_in_every_precision() -> None:
    """And in bfloat16 what is kept is scaled to the last place."""
    branch = torch.randn(64, 5, dtype=torch.float64).bfloat16()
    drops = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(7)
        out = DropPath(0.1)(branch.to(dtype))
        assert out.dtype == dtype
        drops.append(out.ne(0).any(dim=1))
        if dtype == torch.bfloat16:
            assert torch.equal(out[drops[-1]], (branch[drops[-1]].double() / 0.9).to(dtype))
    assert 0 < drops[0].sum() < 64
    assert all(torch.equal(drop, drops[0]) for drop in drops)
    assert not torch.equal(DropPath(0.1)(branch).ne(0).any(dim=1), drops[0])


def test_rates_rise_linearly_over_the_depth_of_both_models() -> None:
    assert drop_path_rates(0.3, 4) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 1) == [0.0]
    assert drop_path_rates(0.3, 3, "constant") == [0.3] * 3
    models: list[Any] = [small_vit(depth=5, drop_path=0.4), ResNet(depth=18, num_classes=2, drop_path=0.7)]
    for model, blocks in zip(models, (5, 8), strict=True):
        rates = [block.drop_path.rate for _, block in model.units()]
        assert rates == pytest.approx([0.1 * index for index in range(blocks)])


def test_vit_block_drops_attention_and_mlp_apart() -> None:
    """With rate 1/2 a sample's output is one of four: each branch dropped, or doubled; all four occur."""
    block: Any = randomise(Block(8, 2, 16, drop_path=0.5))
    features = torch.randn(1, 3, 8, dtype=torch.float64)
    torch.manual_seed(0)
    outs = block(features.expand(64, -1, -1))
    possible = []
    for attention_scale, mlp_scale in itertools.product((0.0, 2.0), repeat=2):
        middle = features + attention_scale * block.attention(block.norm1(features))
        possible.append(middle + mlp_scale * block.mlp(block.norm2(middle)))
    distances = torch.stack([(outs - p).abs().amax(dim=(1, 2)) for p in possible])
    assert distances.amin(dim=0).max() < 1e-12
    assert set(distances.argmin(dim=0).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("stride", [1, 2])
def test_resnet_block_drops_its_branch(kind: type[BasicBlock] | type[Bottleneck], stride: int) -> None:
    block: Any = randomise(kind(4 * kind.expansion, 4, stride, 0.5))
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    maps = torch.randn(1, 4 * kind.expansion, 6, 6, dtype=torch.float64)
    torch.manual_seed(0)
    outs = block(maps.expand(32, -1, -1, -1))
    straight = maps if block.shortcut is None else block.shortcut(maps)
    possible = [torch.relu(straight), torch.relu(straight + 2 * block.branch(maps))]
    distances = torch.stack([(outs - p).abs().amax(dim=(1, 2, 3)) for p in possible])
    assert distances.amin(dim=0).max() < 1e-12
    assert set(distances.argmin(dim=0).tolist()) == {0, 1}


def test_the_rate_of_compiled_code_follows_the_module_and_stays_exact() -> None:
    """From the meta device, and in a network in a half format; no checkpoint knows it."""
    with torch.device("meta"):
        empty = DropPath(0.3)
    for module in (empty.to_empty(device="cpu"), DropPath(0.3).bfloat16(), DropPath(0.3).double()):
        assert module._keep.dtype == torch.float32
        assert module._keep.item() == pytest.approx(0.7, rel=1e-7)
        assert not module.state_dict()
        assert not list(module.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_is_the_same_for_every_rate_and_drops_what_eager_code_does(dtype: torch.dtype) -> None:
    import torch._dynamo

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([value.dtype for value in inputs])
        return graph.forward

    branch = torch.randn(64, 3).to(dtype)
    torch._dynamo.reset()
    for rate in (0.1, 0.4):
        eager, compiled = DropPath(rate), DropPath(rate)
        compiled.compile(backend=backend, dynamic=False)
        torch.manual_seed(5)
        expected = eager(branch)
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(branch), expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
        assert 0 < int(expected.eq(0).any(dim=1).sum()) < 64
    torch._dynamo.reset()
    # The rate is an input, a tensor of float32.
    assert len(graphs) == 1
    assert torch.float32 in graphs[0]


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
