"""Adapts a vision transformer's learned positions to different tokens, image or patch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pycls_fast.models.vit import VisionTransformer

_NAME = "positions.value"
# In the order of their rows, which precede the patches'.
_TOKENS = {"class_token.value": "class token", "registers.value": "registers"}


def fit_positions(
    tensors: dict[str, Tensor], network: VisionTransformer, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Arrange a file's rows as the network has them; anything but a square grid after the tokens is left as it is.

    Rows of tokens that both have are kept. If the network has positions only for the patches, the tokens' rows are
    added to the tokens themselves, which is equivalent; if the file has none, they are zeros. The patches' rows are
    interpolated, bicubic and antialiased.

    Args:
        tensors: by our names; changed in place.
        network: its values are not read.
        shapes: those of its tensors.

    Returns:
        What was done to which tensor, by name.
    """
    if _NAME not in tensors or _NAME not in shapes:
        return {}
    rows, width = tensors[_NAME], shapes[_NAME][1]
    if rows.ndim != 2 or rows.shape[1] != width:
        return {}
    theirs = {name: tensors[name].numel() // width for name in _TOKENS if name in tensors}
    ours = {name: math.prod(shapes[name]) // width for name in _TOKENS if name in shapes}
    extra = sum(theirs.values())
    # The rows of a small grid may fit both ways, as 9 do for 3 x 3 patches and for 2 x 2 with five tokens; then they
    # are taken to be what the network has.
    fits_both = _is_square(len(rows)) and _is_square(len(rows) - extra)
    placed = extra if not _is_square(len(rows)) or (fits_both and network.position_tokens == "all") else 0
    own = sum(ours.values()) if network.position_tokens == "all" else 0
    wanted = shapes[_NAME][0] - own
    if not _is_square(len(rows) - placed) or not _is_square(wanted):
        return {}
    changed: dict[str, str] = {}
    front, said, start = [], [], 0
    for name, called in _TOKENS.items():
        count = theirs.get(name, 0) if placed else 0
        token_rows = rows[start : start + count]
        start += count
        if network.position_tokens == "all" and name in ours:
            if count == ours[name]:
                front.append(token_rows)
            else:
                front.append(rows.new_zeros(ours[name], width))
                said.append(f"zeros in front for the {called}")
        elif count and name in ours:
            tensors[name] = tensors[name] + token_rows.reshape(tensors[name].shape)
            changed[name] = "its position added"
            said.append(f"the rows of the {called} moved there")
        elif count:
            said.append(f"without the rows of the {called}")
    patches = rows[start:]
    before, side = math.isqrt(len(patches)), math.isqrt(wanted)
    if before != side:
        from timm.layers import resample_abs_pos_embed

        patches = resample_abs_pos_embed(patches[None], [side, side], num_prefix_tokens=0)[0]
        said.append(f"interpolated from {before} x {before} to {side} x {side}")
    if said:
        tensors[_NAME] = torch.cat([*front, patches])
        changed[_NAME] = "; ".join(said)
    return changed


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count
