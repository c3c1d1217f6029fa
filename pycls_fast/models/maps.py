"""Attention maps, attention rollout, patch features and Grad-CAM, as tensors on the image's patch grid.

Shape letters as in `layers`; h, w are the grid's rows and columns. Nothing here needs gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.layers import Attention, attention_probabilities
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import Block, VisionTransformer
from pycls_fast.models.wrapped import TimmNetwork


def attention_maps(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """How much each head of the last attention attends to each patch, (B, H, h, w).

    With a class token: its row of the last block's attention, as in DINO (Caron et al. 2021). With mean pooling over
    the patches: the mean of the patches' rows. With attention pooling: its query's row. Attention to class and register
    tokens is left out, so a map sums to at most 1.

    Raises:
        UserError: the model is no `VisionTransformer`.
    """
    vit = _transformer(model, "attention")
    # Each is gigabytes for large images.
    seen: deque[Tensor] = deque(maxlen=1)
    with watched(vit, seen.append):
        vit(images_BCHW)
    # Attention pooling has one query over only the patches.
    return _on_grid(vit, seen[-1][:, :, 0] if vit.classifier == "map" else _readout(vit, seen[-1]))


def attention_rollout(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """How much of each patch reaches the classifier through all blocks, (B, h, w).

    Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020, arXiv 2005.00928, section 3: heads are
    averaged, the residual branch counts as half of each block, and the blocks' matrices are multiplied. Read out as in
    `attention_maps`.

    Raises:
        UserError: the model is no `VisionTransformer`.
    """
    vit = _transformer(model, "rollout")
    flow_BNN = torch.eye(vit.tokens)

    def multiply(probabilities_BHNN: Tensor) -> None:
        nonlocal flow_BNN
        mean_BNN = probabilities_BHNN.mean(dim=1)
        if mean_BNN.shape[1] == mean_BNN.shape[2]:
            mean_BNN.diagonal(dim1=1, dim2=2).add_(1.0)
            flow_BNN = 0.5 * mean_BNN @ flow_BNN.to(mean_BNN)
        else:
            # The query of attention pooling, after the blocks: it has no residual branch.
            flow_BNN = mean_BNN @ flow_BNN[:, vit.extra_tokens :]

    with watched(vit, multiply):
        vit(images_BCHW)
    if vit.classifier == "map":
        return _on_grid(vit, flow_BNN[:, 0, vit.extra_tokens :])
    return _on_grid(vit, _readout(vit, flow_BNN))


def patch_features(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """The last features on the patch grid, (B, h, w, D).

    For a `VisionTransformer` the last block's patch tokens after the final norm, for a `ResNet` the last stage's maps.

    Raises:
        UserError: another model.
    """
    seen: list[Tensor] = []
    if isinstance(model, ResNet):
        with _hooked(model.stages[-1], seen):
            model(images_BCHW)
        # (B, D, h, w) -> (B, h, w, D)
        return seen[0].permute(0, 2, 3, 1)
    vit = _transformer(model, "features", or_resnet=True)
    with _hooked(vit.blocks[-1], seen):
        vit(images_BCHW)
    # (N, B, D) -> (B, N, D)
    features_BND = seen[0].transpose(0, 1) if vit.batch_dim == 1 else seen[0]
    return _on_grid(vit, vit.norm(features_BND[:, vit.extra_tokens : vit.tokens]), token_dim=1)


def class_maps(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Evidence for a class at each place of the last maps of a ResNet or timm's convolutional network, (B, h, w), not
    negative.

    Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391). After a ResNet's last stage come a mean and a linear layer, so
    the gradients are the layer's weights over h * w, and no backward pass is needed (Zhou et al. 2016).

    Raises:
        UserError: another model.
    """
    if isinstance(model, ResNet):
        features_BhwD = patch_features(model, images_BCHW)
        weights_BD = model.head.weight[labels_B].to(features_BhwD.dtype) / features_BhwD[0, ..., 0].numel()
    elif isinstance(model, TimmNetwork) and (maps := model.network.forward_features(images_BCHW)).ndim == 4:
        with torch.enable_grad():
            maps = maps.detach().requires_grad_()
            evidence = model.network.forward_head(maps).gather(1, labels_B[:, None]).sum()
            gradient = torch.autograd.grad(evidence, maps)[0]
        is_last = getattr(model.network, "output_fmt", None) == "NHWC"
        features_BhwD, gradient_BhwD = (
            x.detach() if is_last else x.detach().permute(0, 2, 3, 1) for x in (maps, gradient)
        )
        weights_BD = gradient_BhwD.mean(dim=(1, 2))
    else:
        raise UserError(
            "kind: class is for convolutional networks; a vision transformer of this package has attention and rollout"
        )
    return F.relu(torch.einsum("bhwd,bd->bhw", features_BhwD, weights_BD))


def principal_components(features_BhwD: Tensor) -> Tensor:
    """The features projected on the first three principal components of all images, each scaled to 0..1: (B, h, w, 3).

    They can be shown as red, green and blue (Oquab et al., DINOv2, 2023, arXiv 2304.07193, section 7.5). 0 and 1 are
    the first and last percentiles, beyond which values are clipped. With fewer places than components the others are
    0.5. The sign of a component, which is arbitrary, is chosen to make its largest weight positive.
    """
    flat_PD = features_BhwD.flatten(0, 2).double()
    centred_PD = flat_PD - flat_PD.mean(dim=0)
    directions_CD = torch.linalg.svd(centred_PD, full_matrices=False).Vh[:3]
    largest_C1 = directions_CD.abs().argmax(dim=1, keepdim=True)
    directions_CD = directions_CD * directions_CD.gather(1, largest_C1).sign()
    scores_PC = centred_PD @ directions_CD.T
    low_C, high_C = scores_PC.quantile(0.01, dim=0), scores_PC.quantile(0.99, dim=0)
    # A component without any spread carries no information: grey.
    spread_C = high_C - low_C
    scaled_PC = ((scores_PC - low_C) / spread_C.clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1)
    scaled_PC = torch.where(spread_C > 1e-12, scaled_PC, 0.5)
    return F.pad(scaled_PC, (0, 3 - scaled_PC.shape[1]), value=0.5).unflatten(0, features_BhwD.shape[:3])


@contextmanager
def watched(model: VisionTransformer, visit: Callable[[Tensor], None]) -> Iterator[None]:
    """Compute attention explicitly within the block and pass its probabilities to `visit`, in the order of the blocks.

    They are (B, H, N, N), without padding; a MAP head's come last, (B, H, 1, patches).
    """
    tokens, padded = model.tokens, model.tokens if model.padding else None
    modules: list[tuple[Attention, int | None]] = [
        (block.attention, padded) for block in model.blocks if isinstance(block, Block)
    ]
    if model.pooling is not None:
        modules.append((model.pooling.attention, None))
    kernels = [module.kernel for module, _ in modules]

    def written_out(keys: int | None, queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor) -> Tensor:
        probabilities_BHNN = attention_probabilities(queries_BHNE, keys_BHNE, keys=keys)
        visit(probabilities_BHNN[:, :, :tokens, :tokens])
        return probabilities_BHNN @ values_BHNE

    try:
        for module, keys in modules:
            module.kernel = partial(written_out, keys)
        yield
    finally:
        for (module, _), before in zip(modules, kernels, strict=True):
            module.kernel = before


@contextmanager
def _hooked(module: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, args, output: seen.append(output))
    try:
        yield
    finally:
        handle.remove()


def _transformer(model: nn.Module, kind: str, *, or_resnet: bool = False) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        others = " and ResNets" if or_resnet else ""
        instead = "" if or_resnet else "; a ResNet has features and class"
        raise UserError(f"kind: {kind} is for vision transformers{others} of this package{instead}")
    return model


def _readout(vit: VisionTransformer, matrix: Tensor) -> Tensor:
    """(..., N, N) -> (..., patches): the mean of the rows that the classifier reads."""
    to_patches = matrix[..., vit.extra_tokens :]
    read = (
        slice(vit.extra_tokens, None) if vit.classifier != "token" else slice(1 + (vit.distillation_token is not None))
    )
    return to_patches[..., read, :].mean(dim=-2)


def _on_grid(vit: VisionTransformer, values: Tensor, token_dim: int = -1) -> Tensor:
    return values.unflatten(token_dim, vit.grid)
