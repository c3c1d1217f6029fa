"""Convolutions computed partly as matrix products, for CPUs.

In bfloat16, oneDNN's convolutions are slow for small maps with many channels (above all the gradient of the weights)
and for 1x1 kernels. As products over the channels-last pixels they run at the speed of products.

Shape letters: B batch, C channels in, H height, W width of the maps, O output channels, h and w height and width of the
output maps, k side of the kernel, T pixels of all output maps (B * h * w), F numbers under the kernel (k * k * C).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pycls_fast.models.products import autocast_dtype

ConvolutionName = Literal["torch", "products"]

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
    as_product = is_pointwise or _is_faster_as_product(gradient_BOhw, stride)
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


def _is_faster_as_product(gradient_BOhw: Tensor, stride: int) -> bool:
    batch, out_channels, height, width = gradient_BOhw.shape
    pixels = batch * height * width
    return pixels <= _PIXELS_PER_CHANNEL.get(stride, 0) * out_channels


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
# operators, with the strides that they were traced with.
_TAGS = (torch.Tag.needs_exact_strides,)
_opaque_pointwise = torch.library.custom_op(
    "pycls_fast::pointwise",
    _pointwise,
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor maps, Tensor weight, int stride) -> Tensor",
)
_opaque_pointwise.register_fake(_pointwise)
_opaque_gradients = torch.library.custom_op(
    "pycls_fast::convolution_gradients",
    _gradients,
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor gradient, Tensor maps, Tensor weight, int stride, int padding, bool needs_maps, bool needs_weight)"
    " -> (Tensor, Tensor)",
)
_opaque_gradients.register_fake(_gradients)


CONVOLUTION: dict[ConvolutionName, type[nn.Conv2d]] = {"torch": nn.Conv2d, "products": ProductsConv2d}
assert set(CONVOLUTION) == set(get_args(ConvolutionName))


def compute_convolutions(network: nn.Module, kernel: ConvolutionName) -> None:
    """Give a network on the meta device convolutions with this kernel, in place."""
    for module in list(network.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Conv2d) and type(layer) is not CONVOLUTION[kernel]:
                sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding)
                made = CONVOLUTION[kernel](*sizes, groups=layer.groups, bias=layer.bias is not None)  # type: ignore[arg-type]
                setattr(module, name, made)
