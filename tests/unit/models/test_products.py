"""Attention, linear layers and patches as products: torch's functions, no further from float64 than torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pycls_fast.models import VisionTransformer, products
from pycls_fast.models.attention import reference_attention
from pycls_fast.models.layers import PatchStem
from pycls_fast.models.products import products_attention, products_linear
from pycls_fast.parallel import keep_in_float32, save_activation_memory
from tests.unit.models.conftest import draw, fill_random

Function = Callable[..., Tensor]
# Input and output width: the gradient is the narrower factor, the wider one, and neither.
WIDTHS = pytest.mark.parametrize(("inputs", "outputs"), [(24, 8), (8, 24), (16, 16)])


def with_gradients(function: Function, tensors: list[Tensor], dtype: torch.dtype, **named: Any) -> list[Tensor]:
    """The result and the gradients of every tensor, in float64."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    out = function(*leaves, **named)
    out.backward(draw(*out.shape, seed=99).to(out.dtype))
    found = [out, *(leaf.grad for leaf in leaves)]
    assert all(tensor is not None and tensor.dtype == dtype for tensor in found[1:])
    return [tensor.detach().double() for tensor in found if tensor is not None]


def layer(inputs: int, outputs: int, shape: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    """Features, weight and bias."""
    return [draw(*shape, inputs, seed=0), draw(outputs, inputs, seed=1), draw(outputs, seed=2)]


@WIDTHS
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_linear_is_torch_s_in_float64(inputs: int, outputs: int, shape: tuple[int, ...]) -> None:
    tensors = layer(inputs, outputs, shape)
    exact = with_gradients(F.linear, tensors, torch.float64)
    for found, right in zip(with_gradients(products_linear, tensors, torch.float64), exact, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@WIDTHS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_in_compiled_code(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Which has products of its own: other factors are transposed, and in bfloat16 the bias is added behind."""
    torch._dynamo.reset()
    tensors = layer(inputs, outputs, (16, 25))
    exact = with_gradients(F.linear, [tensor.to(dtype).double() for tensor in tensors], torch.float64)
    compiled = torch.compile(products_linear, backend="aot_eager", fullgraph=True)
    found = with_gradients(compiled, tensors, dtype)
    if dtype == torch.float64:
        for mine, right in zip(found, exact, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    else:
        check_rounding(with_gradients(F.linear, tensors, dtype), found, exact)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_linear_computes_the_gradients_that_are_asked_for(needed: tuple[int, ...]) -> None:
    """A frozen weight, or a first layer."""
    tensors = layer(6, 4)
    results = []
    for function in (F.linear, products_linear):
        leaves = [tensor.clone().requires_grad_(position in needed) for position, tensor in enumerate(tensors)]
        function(*leaves).backward(draw(3, 5, 4, seed=9))
        results.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def check_rounding(plain: list[Tensor], found: list[Tensor], exact: list[Tensor]) -> None:
    """Every error at most four times that of torch's own way."""
    for reference, other, right in zip(plain, found, exact, strict=True):
        own = (reference - right).norm()
        assert own > 0
        assert (other - right).norm() <= 4 * own


@WIDTHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_rounds_no_more_than_four_times_as_torch_s(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    tensors = layer(inputs, outputs, (16, 25))
    exact = with_gradients(F.linear, [tensor.to(dtype).double() for tensor in tensors], torch.float64)
    plain, found = (with_gradients(function, tensors, dtype) for function in (F.linear, products_linear))
    check_rounding(plain, found, exact)


def under_autocast(function: Function) -> Function:
    def call(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*tensors)
        assert out.dtype == torch.bfloat16
        return out

    return call


@WIDTHS
def test_linear_obeys_autocast(inputs: int, outputs: int) -> None:
    """bfloat16 comes out, float32 tensors get float32 gradients."""
    tensors = layer(inputs, outputs, (16, 25))
    exact = with_gradients(F.linear, tensors, torch.float64)
    results = [
        with_gradients(under_autocast(function), tensors, torch.float32) for function in (F.linear, products_linear)
    ]
    check_rounding(results[0], results[1], exact)


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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
def test_patches_as_a_product_are_the_convolution(layout: Any, memory_format: torch.memory_format) -> None:
    images = draw(3, 2, 8, 12, seed=5).to(memory_format=memory_format)
    results = []
    for patches in ("convolution", "product"):
        stem: Any = fill_random(PatchStem(2, 4, 5, layout=layout, patches=patches).double())
        leaf = images.clone().requires_grad_()
        out = stem(leaf)
        assert out.shape == ((6, 3, 5) if layout == "batch_second" else (3, 6, 5))
        (out * draw(*out.shape, seed=6)).sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad for p in stem.parameters())])
        assert list(stem.state_dict()) == ["projection.weight", "projection.bias"]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
def test_the_whole_model_in_float64(layout: str) -> None:
    sizes: dict[str, Any] = {"image_size": 12, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_width": 24}
    fast = {"attention": "products", "linear": "products", "patches": "product", "qkv": "fused"}
    results = []
    for kernels in ({}, fast):
        model = fill_random(VisionTransformer(**sizes, num_classes=5, layout=layout, **kernels).double())
        logits = model(draw(4, 3, 12, 12, seed=1))
        (logits * draw(4, 5, seed=2)).sum().backward()
        results.append({"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-9, atol=1e-11)


_IN_BFLOAT16 = """
import torch
from pycls_fast.models import VisionTransformer

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
def test_bfloat16_on_processors_for_which_onednn_has_none() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IN_BFLOAT16],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "bfloat16 in oneDNN: False\n"), found.stderr


@pytest.mark.skipif(not products._FUSES_BIAS, reason="a processor without bfloat16 in oneDNN")
def test_selective_recomputation_keeps_these_products_too() -> None:
    """Of 4 products a block it does the projection again, as with torch's."""
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_width=32, num_classes=3, qkv="fused",
        attention="products", linear="products",
    ).bfloat16()  # fmt: skip
    save_activation_memory(model, model.units(), recompute="selective")
    with Ran() as ran:
        model(torch.randn(2, 3, 8, 8).bfloat16()).float().square().sum().backward()
    assert ran.counts["mkldnn::_linear_pointwise"] == 4 + 1


class Ran(TorchDispatchMode):
    """Counts operators that really run; what recomputation hands out again does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator.name()] += 1
        return operator(*args, **(kwargs or {}))
