"""The layers: attention's kernels against the formula, fixed positions, and drop-path: what it drops, how often, that
leaving samples out is the same, and where models have it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.cpu_kernels import CONVOLUTION, GELU, LINEAR
from pycls_fast.models.drop_path import DropPath, drop_path_rates
from pycls_fast.models.layers import ATTENTION, Mlp, SinCos2dPositions
from pycls_fast.models.resnet import BasicBlock, Bottleneck, ResNet
from pycls_fast.models.vit import Block
from pycls_fast.speed import SWITCHES
from tests.factories import check_rounding, draw, randomise, small_vit

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
    assert len(exact) == 4
    check_rounding(results("reference", dtype), results(name, dtype), exact)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_is_the_same_for_every_rate_and_drops_what_eager_code_does(dtype: torch.dtype) -> None:
    """In a network that comes from the meta device and is cast to a half format."""
    import torch._dynamo

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([value.dtype for value in inputs])
        return graph.forward

    branch = torch.randn(64, 3).to(dtype)
    torch._dynamo.reset()
    for rate in (0.1, 0.4):
        with torch.device("meta"):
            compiled = DropPath(rate)
        compiled.to_empty(device="cpu").to(dtype).compile(backend=backend, dynamic=False)
        torch.manual_seed(5)
        expected = DropPath(rate)(branch)
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
