"""Which parameters are trained, and in which groups, decided by a parameter's owning module and its place in the
network, never its name. Frozen parts have no gradients and no optimizer state, and their modules evaluate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.network import HEAD, Network, Units, is_inside, named_parts, unknown_part
from pycls_fast.optim.choices import Group as Group
from pycls_fast.optim.choices import Optimizer

BATCH_NORM = nn.modules.batchnorm._NormBase
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BATCH_NORM)


def parameter_groups(network: Network, settings: Optimizer) -> list[Group]:
    """Optimizer groups `{"name", "params", "weight_decay"}`: "decayed" and "not decayed", without empty ones.

    With `layer_decay` they are split by layer, with `lr_scale = layer_decay ** (last layer - layer)`
    (`parameter_layers`). For an optimizer that `needs_units` they are split by `hidden`, true for the matrices inside
    the units and every convolution after the first, except depthwise ones (the parameters that Muon is for; Jordan et
    al. 2024).

    Parameters that do not require a gradient are left out.
    """
    # `resolve_auto` has replaced it.
    assert settings.layer_decay != "auto"
    units = network.layers()
    decays = {
        "norm": settings.decay_norms,
        "bias": settings.decay_biases,
        "embedding": settings.decay_embeddings,
        "weight": True,
    }
    last = _last_layer(units, settings.layer_decay_groups)
    layer_of = {} if settings.layer_decay is None else parameter_layers(network, units, settings.layer_decay_groups)
    inside = {p for _, unit in units for p in unit.parameters()}
    for name, module in network.named_modules() if network.first_conv_name is not None else ():
        if isinstance(module, nn.Conv2d) and name != network.first_conv_name:
            inside.update(module.parameters())
    found: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    for kind, parameter in _trained_parameters(network):
        hidden = settings.needs_units and kind == "weight" and _is_matrix(parameter) and parameter in inside
        found.setdefault((layer_of.get(parameter, last), hidden, decays[kind]), []).append(parameter)
    groups: list[Group] = []
    # By layer, and in each layer hidden and decayed parameters first.
    for layer, hidden, decayed in sorted(found, key=lambda key: (key[0], not key[1], not key[2])):
        name = "decayed" if decayed else "not decayed"
        group: Group = {
            "params": found[layer, hidden, decayed],
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        if settings.needs_units:
            group["hidden"] = hidden
            name = f"{'hidden' if hidden else 'other'}, {name}"
        if settings.layer_decay is not None:
            group["lr_scale"] = settings.layer_decay ** (last - layer)
            name = f"layer {layer}, {name}"
        groups.append({"name": name, **group})
    return groups


def by_name(model: nn.Module, groups: Sequence[Group]) -> list[Group]:
    """The groups with names in place of their parameters."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [{**group, "params": [name_of[parameter] for parameter in group["params"]]} for group in groups]


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is one matrix, or a convolution, which flattens to one.

    Depthwise convolutions (C, 1, k, k) mix no channels, and an expert layer (X, out, in) has several matrices.
    """
    return parameter.ndim in (2, 4) and min(parameter.shape[:2]) > 1


def parameter_layers(model: nn.Module, units: Units, groups: int | None = None) -> dict[nn.Parameter, int]:
    """Each parameter's layer, as BEiT and MAE count (Bao et al. 2022; He et al. 2022, `lr_decay.py` of its code).

    Everything before the first unit (stem, class token, positions) is layer 0, unit i is layer i + 1, everything after
    the last unit (final norm, head) is the last layer, `len(units) + 1`; anything between two units (such as
    downsampling) belongs to the layer of the unit after it. "Before" refers to the order of the model's modules.

    If there are more units than `groups`, that many groups of consecutive units take the place of the units, as
    ConvNeXt divides its 36 blocks into 12 (Liu et al. 2022, `optim_factory.py` of its code).
    """
    last = _last_layer(units, groups)
    unit_of = {id(p): index for index, (_, unit) in enumerate(units) for p in unit.parameters()}
    found: dict[nn.Parameter, int] = {}
    seen: set[int] = set()
    layer = last
    for parameter in reversed(list(model.parameters())):
        index = unit_of.get(id(parameter))
        if index is not None:
            seen.add(id(parameter))
            layer = 1 + index * (last - 1) // len(units)
        elif len(seen) == len(unit_of):
            layer = 0
        found[parameter] = layer
    return found


def _last_layer(units: Units, groups: int | None) -> int:
    return 1 + (len(units) if groups is None else min(groups, len(units)))


def _trained_parameters(network: Network) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the kind ("norm", "embedding", "bias" or "weight") of each trained parameter, and the parameter, once."""
    embeddings, scales = network.embedding_names(), network.scale_names()
    seen: set[nn.Parameter] = set()
    for owner, module in network.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if f"{owner}.{name}" in embeddings:
                yield "embedding", parameter
            elif isinstance(module, NORMS) or f"{owner}.{name}" in scales:
                yield "norm", parameter
            else:
                yield ("bias" if name == "bias" else "weight"), parameter


def freeze(network: Network, trainable: Sequence[str], *, adapted: bool = False) -> set[str]:
    """Freeze everything that is not named, in place, before the optimizer is made and the network is wrapped.

    Every module whose parameters are all frozen stays in evaluation mode, whatever `train()` says: batch norm uses its
    statistics and does not update them, dropout and drop-path drop nothing.

    Args:
        trainable: "all", "head", and names of modules or parameters, with * for any part of a name. A module stands for
            everything in it.
        adapted: also give gradients to the blocks' matrices and convolutions that are not named, except depthwise ones;
            their names are returned.

    Raises:
        UserError: the network does not have a name, or nothing to adapt.
    """
    if "all" in trainable:
        return set()
    parameters = dict(network.named_parameters())
    kept: set[str] = set()
    for pattern in trainable:
        parts = named_parts(network, pattern, head=network.head_name)
        found = {name for name in parameters if is_inside(name, parts)}
        if not found:
            what = "nothing in this network that can be trained"
            raise unknown_part("optim.trainable", pattern, network, what=what, words=("all", HEAD))
        kept |= found
    units = [name for name, _ in network.units()] if adapted else []
    matrices = {name for name, parameter in parameters.items() if is_inside(name, units) and _is_matrix(parameter)}
    if adapted and not matrices - kept:
        what = "the network's blocks have no matrices besides those of optim.trainable"
        raise UserError(f"optim.lora_rank: {what}; use optim.lora_rank=null")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in kept or name in matrices)
    for module in list(network.modules()):
        inside = list(module.parameters())
        if inside and not any(parameter.requires_grad for parameter in inside):
            _keep_evaluating(module)
    return matrices - kept


def keep_statistics(network: nn.Module) -> None:
    """Make batch norm use its running statistics in training, too, without updating them; its weights are trained."""
    for module in network.modules():
        if isinstance(module, BATCH_NORM):
            _keep_evaluating(module)


def _keep_evaluating(module: nn.Module) -> None:
    module.eval()
    # The network's `train()` calls that of each of its modules. A partial: a copy of the module then returns itself.
    module.train = partial(_ignore_mode, module)  # type: ignore[method-assign]


def _ignore_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
