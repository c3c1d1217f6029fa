"""Adapts weights to a model with different classes, image or patch size, and weights for gray images to RGB."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import UserError, first_few, refuse
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.layers import SinCos2dPositions
from pycls_fast.models.moe import ExpertsMlp
from pycls_fast.models.pretrained.names import OTHER, TIMM_VIT, TRANSFORMERS, VITS, to_timm_vit
from pycls_fast.models.pretrained.read import ReadWeights
from pycls_fast.models.pretrained.traits import check_settings, layers_of, other_model
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network
from pycls_fast.values import Size

Shapes = Mapping[str, tuple[int, ...]]


class Mismatch(UserError):
    """Tensors have other names or shapes than the network's."""


class UnknownKind(Mismatch):
    """No tensor has a name that is known here."""


@dataclass
class Fitted:
    """Tensors for a network, and how they were adapted.

    Attributes:
        tensors: by the network's names; all other tensors of the network keep their values.
        loaded: names of the tensors that are unchanged.
        adapted: names of the other tensors, and how they were adapted.
        fresh: names of the network's tensors that keep their values, and why.
        left_out: names in the file that the network has no place for, and why that is correct.
    """

    source: str
    layout: str
    part: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    adapted: dict[str, str] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, how: str) -> None:
        """Record how a tensor was adapted, after any earlier notes on it."""
        self.adapted[name] = f"{self.adapted[name]}; {how}" if name in self.adapted else how

    @property
    def file(self) -> str:
        """Its name and what is in it; a layout that we do not know is the network's own."""
        known = [what for what in (self.layout, self.part) if what not in ("", OTHER)]
        return f"{self.source} ({', '.join(known)})" if known else self.source

    def table(self) -> list[tuple[str, str]]:
        """Rows (what, which) for the screen: what was loaded, adapted and left fresh."""
        rows = [("file", self.file), ("loaded", f"{len(self.loaded)} tensors")]
        rows += [("adapted", line) for line in _grouped(self.adapted)]
        rows += [("left fresh", line) for line in _grouped(self.fresh)]
        rows += [("not used", line) for line in _grouped(self.left_out)]
        return rows


def _grouped(found: Mapping[str, str]) -> list[str]:
    """One line per reason, with the first three names."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{first_few(names, 3)}: {reason}" for reason, names in by_reason.items()]


def fit(
    read: ReadWeights,
    network: Network,
    *,
    allow: Sequence[str] = (),
    image_size: Size | None = None,
    other_classes: int = 0,
) -> Fitted:
    """Convert weights to the network's names and shapes.

    With a different number of classes the head keeps its initial values; positions are interpolated, patches resampled
    as in timm; a first layer that takes BGR or gray images is converted to RGB. Any other mismatch is an error.

    Args:
        network: its values are neither read nor changed, so it may be on the meta device.
        allow: names in the file or the network, with * as a wildcard, that may be missing, unexpected or differ in
            shape: such tensors of the network keep their values, such tensors of the file are not used.
        image_size: that of the images that the weights are for, if it is known.
        other_classes: number of the weights' classes if they are not the network's, whose head then keeps its values
            even if it has the same shape.

    Raises:
        Mismatch: one line for each kind of mismatch, with the names to allow; `UnknownKind` has only one line.
        UserError: the weights are of another kind of model, or have settings that the network lacks.
    """
    own = {name.removeprefix("network.") for name in network.state_dict()}
    # A user's own model may have such names, too.
    if read.layout == TRANSFORMERS and own.isdisjoint(read.plain):
        raise UserError(
            f"weights: {read.source} is in the form of Hugging Face's transformers; use timm's (timm:NAME, or "
            "hf:timm/NAME)"
        )
    if read.traits.unlike and not isinstance(network, TimmNetwork):
        raise other_model(read.traits.unlike, read.traits, read.source)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    fitted = Fitted(read.source, read.layout, read.part)
    tensors, unknown = _in_names_of(network, read, shapes, fitted, image_size)
    # Such as MAE's decoder.
    unused = [name for name in unknown if name == "mask_token" or name.startswith("decoder_")]
    fitted.left_out |= dict.fromkeys(unused, "no part of a classifier")
    _fit_first_layer(tensors, network, shapes, fitted, bgr=read.traits.bgr)
    head: str = network.head_name
    _fit_head(tensors, shapes, head, fitted, other_classes)
    if isinstance(network, VisionTransformer):
        _fit_norm(tensors, network, read, head, fitted)
        _fit_positions(tensors, network, image_size, shapes, fitted)
        _fit_experts(tensors, network, fitted)
    _resolve(tensors, unknown, shapes, fitted, allow)
    check_settings(network, read.traits, read.source, with_head=f"{head}.weight" in fitted.tensors)
    if isinstance(network, TimmNetwork):
        _check_layers(network, read, fitted)
    return fitted


def _check_layers(network: TimmNetwork, read: ReadWeights, fitted: Fitted) -> None:
    """Refuse weights of another of timm's models with the same names and shapes whose layers compute something else.

    A variant that is not in timm is the user's, as are options of the same model; patches of other sizes are resampled.
    """
    import timm

    name, ours = read.traits.model, layers_of(network.network)
    is_timms = timm.models.model_entrypoint(network.name).__module__.startswith("timm.")
    theirs = read.traits.layers if is_timms and name != network.name.partition(".")[0] else {}
    resampled = {name.removeprefix("network.").removesuffix(".weight") for name in fitted.adapted}
    others = [path for path, layer in theirs.items() if path not in resampled and ours.get(path, layer) != layer]
    refuse(
        f"weights: {read.source} is of a model that computes {path} otherwise than {network.name}, with the same "
        f"tensors; use model=timm model.name={name}"
        for path in others[:1]
    )


def _in_names_of(
    network: nn.Module, read: ReadWeights, shapes: Shapes, fitted: Fitted, size: Size | None
) -> tuple[dict[str, Tensor], list[str]]:
    """The file's tensors by the network's names, and the names of those without a counterpart."""
    if not isinstance(network, TimmNetwork):
        if read.layout == OTHER:
            names = ", ".join(list(read.plain)[:3])
            raise UnknownKind(
                f"weights: {read.source} is of an unknown kind; its first names are {names}; if it is of a "
                "timm model, use model=NAME"
            )
        return dict(read.tensors), list(read.unknown)
    # A run's have the network's own names.
    state: Mapping[str, Tensor] = {name.removeprefix("network."): tensor for name, tensor in read.plain.items()}
    own = {name.removeprefix("network.") for name in shapes}
    rest: dict[str, Tensor] = {}
    unknown: list[str] = []
    if read.layout in VITS and read.layout != TIMM_VIT:
        state, unnamed = to_timm_vit(read.tensors, norm="fc_norm" if "fc_norm.weight" in own else "norm")
        rest = {name: read.tensors[name] for name in unnamed}
        unknown = list(read.unknown)
    state = _positions_for_timm(network, state, size, fitted)
    if own != state.keys() or any(tuple(state[name].shape) != shapes[f"network.{name}"] for name in own):
        before, state = state, _filtered_by_timm(network, state)
        _note_resized(before, state, shapes, fitted)
    return {f"network.{name}": tensor for name, tensor in state.items()} | rest, unknown


def _positions_for_timm(
    network: TimmNetwork, state: Mapping[str, Tensor], size: Size | None, fitted: Fitted
) -> Mapping[str, Tensor]:
    """Interpolate positions that are for images of another `size`, which timm's conversion would take for a square."""
    patches: Any = getattr(network.network, "patch_embed", None)
    grid, side = getattr(patches, "grid_size", None), getattr(patches, "patch_size", None)
    rows = state.get("pos_embed")
    if size is None or size == network.image_size or not grid or not side or rows is None or rows.ndim != 3:
        return state
    before = (size.height // side[0], size.width // side[1])
    prefix = rows.shape[1] - math.prod(before)
    if before == grid or prefix < 0 or prefix + math.prod(grid) != network.network.pos_embed.shape[1]:
        return state
    from timm.layers import resample_abs_pos_embed

    rows = resample_abs_pos_embed(rows, list(grid), list(before), num_prefix_tokens=prefix)
    fitted.note("network.pos_embed", f"interpolated from {before[0]} x {before[1]} to {grid[0]} x {grid[1]}")
    return {**state, "pos_embed": rows}


def _filtered_by_timm(network: TimmNetwork, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Apply timm's own conversion of older files of a model and of positions of a different size."""
    module = importlib.import_module(type(network.network).__module__)
    change = getattr(module, "checkpoint_filter_fn", None) or getattr(module, "_filter_fn", None)
    if change is None:
        return state
    # Some of these functions take only the state.
    takes_model = len(inspect.signature(change).parameters) > 1
    try:
        return dict(change(dict(state), network.network) if takes_model else change(dict(state)))
    except Exception:  # noqa: BLE001  # of any kind: each assumes files of its own model
        # Then the file belongs to a different model, and `_resolve` reports what does not fit.
        return state


def _note_resized(before: Mapping[str, Tensor], after: Mapping[str, Tensor], shapes: Shapes, fitted: Fitted) -> None:
    """Note which tensors timm's conversion has changed to the network's shape, such as positions and patches."""
    for key, tensor in after.items():
        name = f"network.{key}"
        if key in before and before[key].shape != tensor.shape and tuple(tensor.shape) == shapes.get(name):
            fitted.note(name, f"resized by timm from {tuple(before[key].shape)} to {tuple(tensor.shape)}")


def _fit_head(tensors: dict[str, Tensor], shapes: Shapes, head: str, fitted: Fitted, other_classes: int) -> None:
    weight, before = f"{head}.weight", "none in the file"
    if other_classes:
        before = f"{other_classes} different ones in the file"
    elif weight in tensors:
        theirs, ours = tensors[weight].shape, shapes[weight]
        # The same classes on other features mean a different model, not a new task; `_resolve` reports it.
        if tuple(theirs) == ours or (theirs[0] == ours[0] and "pre_logits.weight" not in shapes):
            return
        before = f"{theirs[0]} classes in the file"
    for name in [name for name in (*shapes, *tensors) if name.startswith((f"{head}.", "pre_logits."))]:
        dropped = tensors.pop(name, None)
        if name in shapes:
            fitted.fresh[name] = f"{shapes[weight][0]} classes, {before}"
        elif dropped is not None:
            fitted.left_out[name] = "goes with the head"


def _fit_norm(
    tensors: dict[str, Tensor], network: VisionTransformer, read: ReadWeights, head: str, fitted: Fitted
) -> None:
    """Check the place of the final norm, which has the same name everywhere, but different statistics."""
    here = "before_pool" if network.classifier == "token" else network.classifier_norm
    theirs = read.traits.classifier_norm
    if theirs in (None, here):
        return
    if f"{head}.weight" not in tensors:
        there = "every token" if theirs == "before_pool" else "the pooled features"
        for name in ("norm.weight", "norm.bias"):
            tensors.pop(name, None)
            fitted.fresh[name] = f"the file's is of {there}"
        return
    if theirs == "after_pool":
        wanted = "model.classifier=pooled model.classifier_norm=after_pool"
    else:
        wanted = "model.classifier_norm=before_pool, or model.classifier=token where the file has a class token"
    raise UserError(f"weights: {read.source} has its final norm elsewhere than the model; use {wanted}")


# In the order of their rows of positions, which precede those of the patches.
_TOKENS = ("class_token.value", "distillation_token.value", "registers.value")


def _fit_positions(
    tensors: dict[str, Tensor], network: VisionTransformer, size: Size | None, shapes: Shapes, fitted: Fitted
) -> None:
    """Arrange a file's positions as the network has them. They are left alone unless the rows after those of the tokens
    are a grid in the proportions of the images' `size` (None: a square).

    Rows of tokens that both have are kept; tokens that only the network has get zeros. If the network has positions
    only for the patches, the tokens' rows are added to the tokens themselves, which is equivalent. The patches' rows
    are interpolated, bicubic and antialiased.
    """
    name, own = "positions.value", network.positions
    if name in tensors and isinstance(own, SinCos2dPositions):
        # A file may have 16 bits.
        fixed = own.computed().to(tensors[name])
        if fixed.shape == tensors[name].shape and torch.allclose(tensors[name], fixed, atol=1e-2):
            del tensors[name]
            fitted.left_out[name] = "fixed in the model, too"
    if name not in tensors or name not in shapes or tensors[name].shape[1:] != shapes[name][1:]:
        return
    rows, width = tensors[name], shapes[name][1]
    in_front = network.position_tokens == "all"
    theirs = {token: tensors[token].numel() // width for token in _TOKENS if token in tensors}
    ours = {token: math.prod(shapes[token]) // width for token in _TOKENS if token in shapes}
    # Then they are as the network has them: 4 x 6 patches and a class token have as many rows as 5 x 5 patches.
    if size is None and theirs == ours and len(rows) == shapes[name][0]:
        return
    size = size or Size(1, 1)
    if not _grid(len(rows) - sum(theirs.values()), size):
        # Only patches have positions.
        theirs = {}
    count = len(rows) - sum(theirs.values())
    before = _grid(count, size)
    if before is None:
        return
    *of_tokens, patches = rows.split([*theirs.values(), count])
    found = dict(zip(theirs, of_tokens, strict=True))
    front = []
    if in_front:
        for token, many in ours.items():
            front.append(found[token] if theirs.get(token) == many else rows.new_zeros(many, width))
    else:
        for token in found.keys() & ours.keys():
            tensors[token] = tensors[token] + found[token].reshape(tensors[token].shape)
            fitted.note(token, "its position added")
    said = [] if theirs == (ours if in_front else {}) else ["arranged for the model's tokens"]
    if before != network.grid:
        from timm.layers import resample_abs_pos_embed

        grid = list(network.grid)
        patches = resample_abs_pos_embed(patches[None], grid, list(before), num_prefix_tokens=0)[0]
        said.append(f"interpolated from {before[0]} x {before[1]} to {grid[0]} x {grid[1]}")
    if said:
        tensors[name] = torch.cat([*front, patches])
        fitted.note(name, "; ".join(said))


def _grid(count: int, size: Size) -> tuple[int, int] | None:
    """Rows and columns of `count` patches of an image with these proportions; None if there is no such grid."""
    rows = round(math.sqrt(max(count, 0) * size.height / size.width))
    columns = round(rows * size.width / size.height)
    return (rows, columns) if 0 < rows * columns == count else None


def _fit_first_layer(
    tensors: dict[str, Tensor], network: Network, shapes: Shapes, fitted: Fitted, *, bgr: bool
) -> None:
    """Convert the layer that sees the image: from BGR to RGB, to another size of patches, from gray images to RGB."""
    name = f"{network.first_conv_name}.weight"
    if name not in tensors or name not in shapes or tensors[name].ndim != 4:
        return
    if bgr:
        tensors[name] = tensors[name].flip(1)
        fitted.note(name, "input channels from BGR to RGB")
    before, wanted, channels = tuple(tensors[name].shape[2:]), shapes[name][2:], shapes[name][1]
    if name == "stem.projection.weight" and before != wanted:
        from timm.layers import resample_patch_embed

        tensors[name] = resample_patch_embed(tensors[name], list(wanted))
        fitted.note(name, f"patches resampled from {before[0]} x {before[1]} to {wanted[0]} x {wanted[1]}")
    if tensors[name].shape[1] == 1 < channels:
        # A gray image has equal channels, and keeps its output.
        tensors[name] = tensors[name].expand(-1, channels, -1, -1) / channels
        fitted.note(name, f"1 input channel shared among {channels}")


def _fit_experts(tensors: dict[str, Tensor], network: VisionTransformer, fitted: Fitted) -> None:
    """Let each expert begin as the dense MLP (Komatsuzaki et al., Sparse Upcycling, 2023, arXiv 2212.05055)."""
    for path, module in network.named_modules():
        names = [f"{path}.{name}" for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
        if isinstance(module, ExpertsMlp) and f"{path}.router.weight" not in tensors and names[0] in tensors:
            for name in names:
                tensors[name] = torch.stack([tensors[name]] * module.experts.count)
                fitted.note(name, f"copied to {module.experts.count} experts")
            fitted.fresh[f"{path}.router.weight"] = "the file has no experts"


def _resolve(
    tensors: dict[str, Tensor], unknown: Sequence[str], shapes: Shapes, fitted: Fitted, allow: Sequence[str]
) -> None:
    """Sort the remaining tensors into those that fit, allowed mismatches, and errors."""

    def allowed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)

    missing, reshaped = [], []
    for name, shape in shapes.items():
        if name in fitted.fresh:
            continue
        if name not in tensors:
            if name.endswith("num_batches_tracked"):
                fitted.tensors[name] = torch.tensor(0)
                fitted.adapted[name] = "0, because the file has no step counter"
            elif allowed(name):
                fitted.fresh[name] = "not in the file"
            else:
                missing.append(name)
        elif tuple(tensors[name].shape) != shape:
            if allowed(name):
                fitted.adapted.pop(name, None)
                fitted.fresh[name] = f"shape {tuple(tensors[name].shape)} in the file"
            else:
                reshaped.append(f"{name} {tuple(tensors[name].shape)} for {shape}")
        else:
            fitted.tensors[name] = tensors[name]
            if name not in fitted.adapted:
                fitted.loaded.append(name)
    unexpected = []
    for name in (*(n for n in tensors if n not in shapes), *unknown):
        if allowed(name):
            fitted.left_out.setdefault(name, "allowed")
        elif name not in fitted.left_out:
            unexpected.append(name)
    found = (("missing", missing), ("unexpected", unexpected), ("other shapes", reshaped))
    begin = f"weights: {fitted.file} does not fit the model"
    lines = [f"{begin}: {what}: {first_few(names, 3)}" for what, names in found if names]
    if lines:
        kept = " (model.class_token=true keeps the class token)" if "class_token.value" in unexpected else ""
        raise Mismatch(
            *lines, f"weights: choose the model that they belong to{kept}, or name the tensors to skip in weights_allow"
        )
