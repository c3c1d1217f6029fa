"""Functions of torch that a CPU computes faster in another way: each has the mathematics of the twin that it replaces.

Attention, linear layers and convolutions as plain matrix products with custom backward passes, the products that a
CPU's matrix units are fast at: in bfloat16 the backward pass of torch's fused attention takes six times as long as its
forward pass on a CPU, oneDNN's product with a transposed first factor runs at half the rate of one without, and its
convolutions are slow for 1x1 kernels and for small maps with many channels (above all the gradient of the weights). And
GELU by polynomials.

Shape letters: B batch, H heads, N tokens, E width of one head, T tokens or output pixels of all images, I and O widths
of a layer's input and output. Of maps: C and O channels in and out, H and W the sides, h and w those of the output, k
side of the kernel, F numbers under the kernel (k * k * C).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.polynomial import chebyshev
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# The compiler passes tensors to our operators with the strides that they were traced with.
_TAGS = (torch.Tag.needs_exact_strides,)


def products_attention(
    queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor, *, keys: int | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(E)) v in six batched products; keeps the (B, H, N, N) attention in memory.

    The scale is part of a product, the softmax rounds once, and its gradient is computed from its rounded result.
    `keys` is the number of tokens that are attended to, if not all. Returns (B, H, N, E).
    """
    if keys is not None:
        keys_BHNE, values_BHNE = keys_BHNE[:, :, :keys], values_BHNE[:, :, :keys]
    out: Tensor = _Attention.apply(queries_BHNE, keys_BHNE, values_BHNE)
    return out


class _Attention(torch.autograd.Function):
    """Batched products over b = B * H."""

    @staticmethod
    def forward(ctx: Any, queries_BHNE: Tensor, keys_BHME: Tensor, values_BHME: Tensor) -> Tensor:
        ctx.scale = queries_BHNE.shape[-1] ** -0.5
        queries_bNE, keys_bME, values_bME = (x.flatten(0, 1) for x in (queries_BHNE, keys_BHME, values_BHME))
        scores_bNM = _scaled(queries_bNE, keys_bME.transpose(1, 2), ctx.scale)
        # The operator itself: under autocast `softmax` would return float32, four times the memory traffic for a result
        # that the next product rounds; internally it computes in float32 in any case.
        attention_bNM = torch._softmax(scores_bNM, -1, half_to_float=False)
        ctx.save_for_backward(queries_bNE, keys_bME, values_bME, attention_bNM)
        return torch.bmm(attention_bNM, values_bME).view(queries_BHNE.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries_bNE, keys_bME, values_bME, attention_bNM = ctx.saved_tensors
        batch = gradient_BHNE.shape[:2]
        gradient_bNE = gradient_BHNE.flatten(0, 1)
        values_grad_bME = torch.bmm(attention_bNM.transpose(1, 2), gradient_bNE)
        attention_grad_bNM = torch.bmm(gradient_bNE, values_bME.transpose(1, 2))
        scores_grad_bNM = torch._softmax_backward_data(attention_grad_bNM, attention_bNM, -1, attention_bNM.dtype)
        queries_grad_bNE = _scaled(scores_grad_bNM, keys_bME, ctx.scale)
        keys_grad_bME = _scaled(scores_grad_bNM.transpose(1, 2), queries_bNE, ctx.scale)
        queries_grad, keys_grad, values_grad = (
            gradient.unflatten(0, batch) for gradient in (queries_grad_bNE, keys_grad_bME, values_grad_bME)
        )
        return queries_grad, keys_grad, values_grad


def _scaled(a_bNK: Tensor, b_bKM: Tensor, scale: float) -> Tensor:
    """scale * (a @ b), scaled before it is rounded."""
    return torch.baddbmm(a_bNK.new_empty(1), a_bNK, b_bKM, beta=0, alpha=scale)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast computes products; None if it is off."""
    # Autocast does not know the meta device, and torch 2.11 cannot compile a query about it.
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def products_linear(features: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """features @ weight^T + bias, like `F.linear`, with a custom backward pass; obeys autocast.

    Forward, the bias is added within the product (in bfloat16 on a CPU). Backward, the gradient of the weights is a
    product over the tokens, for which one factor has to be transposed: if the gradient is the narrower one it is
    copied, because oneDNN would transpose it again for every block of the result. The gradient of the bias, in 16 bits,
    is a product with a row of ones.
    """
    dtype = autocast_dtype(features.device)
    if dtype is not None:
        features, weight_OI, bias_O = features.to(dtype), weight_OI.to(dtype), bias_O.to(dtype)
    if not torch.is_grad_enabled():
        return F.linear(features, weight_OI, bias_O)
    out: Tensor = _Linear.apply(features, weight_OI, bias_O)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight_OI)
        fuses_bias = _FUSES_BIAS and features.dtype == torch.bfloat16 and features.device.type == "cpu"
        if not fuses_bias:
            return F.linear(features, weight_OI, bias_O)
        # addmm first copies the bias into every row of the result.
        if torch.compiler.is_compiling():
            # The compiler does not have the operator below; it adds the bias in the operation that reads the result.
            return F.linear(features, weight_OI) + bias_O
        out: Tensor = torch.ops.mkldnn._linear_pointwise(features, weight_OI, bias_O, "none", [], "")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        features, weight_OI = ctx.saved_tensors
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad
        gradient_TO, features_TI = gradient.flatten(0, -2), features.flatten(0, -2)
        features_grad = (gradient_TO @ weight_OI).view(features.shape) if needs_features else None
        weight_grad_OI = _weight_gradient(gradient_TO, features_TI) if needs_weight else None
        bias_grad_O = _sum_over_tokens(gradient_TO) if needs_bias else None
        return features_grad, weight_grad_OI, bias_grad_O


def _sum_over_tokens(gradient_TO: Tensor) -> Tensor:
    if gradient_TO.dtype in (torch.bfloat16, torch.float16):
        return (gradient_TO.new_ones(1, len(gradient_TO)) @ gradient_TO)[0]
    # `sum` adds pairwise, a product does not: in float32 its rounding errors are smaller.
    return gradient_TO.sum(0)


# False in builds of torch without oneDNN, and on processors without AVX-512, where oneDNN has no bfloat16 and its
# operator raises; `F.linear` has another implementation there.
_FUSES_BIAS = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _weight_gradient(gradient_TO: Tensor, features_TI: Tensor) -> Tensor:
    """gradient^T @ features, (O, I)."""
    outputs, inputs = gradient_TO.shape[1], features_TI.shape[1]
    if outputs < inputs:
        return _transposed(gradient_TO) @ features_TI
    if torch.compiler.is_compiling():
        # Outside compiled code the copies would take as long as they save, because the result has to be transposed too.
        return (_transposed(features_TI) @ gradient_TO).t().contiguous()
    return gradient_TO.t() @ features_TI


def _transposed(matrix_TO: Tensor) -> Tensor:
    """The matrix (O, T), contiguous in memory."""
    matrix_OT = matrix_TO.t().contiguous()
    # The compiler chooses the strides of copies and would keep those of the original; `as_strided` fixes them.
    return matrix_OT.as_strided(matrix_OT.shape, (matrix_OT.shape[1], 1))


class ProductsLinear(nn.Linear):
    """torch's linear layer with the same parameters and names, computed by `products_linear`."""

    def forward(self, features: Tensor) -> Tensor:
        return products_linear(features, self.weight, self.bias)


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": F.linear,
    "products": products_linear,
}


def linear_layer(in_width: int, out_width: int, kernel: str) -> nn.Linear:
    return nn.Linear(in_width, out_width) if kernel == "torch" else ProductsLinear(in_width, out_width)


# GELU(x) = x P(x), P the normal distribution function (Hendrycks and Gimpel 2016), its derivative P(x) + x p(x), p the
# density. The error function's exponential and division take longer in 16 bits than reading and writing the number.
# Beyond this limit P is 0 or 1 within 3.4e-6, and the derivative within 7e-5.
_LIMIT = 4.5
# The error of P is then at most 2.3e-6, that of the derivative 8.8e-5. bfloat16's relative rounding error is up to 1 /
# 512.
_DEGREE = 10


def _odd_part(function: Callable[[float], float]) -> tuple[float, ...]:
    """Coefficients c of (function(x) - 1/2) / x = sum of c_k s^k, s = 2 (x / _LIMIT)^2 - 1, for |x| up to _LIMIT.

    Interpolates at the Chebyshev points, which is close to the minimax polynomial. In s, from -1 to 1, the terms are
    small and their sum loses nothing in float32.
    """

    s = chebyshev.chebpts1(_DEGREE + 1)
    values = [(function(x) - 0.5) / x for x in (_LIMIT * np.sqrt((s + 1) / 2)).tolist()]
    return tuple(chebyshev.cheb2poly(chebyshev.chebfit(s, values, _DEGREE)).tolist())


def _distribution(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _slope(x: float) -> float:
    return _distribution(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


_DISTRIBUTION, _SLOPE = _odd_part(_distribution), _odd_part(_slope)


def _evaluate(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    x = x.clamp(-_LIMIT, _LIMIT)
    s = x * x * (2 / _LIMIT**2) - 1
    total = s * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        total = total * s + coefficient
    return x * total + 0.5


def polynomial_gelu(x: Tensor) -> Tensor:
    """GELU of any shape: in compiled code and 16 bits within 3e-6 |x|, its derivative within 9e-5, before rounding.

    This takes many small operations, which the compiler fuses; uncompiled, and in wider formats, which would show the
    difference, it is `F.gelu`.
    """
    if not torch.compiler.is_compiling() or x.dtype.itemsize > 2:
        return F.gelu(x)
    out: Tensor = PolynomialGelu.apply(x)
    return out


class PolynomialGelu(torch.autograd.Function):
    """The compiled form of `polynomial_gelu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = _widened(x)
        return (wide * _evaluate(wide, _DISTRIBUTION)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (_widened(gradient) * _evaluate(_widened(x), _SLOPE)).to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


GELU: dict[str, Callable[[Tensor], Tensor]] = {"torch": F.gelu, "polynomial": polynomial_gelu}


# A product has faster arithmetic but reads the numbers under the kernel from memory, k * k times the map. By stride:
# the largest number of pixels per output channel for which it is faster.
_PIXELS_PER_CHANNEL = {1: 8, 2: 32}


class ProductsConv2d(nn.Conv2d):
    """torch's convolution with the same parameters and names; channels-last maps go through `products_convolution`.

    Kernels have to be square with the same stride and padding both ways, undilated, in one group and without bias.
    """

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        if self.groups == 1 and maps_BCHW.is_contiguous(memory_format=torch.channels_last):
            assert not isinstance(self.padding, str)
            return products_convolution(maps_BCHW, self.weight, self.stride[0], self.padding[0])
        return super().forward(maps_BCHW)


def products_convolution(maps_BCHW: Tensor, weight_OCkk: Tensor, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of channels-last maps with a custom backward pass; obeys autocast. Returns (B, O, h, w).

    A 1x1 kernel is a product over the pixels that its stride keeps, forward and backward. For larger kernels the
    gradient of the weights is a product over T if T is at most 8 times O (32 times with a stride of 2). Everything else
    is torch's.
    """
    dtype = autocast_dtype(maps_BCHW.device)
    if dtype is not None:
        maps_BCHW, weight_OCkk = maps_BCHW.to(dtype), weight_OCkk.to(dtype)
    if not torch.is_grad_enabled():
        return F.conv2d(maps_BCHW, weight_OCkk, None, stride, padding)
    out: Tensor = _Convolution.apply(maps_BCHW, weight_OCkk, stride, padding)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps_BCHW: Tensor, weight_OCkk: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(maps_BCHW, weight_OCkk)
        ctx.stride, ctx.padding = stride, padding
        if weight_OCkk.shape[-1] > 1 or padding > 0:
            return F.conv2d(maps_BCHW, weight_OCkk, None, stride, padding)
        return (_opaque_pointwise if torch.compiler.is_compiling() else _pointwise)(maps_BCHW, weight_OCkk, stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BOhw: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        needs_maps, needs_weight, *_ = ctx.needs_input_grad
        maps_BCHW, weight_OCkk = ctx.saved_tensors
        run = _opaque_gradients if torch.compiler.is_compiling() else _gradients
        maps_grad_BCHW, weight_grad_OCkk = run(
            gradient_BOhw, maps_BCHW, weight_OCkk, ctx.stride, ctx.padding, needs_maps, needs_weight
        )
        return maps_grad_BCHW if needs_maps else None, weight_grad_OCkk if needs_weight else None, None, None


def _pointwise(maps_BCHW: Tensor, weight_OC11: Tensor, stride: int) -> Tensor:
    """A 1x1 kernel without padding, (B, O, h, w)."""
    left_BhwC = _left(maps_BCHW, stride)
    out_TO = left_BhwC.flatten(0, 2) @ weight_OC11.flatten(1).t()
    return out_TO.view(*left_BhwC.shape[:3], -1).permute(0, 3, 1, 2)


def _gradients(
    gradient_BOhw: Tensor,
    maps_BCHW: Tensor,
    weight_OCkk: Tensor,
    stride: int,
    padding: int,
    needs_maps: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the maps and of the weight; one that is not needed is an empty tensor."""
    maps_grad_BCHW = weight_grad_OCkk = gradient_BOhw.new_empty(0)
    gradient_BOhw = gradient_BOhw.contiguous(memory_format=torch.channels_last)
    gradient_TO, side = gradient_BOhw.permute(0, 2, 3, 1).flatten(0, 2), weight_OCkk.shape[-1]
    is_pointwise = side == 1 and padding == 0
    few_pixels = len(gradient_TO) <= _PIXELS_PER_CHANNEL.get(stride, 0) * gradient_TO.shape[1]
    as_product = is_pointwise or few_pixels
    if needs_weight and as_product:
        left_BhwF = _left(maps_BCHW, stride) if is_pointwise else _under_kernel(maps_BCHW, side, stride, padding)
        weight_grad_OF = gradient_TO.t() @ left_BhwF.flatten(0, 2)
        weight_grad_OCkk = weight_grad_OF.unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)
    if needs_maps and is_pointwise:
        maps_grad_BCHW = _spread(gradient_TO @ weight_OCkk.flatten(1), maps_BCHW, stride)
    from_torch = [needs_maps and not is_pointwise, needs_weight and not as_product, False]
    if any(from_torch):
        window = ([stride, stride], [padding, padding], [1, 1], False, [0, 0], 1)
        found = torch.ops.aten.convolution_backward(gradient_BOhw, maps_BCHW, weight_OCkk, None, *window, from_torch)
        maps_grad_BCHW = found[0] if from_torch[0] else maps_grad_BCHW
        weight_grad_OCkk = found[1] if from_torch[1] else weight_grad_OCkk
    return maps_grad_BCHW, weight_grad_OCkk


def _left(maps_BCHW: Tensor, stride: int) -> Tensor:
    """The pixels that a stride keeps, (B, h, w, C), contiguous."""
    maps_BHWC = maps_BCHW.permute(0, 2, 3, 1)
    return maps_BHWC if stride == 1 else maps_BHWC[:, ::stride, ::stride].contiguous()


def _spread(left_TC: Tensor, like_BCHW: Tensor, stride: int) -> Tensor:
    """The adjoint of `_left`: zeros where the stride skipped a pixel."""
    if stride == 1:
        return left_TC.view(like_BCHW.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
    maps_BHWC = left_TC.new_zeros(like_BCHW.permute(0, 2, 3, 1).shape)
    left_BhwC = maps_BHWC[:, ::stride, ::stride]
    left_BhwC.copy_(left_TC.view(left_BhwC.shape))
    return maps_BHWC.permute(0, 3, 1, 2)


def _under_kernel(maps_BCHW: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """All input numbers of each output pixel ("im2col"), channels last: (B, h, w, F)."""
    maps_BHWC = maps_BCHW.permute(0, 2, 3, 1)
    if padding:
        maps_BHWC = F.pad(maps_BHWC, (0, 0, padding, padding, padding, padding))
    under_BhwCkk = maps_BHWC.unfold(1, side, stride).unfold(2, side, stride)
    return under_BhwCkk.permute(0, 1, 2, 4, 5, 3).flatten(3)


# The compiler would merge the views into the surrounding norms and then not vectorise those, so it gets opaque
# operators.
_opaque_pointwise = torch.library.custom_op("pycls_fast::pointwise", _pointwise, mutates_args=(), tags=_TAGS)
_opaque_pointwise.register_fake(_pointwise)
_opaque_gradients = torch.library.custom_op(
    "pycls_fast::convolution_gradients", _gradients, mutates_args=(), tags=_TAGS
)
_opaque_gradients.register_fake(_gradients)


CONVOLUTION: dict[str, type[nn.Conv2d]] = {"torch": nn.Conv2d, "products": ProductsConv2d}
