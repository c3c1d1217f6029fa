"""Parameter groups, decided by a parameter's owning module and its place in the model, never by a part of its name.

Decided are: weight decay (by the owner's type), the layer and with it the learning rate's scale, and which matrices
are hidden ones (by the model's units, its convolutions and the one of them that sees the image).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pycls_fast.network import Units

Group = dict[str, Any]

BATCH_NORM = nn.modules.batchnorm._NormBase
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BATCH_NORM)


@dataclass(frozen=True)
class Decay:
    """The weight decay, and the kinds of parameters that it is for besides matrices and convolutions.

    Attributes:
        weight_decay: weight decay of the decayed group.
        norms: decay scales and shifts of normalisations, and layer scales.
        biases: decay biases of other layers.
        embeddings: decay embeddings (class token, positions).
    """

    weight_decay: float
    norms: bool = False
    biases: bool = False
    embeddings: bool = False


@dataclass(frozen=True)
class Kinds:
    """How a model's embeddings and scales are recognised.

    Attributes:
        embeddings: module types that own embeddings.
        embedding_names: names of further embeddings, if tokens and positions are not separate modules.
        scales: module types that count as normalisations, besides `NORMS`.
        scale_names: names of further such parameters, if layer scales are not separate modules.
    """

    embeddings: tuple[type[nn.Module], ...] = ()
    embedding_names: Collection[str] = ()
    scales: tuple[type[nn.Module], ...] = ()
    scale_names: Collection[str] = ()


def parameter_groups(
    model: nn.Module,
    decay: Decay,
    kinds: Kinds = Kinds(),
    *,
    units: Units = (),
    layer_decay: float | None = None,
    layer_decay_groups: int | None = None,
    split_hidden: bool = False,
    first_conv_name: str | None = None,
) -> list[Group]:
    """Optimizer groups `{"name", "params", "weight_decay"}`: "decayed" and "not decayed", empty ones left out.

    Args:
        model: parameters that do not require a gradient are left out.
        decay: what is decayed.
        kinds: which parameters are embeddings and scales.
        units: the model's repeated blocks in forward order (`model.layers()`).
        layer_decay: split the groups by layer and give each `lr_scale = layer_decay ** (last layer - layer)`
            (`layers`); None: no `lr_scale`.
        layer_decay_groups: see `groups` of `layers`.
        split_hidden: split the groups by `hidden`, true for the matrices inside the units and every convolution
            behind the first, but for depthwise ones (the parameters that Muon is for; Jordan et al. 2024).
        first_conv_name: the layer that sees the image (`model.first_conv_name`); None: there is not exactly one, so
            only convolutions inside the units are hidden.
    """
    flags = {"norm": decay.norms, "bias": decay.biases, "embedding": decay.embeddings, "weight": True}
    layer_of = layers(model, units, layer_decay_groups) if layer_decay is not None else {}
    inside = _between_image_and_head(model, units, first_conv_name) if split_hidden else set()
    last = _last_layer(units, layer_decay_groups)
    found: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for kind, parameter in _parameters(model, kinds):
        # Channels of a depthwise convolution (C, 1, k, k) do not meet, so there is no matrix to orthogonalise; the
        # experts' matrices (X, out, in) are several.
        is_matrix = parameter.ndim in (2, 4) and min(parameter.shape[:2]) > 1
        hidden = kind == "weight" and is_matrix and parameter in inside
        key = (layer_of.get(parameter, last), not hidden, not flags[kind])
        found.setdefault(key, []).append(parameter)
    groups: list[Group] = []
    for layer, rest, undecayed in sorted(found):
        name = "not decayed" if undecayed else "decayed"
        group: Group = {
            "params": found[layer, rest, undecayed],
            "weight_decay": 0.0 if undecayed else decay.weight_decay,
        }
        if split_hidden:
            group["hidden"] = not rest
            name = f"{'other' if rest else 'hidden'}, {name}"
        if layer_decay is not None:
            group["lr_scale"] = layer_decay ** (last - layer)
            name = f"layer {layer}, {name}"
        groups.append({"name": name, **group})
    return groups


def _between_image_and_head(model: nn.Module, units: Units, first_conv_name: str | None) -> set[nn.Parameter]:
    inside = {p for _, unit in units for p in unit.parameters()}
    if first_conv_name is None:
        return inside
    convs = (
        module for name, module in model.named_modules() if isinstance(module, nn.Conv2d) and name != first_conv_name
    )
    return inside.union(*(conv.parameters() for conv in convs))


def by_name(model: nn.Module, groups: Sequence[Group]) -> list[Group]:
    """The groups with their parameters replaced by the parameters' names."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [{**group, "params": [name_of[parameter] for parameter in group["params"]]} for group in groups]


def layers(model: nn.Module, units: Units, groups: int | None = None) -> dict[nn.Parameter, int]:
    """Each parameter's layer, as BEiT and MAE count (Bao et al. 2022; He et al. 2022, `lr_decay.py` of its code).

    Everything before the first unit (stem, class token, positions) is layer 0, unit i is layer i + 1, everything after
    the last unit (final norm, head) is the last layer, `len(units) + 1`; anything between two units belongs to the
    layer of the one before it. "Before" refers to the order in which the model holds its modules.

    If there are more units than `groups`, that many groups of consecutive units take the place of the units, as
    ConvNeXt divides its 36 blocks into 12 (Liu et al. 2022, `optim_factory.py` of its code).
    """
    last = _last_layer(units, groups)
    unit_of = {id(p): index for index, (_, unit) in enumerate(units) for p in unit.parameters()}
    found: dict[nn.Parameter, int] = {}
    seen: set[int] = set()
    layer = 0
    for parameter in model.parameters():
        index = unit_of.get(id(parameter))
        if index is not None:
            seen.add(id(parameter))
            layer = 1 + index * (last - 1) // len(units)
        elif len(seen) == len(unit_of):
            layer = last
        found[parameter] = layer
    return found


def _last_layer(units: Units, groups: int | None) -> int:
    return 1 + (len(units) if groups is None else min(groups, len(units)))


def _parameters(model: nn.Module, kinds: Kinds) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each trained parameter once, after its kind: "norm", "embedding", "bias" or "weight"."""
    norms = (*NORMS, *kinds.scales)
    seen: set[nn.Parameter] = set()
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, norms) or f"{owner}.{name}" in kinds.scale_names:
                yield "norm", parameter
            elif isinstance(module, kinds.embeddings) or f"{owner}.{name}" in kinds.embedding_names:
                yield "embedding", parameter
            else:
                yield ("bias" if name == "bias" else "weight"), parameter
