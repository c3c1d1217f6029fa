"""Attention, rollout, features and class maps, drawn over the given images."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from pycls_fast.data.batch import Batch
from pycls_fast.errors import DONE, MISTAKE, UserError
from pycls_fast.inference.classifier import Classifier, float32_convolutions, load
from pycls_fast.inference.images import GivenImages
from pycls_fast.inference.predict import collect, percent, report_unreadable
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.layers import attention_probabilities
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import Block, VisionTransformer
from pycls_fast.train.contact_sheet import Cell, write_sheets
from pycls_fast.train.folder import output_file

MOST_IMAGES = 200
"""Images per call: all their maps are in memory at once."""

# A colour map that remains readable in greyscale.
_COLOURS = mpl.colormaps["inferno"]
_BATCH, _OPACITY = 8, 0.7


def draw_maps(
    weights: str,
    images: Sequence[str],
    *,
    kind: str | None,
    output: str | None,
    heads: bool,
    which: str,
    device: str,
) -> int:
    """Write a sheet with one row per image: the crop that the network sees, and its maps; returns the exit status.

    For the arguments see `MapsVerb`.
    """
    source = GivenImages(collect(images))
    if len(source) > MOST_IMAGES:
        raise UserError(f"images: {len(source):,} are more than the {MOST_IMAGES} that are drawn at once; give fewer")
    path = output_file(output or f"{kind or 'maps'}.png")
    # Attention maps are computed explicitly; all other layers may use the fast kernels.
    classifier = load(weights, which=which, device=device)
    kind = kind or ("attention" if isinstance(classifier.network, VisionTransformer) else "class")
    unreadable: list[tuple[str, str]] = []
    batches = classifier.batches(source, batch_size=_BATCH, skip=lambda *one: unreadable.append(one))
    pictures, found = list[Cell](), list[Tensor]()
    for batch in batches:
        titles, values = maps_of(classifier, batch, kind)
        for index, picture_HWC, title in zip(batch.indices_B, batch.images_BHWC.cpu().numpy(), titles, strict=True):
            pictures.append(Cell(Image.fromarray(picture_HWC), title, [source.short_name(int(index))]))
        found.append(values)
    if pictures:
        values = torch.cat(found)
        if kind == "features":
            # Computed over all images together, so that a colour means the same in each.
            values = principal_components(values)
        rows = [[cell, *_drawn(cell.picture, each, kind, heads)] for cell, each in zip(pictures, values, strict=True)]
        columns = len(rows[0])
        cells = [cell for row in rows for cell in row]
        for file in write_sheets(cells, path, columns=columns):
            print(file)
    report_unreadable(unreadable, len(source))
    return DONE if pictures else MISTAKE


@torch.no_grad()
def maps_of(classifier: Classifier, batch: Batch, kind: str) -> tuple[list[str], Tensor]:
    """The predictions of a batch as titles, and its maps (B, ..., h, w) or features (B, h, w, D), float32 on the
    CPU."""
    network, inputs_BCHW = classifier.network, classifier.inputs(batch)
    scores_BK = classifier.scores(batch).double()
    labels_B = scores_BK.argmax(dim=1)
    probabilities_B = classifier.probabilities(scores_BK).amax(dim=1)
    titles = [
        f"{percent(probability)}%  {classifier.class_name(label)}"
        for label, probability in zip(labels_B.tolist(), probabilities_B.tolist(), strict=True)
    ]
    with float32_convolutions():
        of_class = kind == "class"
        values = class_maps(network, inputs_BCHW, labels_B) if of_class else _KINDS[kind](network, inputs_BCHW)
    return titles, values.float().cpu()


def _drawn(picture: Image.Image, value: Tensor, kind: str, heads: bool) -> Iterator[Cell]:
    """The maps of an image over its picture."""
    if kind == "features":
        yield Cell(_overlaid(picture, value.double().numpy()), "features", ["first 3 components"])
        return
    parts = {kind: value}
    if value.ndim == 3:
        each = {f"head {i}": map_hw for i, map_hw in enumerate(value, start=1)} if heads else {}
        parts = {"all heads": value.mean(dim=0), **each}
    for what, map_hw in parts.items():
        largest = float(map_hw.max())
        heat_hwC = _COLOURS(map_hw.numpy() / max(largest, 1e-12))[..., :3]
        yield Cell(_overlaid(picture, heat_hwC), what, [f"largest: {largest:.2g}"])


def _overlaid(picture: Image.Image, colours_hwC: np.ndarray) -> Image.Image:
    """The picture with a grid of RGB values from 0 to 1 over it; in grey, so that all colour comes from the grid."""
    small = Image.fromarray((255 * colours_hwC).round().astype(np.uint8))
    over = small.resize(picture.size, Image.Resampling.BICUBIC)
    return Image.blend(picture.convert("L").convert("RGB"), over, _OPACITY)


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
    with explicit_attention(vit, seen.append):
        vit(images_BCHW)
    # Attention pooling has one query over only the patches.
    last_BHN = seen[-1][:, :, 0] if vit.classifier == "map" else _mean_over_read_tokens(vit, seen[-1])
    return last_BHN.unflatten(-1, vit.grid)


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

    with explicit_attention(vit, multiply):
        vit(images_BCHW)
    pooled = vit.classifier == "map"
    flow_BN = flow_BNN[:, 0, vit.extra_tokens :] if pooled else _mean_over_read_tokens(vit, flow_BNN)
    return flow_BN.unflatten(-1, vit.grid)


def patch_features(model: nn.Module, images_BCHW: Tensor) -> Tensor:
    """The last features on the patch grid, (B, h, w, D).

    For a `VisionTransformer` the last block's patch tokens after the final norm, for a `ResNet` the last stage's maps.

    Raises:
        UserError: another model.
    """
    if isinstance(model, ResNet):
        maps_BDhw = model.stem(images_BCHW)
        for stage in model.stages:
            maps_BDhw = stage(maps_BDhw)
        return maps_BDhw.permute(0, 2, 3, 1)
    vit = _transformer(model, "features", or_resnet=True)
    features_BND = vit.enter(images_BCHW)
    for block in vit.blocks:
        features_BND = block(features_BND)
    # (N, B, D) -> (B, N, D)
    features_BND = features_BND.transpose(0, 1) if vit.batch_dim == 1 else features_BND
    return vit.norm(features_BND[:, vit.extra_tokens : vit.tokens]).unflatten(1, vit.grid)


def class_maps(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Evidence for a class at each place of the last maps of a ResNet or a network of timm's, (B, h, w), not negative.
    Those of a transformer are the patches before its last block: after it, a class token may be all that is read.

    Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391). After a ResNet's last stage come a mean and a linear layer, so
    the gradients are the layer's weights over h * w, and no backward pass is needed (Zhou et al. 2016).

    Raises:
        UserError: another model, or one of timm's without such a grid.
    """
    if isinstance(model, ResNet):
        features_BhwD = patch_features(model, images_BCHW)
        weights_BD = model.head.weight[labels_B].to(features_BhwD.dtype) / features_BhwD[0, ..., 0].numel()
    elif isinstance(model, TimmNetwork) and (found := _last_maps(model, images_BCHW)) is not None:
        maps, logits_BK = found
        with torch.enable_grad():
            gradient = torch.autograd.grad(logits_BK.gather(1, labels_B[:, None]).sum(), maps)[0]
        features_BhwD, gradient_BhwD = (_by_place(model.network, x.detach()) for x in (maps, gradient))
        weights_BD = gradient_BhwD.mean(dim=(1, 2))
    else:
        raise UserError(
            "kind: class is for ResNets, and for timm's networks with maps or a grid of patches; a vision transformer "
            "of this package has all other kinds"
        )
    return F.relu(torch.einsum("bhwd,bd->bhw", features_BhwD, weights_BD))


def _last_maps(model: TimmNetwork, images_BCHW: Tensor) -> tuple[Tensor, Tensor] | None:
    """The last maps, or the tokens before the last block, and logits that depend on them; None without a grid."""
    network, seen = model.network, list[Tensor]()
    maps = network.forward_features(images_BCHW)

    def keep(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(args[0].detach().requires_grad_())
        return (seen[0], *args[1:])

    with torch.enable_grad():
        # CoaT's are a list.
        if isinstance(maps, Tensor) and maps.ndim == 4:
            maps = maps.detach().requires_grad_()
            return maps, network.forward_head(maps)
        if not (hasattr(network, "num_prefix_tokens") and hasattr(getattr(network, "patch_embed", None), "grid_size")):
            return None
        handle = model.layers()[-1][1].register_forward_pre_hook(keep)
        try:
            logits_BK = model(images_BCHW)
        finally:
            handle.remove()
    return seen[0], logits_BK


def _by_place(network: Any, maps: Tensor) -> Tensor:
    """timm's maps, or tokens, of which the patches come last, as (B, h, w, D)."""
    if maps.ndim == 4:
        return maps if getattr(network, "output_fmt", None) == "NHWC" else maps.permute(0, 2, 3, 1)
    height, width = network.patch_embed.grid_size
    return maps[:, -height * width :].unflatten(1, (height, width))


_KINDS = {"attention": attention_maps, "rollout": attention_rollout, "features": patch_features}


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
    scaled_PC = torch.where(spread_C > 1e-12, ((scores_PC - low_C) / spread_C).clamp(0, 1), 0.5)
    return F.pad(scaled_PC, (0, 3 - scaled_PC.shape[1]), value=0.5).unflatten(0, features_BhwD.shape[:3])


@contextmanager
def explicit_attention(model: VisionTransformer, visit: Callable[[Tensor], None]) -> Iterator[None]:
    """Compute attention explicitly in the context, and pass its probabilities to `visit`, block after block.

    They are (B, H, N, N), without padding; a MAP head's come last, (B, H, 1, patches).
    """
    modules = [block.attention for block in model.blocks if isinstance(block, Block)]
    if model.pooling is not None:
        modules.append(model.pooling.attention)
    kernels = [module.kernel for module in modules]

    def written_out(queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor, *, keys: int | None = None) -> Tensor:
        probabilities_BHNN = attention_probabilities(queries_BHNE, keys_BHNE, keys=keys)
        visit(probabilities_BHNN[:, :, : model.tokens, : model.tokens])
        return probabilities_BHNN @ values_BHNE

    try:
        for module in modules:
            module.kernel = written_out
        yield
    finally:
        for module, before in zip(modules, kernels, strict=True):
            module.kernel = before


def _transformer(model: nn.Module, kind: str, *, or_resnet: bool = False) -> VisionTransformer:
    if not isinstance(model, VisionTransformer):
        others = " and ResNets" if or_resnet else ""
        raise UserError(f"kind: {kind} is for vision transformers{others} of this package; kind=class for others")
    return model


def _mean_over_read_tokens(vit: VisionTransformer, matrix: Tensor) -> Tensor:
    """(..., N, N) -> (..., patches): the mean of the rows that the classifier reads."""
    to_patches = matrix[..., vit.extra_tokens :]
    read = (
        slice(vit.extra_tokens, None) if vit.classifier != "token" else slice(1 + (vit.distillation_token is not None))
    )
    return to_patches[..., read, :].mean(dim=-2)
