"""Attention and linear layers as plain matrix products with custom backward passes, for CPUs.

The same mathematics as torch's, in the products that a CPU's matrix units are fast at: in bfloat16 the backward pass of
torch's fused attention takes six times as long as its forward pass on a CPU, and oneDNN's product with a transposed
first factor runs at half the rate of one without.

Shape letters: B batch, H heads, N tokens, E width of one head, T tokens of all images, I and O widths of a layer's
input and output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LinearName = Literal["torch", "products"]


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
            # The compiler has no such operator as below, and adds the bias in the operation that reads the result next.
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


# False in builds of torch without oneDNN and on processors without AVX-512, for which oneDNN has no bfloat16: there its
# operator raises, whereas `F.linear` has another implementation.
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


LINEAR: dict[LinearName, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": F.linear,
    "products": products_linear,
}
assert set(LINEAR) == set(get_args(LinearName))


def linear_layer(in_width: int, out_width: int, kernel: LinearName) -> nn.Linear:
    """A linear layer with a bias."""
    return nn.Linear(in_width, out_width) if kernel == "torch" else ProductsLinear(in_width, out_width)
