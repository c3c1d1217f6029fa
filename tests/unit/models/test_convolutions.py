"""Convolutions as products: torch's, no further from float64 than torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from pycls_fast.models import ResNet
from pycls_fast.models.convolutions import ProductsConv2d, products_convolution
from pycls_fast.parallel import save_activation_memory
from tests.unit.models.conftest import draw, fill_random

# Maps (B, C, H, W), channels out, side of the kernel, stride: every branch, odd and even sides.
SHAPES = pytest.mark.parametrize(
    ("shape", "outputs", "side", "stride"),
    [
        ((2, 6, 7, 5), 4, 1, 1),
        ((2, 6, 7, 5), 8, 1, 2),
        ((2, 6, 8, 6), 3, 1, 2),
        ((2, 4, 5, 3), 8, 3, 1),
        ((2, 4, 4, 3), 8, 3, 1),
        ((2, 4, 7, 8), 6, 3, 2),
        ((3, 2, 12, 12), 2, 3, 1),
        ((3, 2, 24, 24), 2, 3, 2),
        ((2, 3, 9, 10), 4, 7, 2),
        ((1, 3, 1, 1), 4, 3, 1),
    ],
)


def layer(shape: tuple[int, ...], outputs: int, side: int) -> list[Tensor]:
    """Maps and weight, channels last."""
    tensors = [draw(*shape, seed=0), draw(outputs, shape[1], side, side, seed=1)]
    return [tensor.to(memory_format=torch.channels_last) for tensor in tensors]


def plain(maps: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return F.conv2d(maps, weight, None, stride, padding)


def with_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], stride: int, *, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The result and both gradients, in float64."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = function(*leaves, stride, tensors[1].shape[-1] // 2)
    out.backward(draw(*out.shape, seed=9).to(out).contiguous(memory_format=torch.channels_last))
    found = [out, *(leaf.grad for leaf in leaves)]
    assert all(tensor is not None and tensor.dtype == dtype for tensor in found[1:])
    return [tensor.detach().double() for tensor in found if tensor is not None]


def check_rounding(reference: list[Tensor], found: list[Tensor], exact: list[Tensor]) -> None:
    """Every error at most four times that of torch's own way."""
    for other, mine, right in zip(reference, found, exact, strict=True):
        own = (other - right).norm()
        assert (mine - right).norm() <= 4 * own + 1e-7 * right.norm()


@SHAPES
def test_float64_is_torch_s(shape: tuple[int, ...], outputs: int, side: int, stride: int) -> None:
    tensors = layer(shape, outputs, side)
    exact = with_gradients(plain, tensors, stride)
    for found, right in zip(with_gradients(products_convolution, tensors, stride), exact, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)
        assert found.is_contiguous(memory_format=torch.channels_last)


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_no_more_than_four_times_as_torch_s(
    shape: tuple[int, ...], outputs: int, side: int, stride: int, dtype: torch.dtype
) -> None:
    tensors = layer(shape, outputs, side)
    exact = with_gradients(plain, [tensor.to(dtype).double() for tensor in tensors], stride)
    reference, found = (
        with_gradients(function, tensors, stride, dtype=dtype) for function in (plain, products_convolution)
    )
    check_rounding(reference, found, exact)


@SHAPES
def test_autocast_is_obeyed(shape: tuple[int, ...], outputs: int, side: int, stride: int) -> None:
    """bfloat16 comes out, float32 tensors get float32 gradients."""
    tensors = layer(shape, outputs, side)
    exact = with_gradients(plain, tensors, stride)

    def under_autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out = function(*arguments)
            assert out.dtype == torch.bfloat16
            return out

        return call

    reference, found = (
        with_gradients(under_autocast(function), tensors, stride, dtype=torch.float32)
        for function in (plain, products_convolution)
    )
    check_rounding(reference, found, exact)


@pytest.mark.parametrize("needed", [(0,), (1,)])
@pytest.mark.parametrize(("side", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_computes_the_gradients_that_are_asked_for(side: int, stride: int, needed: tuple[int, ...]) -> None:
    """A frozen weight, or a first layer."""
    results = []
    for function in (plain, products_convolution):
        tensors = layer((2, 4, 5, 3), 8, side)
        leaves = [tensor.requires_grad_(position in needed) for position, tensor in enumerate(tensors)]
        # The gradient of a sum is one number with strides of zero.
        function(*leaves, stride, side // 2).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_layer_keeps_the_format_of_its_maps(groups: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    made = ProductsConv2d(4, 6, 1, stride=2, groups=groups, bias=False).double().to(memory_format=memory_format)
    maps = draw(2, 4, 5, 7, seed=3).contiguous(memory_format=memory_format)
    out = made(maps)
    assert out.is_contiguous(memory_format=memory_format)
    expected = F.conv2d(maps, made.weight, None, 2, groups=groups)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    used = memory_format == torch.channels_last and groups == 1
    assert ("_Convolution" in str(out.grad_fn)) == used
    with torch.no_grad():
        torch.testing.assert_close(made(maps), expected, rtol=1e-12, atol=1e-12)


def resnet(depth: Any, **choices: Any) -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=depth, num_classes=5, **choices)


def gradients(model: nn.Module, compiled: bool = False) -> dict[str, Any]:
    images = draw(4, 3, 32, 32, seed=1).contiguous(memory_format=torch.channels_last)
    logits = (torch.compile(model, fullgraph=True) if compiled else model)(images)
    (logits * draw(4, 5, seed=2)).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [{"depth": 18, "stem": "small"}, {"depth": 50}, {"depth": 50, "groups": 4, "width_per_group": 16}],
    ids=["18", "50", "grouped"],
)
def test_the_whole_model_in_float64(choices: dict[str, Any]) -> None:
    results = []
    for kernel in ("torch", "products"):
        model = fill_random(resnet(**choices, convolution=kernel).double()).to(memory_format=torch.channels_last)
        results.append(gradients(model))
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-8, atol=1e-9 * expected.abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("recompute", "repeated"), [("off", 0), ("full", 3), ("selective", 0)])
def test_selective_recomputation_keeps_them_in_compiled_code(recompute: Any, repeated: int) -> None:
    """A bottleneck with a projection has three 1x1 kernels; counted in its forward and in its backward graph."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(sum(node.target is torch.ops.pycls_fast.pointwise.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    model = resnet(26, stem="small", convolution="products").to(memory_format=torch.channels_last).eval()
    units = list(model.units())
    save_activation_memory(model, units, recompute=recompute)
    _, unit = units[0]
    torch._dynamo.reset()
    # As "aot_eager" does.
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    unit.compile(backend=backend)
    maps = draw(2, 64, 8, 8, seed=1).float().contiguous(memory_format=torch.channels_last).requires_grad_()
    unit(maps).sum().backward()
    assert counts == [3, repeated]


@pytest.mark.slow
def test_compiled_in_one_graph() -> None:
    """The stem's max-pool included."""
    results = []
    for compiled in (False, True):
        model = fill_random(resnet(26, convolution="products").double()).to(memory_format=torch.channels_last)
        results.append(gradients(model, compiled))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-8, atol=1e-9 * expected.abs().max().item())
