"""The CPU's kernels: torch's functions, no further from float64 than torch's own, eager and compiled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from pycls_fast.models import cpu_kernels
from pycls_fast.models.cpu_kernels import (
    PolynomialGelu,
    ProductsConv2d,
    polynomial_gelu,
    products_attention,
    products_convolution,
    products_linear,
)
from pycls_fast.models.layers import Compute, Mlp, reference_attention
from pycls_fast.models.resnet import ResNet
from pycls_fast.parallel.precision import keep_in_float32
from pycls_fast.parallel.saved_activations import save_activation_memory
from pycls_fast.speed import Speed
from tests.factories import assert_same_bits, check_rounding, draw, randomise, small_vit
from tests.integration.runs import run_process

Function = Callable[..., Tensor]


class Kernel(NamedTuple):
    """A product of the CPU beside torch's, and what both are tried on.

    Of a convolution rounding may add `slack`, as a share of the result.
    """

    plain: Function
    fast: Function
    tensors: list[Tensor]
    tolerance: float
    slack: float = 0.0


def linear(inputs: int, outputs: int, shape: tuple[int, ...] = (16, 25)) -> Kernel:
    """Of features, weight and bias."""
    tensors = [draw(*shape, inputs, seed=0), draw(outputs, inputs, seed=1), draw(outputs, seed=2)]
    return Kernel(F.linear, products_linear, tensors, 1e-12)


def convolution(shape: tuple[int, ...], outputs: int, side: int, stride: int) -> Kernel:
    """Of maps (B, C, H, W) and weight, channels last."""

    def plain(maps: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(maps, weight, None, stride, side // 2)

    def fast(maps: Tensor, weight: Tensor) -> Tensor:
        return products_convolution(maps, weight, stride, side // 2)

    tensors = [draw(*shape, seed=0), draw(outputs, shape[1], side, side, seed=1)]
    tensors = [tensor.to(memory_format=torch.channels_last) for tensor in tensors]
    return Kernel(plain, fast, tensors, 1e-11, slack=1e-7)


# Input and output width: the gradient is the narrower factor, the wider one, and neither.
WIDTHS = [(24, 8), (8, 24), (16, 16)]
# Every branch, odd and even sides.
CONVOLUTIONS = [
    convolution((2, 6, 7, 5), 4, 1, 1),
    convolution((2, 6, 7, 5), 8, 1, 2),
    convolution((2, 6, 8, 6), 3, 1, 2),
    convolution((2, 4, 5, 3), 8, 3, 1),
    convolution((2, 4, 4, 3), 8, 3, 1),
    convolution((2, 4, 7, 8), 6, 3, 2),
    convolution((3, 2, 12, 12), 2, 3, 1),
    convolution((3, 2, 24, 24), 2, 3, 2),
    convolution((2, 3, 9, 10), 4, 7, 2),
    convolution((1, 3, 1, 1), 4, 3, 1),
]
LINEARS = [linear(*widths) for widths in WIDTHS]
BY_KERNEL = pytest.mark.parametrize("kernel", [*LINEARS, *CONVOLUTIONS])


def with_gradients(function: Function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of every tensor, in float64."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out.backward(torch.empty_like(out).copy_(draw(*out.shape, seed=99)))
    found = [out, *(leaf.grad for leaf in leaves)]
    assert all(tensor is not None and tensor.dtype == dtype for tensor in found[1:])
    return [tensor.detach().double() for tensor in found if tensor is not None]


@pytest.mark.parametrize(
    "kernel", [*(linear(*w, shape) for w in WIDTHS for shape in ((7,), (3, 5), (2, 3, 4))), *CONVOLUTIONS]
)
def test_a_product_is_torch_s_in_float64(kernel: Kernel) -> None:
    exact = with_gradients(kernel.plain, kernel.tensors, torch.float64)
    for found, right in zip(with_gradients(kernel.fast, kernel.tensors, torch.float64), exact, strict=True):
        torch.testing.assert_close(found, right, rtol=kernel.tolerance, atol=kernel.tolerance)
        assert not kernel.slack or found.is_contiguous(memory_format=torch.channels_last)


@BY_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_rounds_no_more_than_four_times_as_torch_s(kernel: Kernel, dtype: torch.dtype) -> None:
    exact = with_gradients(kernel.plain, [tensor.to(dtype).double() for tensor in kernel.tensors], torch.float64)
    plain, found = (with_gradients(function, kernel.tensors, dtype) for function in (kernel.plain, kernel.fast))
    check_rounding(plain, found, exact, slack=kernel.slack)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", LINEARS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_in_compiled_code(kernel: Kernel, dtype: torch.dtype) -> None:
    """Which has products of its own: other factors are transposed, and in bfloat16 the bias is added behind."""
    torch._dynamo.reset()
    exact = with_gradients(F.linear, [tensor.to(dtype).double() for tensor in kernel.tensors], torch.float64)
    compiled = torch.compile(products_linear, backend="aot_eager", fullgraph=True)
    found = with_gradients(compiled, kernel.tensors, dtype)
    if dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    else:
        check_rounding(with_gradients(F.linear, kernel.tensors, dtype), found, exact)


def under_autocast(function: Function) -> Function:
    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*tensors)
        assert out.dtype == torch.bfloat16
        return out

    return call


@BY_KERNEL
def test_a_product_obeys_autocast(kernel: Kernel) -> None:
    """bfloat16 comes out, float32 tensors get float32 gradients."""
    exact = with_gradients(kernel.plain, kernel.tensors, torch.float64)
    plain, found = (
        with_gradients(under_autocast(function), kernel.tensors, torch.float32)
        for function in (kernel.plain, kernel.fast)
    )
    check_rounding(plain, found, exact, slack=kernel.slack)


@pytest.mark.parametrize(
    ("kernel", "needed"),
    [
        *((linear(6, 4, (3, 5)), needed) for needed in ((0,), (1,), (2,), (0, 2), (1, 2))),
        *((convolution((2, 4, 5, 3), 8, *how), (n,)) for how in ((1, 1), (1, 2), (3, 1), (3, 2)) for n in (0, 1)),
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_a_product_computes_the_gradients_that_are_asked_for(
    kernel: Kernel, needed: tuple[int, ...], summed: bool
) -> None:
    """A frozen weight, or a first layer. The gradient of a sum is one number with strides of zero."""
    results = []
    for function in (kernel.plain, kernel.fast):
        leaves = [tensor.clone().requires_grad_(position in needed) for position, tensor in enumerate(kernel.tensors)]
        out = function(*leaves)
        (out if summed else out * draw(*out.shape, seed=9)).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    expected, found = results
    torch.testing.assert_close(found, expected, rtol=kernel.tolerance, atol=kernel.tolerance)


def attend(kernel: Function) -> Function:
    """Attention of float32 features, cut out of products as in the model."""

    def call(queries: Tensor, keys: Tensor, values: Tensor, eye: Tensor) -> Tensor:
        return F.linear(kernel(*(F.linear(part, eye) for part in (queries, keys, values))), eye)

    return call


def test_attention_under_autocast_rounds_no_more_than_four_times_as_the_formula_with_softmax_in_float32() -> None:
    keep_in_float32(torch.device("cpu"))
    tensors = [*(draw(2, 3, 50, 16, seed=seed) for seed in range(3)), draw(16, 16, seed=3) / 4]
    exact = with_gradients(attend(reference_attention), tensors, torch.float64)
    plain, found = (
        with_gradients(under_autocast(attend(kernel)), tensors, torch.float32)
        for kernel in (reference_attention, products_attention)
    )
    check_rounding(plain, found, exact)


_IN_BFLOAT16 = """
import torch
from pycls_fast.models.vit import VisionTransformer

fast = dict(attention="products", linear="products", patches="product", qkv="fused")
sizes = dict(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_width=32, num_classes=3)
model = VisionTransformer(**sizes, **fast, init="trunc_normal").bfloat16()
model(torch.randn(2, 3, 8, 8).bfloat16()).float().square().sum().backward()
assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
assert all(block.mlp.fc1.weight.grad.any() for block in model.blocks)
print("bfloat16 in oneDNN:", torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")
def test_bfloat16_on_processors_for_which_onednn_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    done = run_process([sys.executable, "-W", "error", "-c", _IN_BFLOAT16], cwd=tmp_path)
    assert done.stdout == "bfloat16 in oneDNN: False\n"


@pytest.mark.skipif(not cpu_kernels._FUSES_BIAS, reason="a processor without bfloat16 in oneDNN")
def test_selective_recomputation_keeps_these_products_too() -> None:
    """Of 4 products a block it does the projection again, as with torch's."""
    torch.manual_seed(0)
    model = small_vit(depth=1, qkv="fused", attention="products", linear="products").bfloat16()
    save_activation_memory(model, model.units(), Speed(recompute="selective"))
    with Ran() as ran:
        model(torch.randn(2, 3, 32, 32).bfloat16()).float().square().sum().backward()
    assert ran.counts["mkldnn::_linear_pointwise"] == 4 + 1


class Ran(TorchDispatchMode):
    """Counts operators that really run; what recomputation hands out again does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))


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


@pytest.mark.slow
def test_a_whole_resnet_in_one_graph() -> None:
    """In float64, the stem's max-pool included."""
    images, results = draw(4, 3, 32, 32, seed=1).contiguous(memory_format=torch.channels_last), []
    for kernel in ("torch", "products"):
        model: Any = randomise(resnet(26, convolution=kernel)).to(memory_format=torch.channels_last)
        logits = (torch.compile(model, fullgraph=True) if kernel == "products" else model)(images)
        (logits * draw(4, 5, seed=2)).sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9 * expected.abs().max().item())


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
    save_activation_memory(model, units, Speed(recompute=recompute))
    _, unit = units[0]
    torch._dynamo.reset()
    # As "aot_eager" does.
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    unit.compile(backend=backend)
    maps = draw(2, 64, 8, 8, seed=1).float().contiguous(memory_format=torch.channels_last).requires_grad_()
    unit(maps).sum().backward()
    assert counts == [3, repeated]


def value_and_slope(function: Function, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    out.backward(torch.ones_like(out))
    assert out.dtype == leaf.grad.dtype == x.dtype
    return [out.detach().double(), leaf.grad.double()]


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
    plain, found = (value_and_slope(function, x) for function in (F.gelu, PolynomialGelu.apply))
    check_rounding(plain, found, value_and_slope(F.gelu, x.double()), factor=1.5)


def test_only_compiled_code_has_the_polynomials() -> None:
    """And no error function; the layer's results are the twin's within what the polynomials are off by."""
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    assert_same_bits(value_and_slope(polynomial_gelu, x), value_and_slope(F.gelu, x))
    graphs: list[str] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    twins: dict[str, Any] = {name: Mlp(6, 12, Compute(gelu=name)) for name in ("torch", "polynomial")}
    randomise(twins["torch"])
    twins["polynomial"].load_state_dict(twins["torch"].state_dict())
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    for dtype, narrow in ((torch.bfloat16, True), (torch.float32, False)):
        graphs.clear()
        results = {name: torch.compile(mlp.to(dtype), backend=backend)(x.to(dtype)) for name, mlp in twins.items()}
        assert ["_nn.gelu(" in graph for graph in graphs] == [True, not narrow]
        assert ("clamp" in graphs[1]) == narrow
        torch.testing.assert_close(results["polynomial"], results["torch"], rtol=1e-2, atol=1e-2)
        assert narrow or torch.equal(results["polynomial"], results["torch"])
