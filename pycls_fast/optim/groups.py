"""Which parameters get weight decay, decided by the type of the module that owns them, never by a part of a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

Group = dict[str, Any]

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_norms: bool = False,
    decay_biases: bool = False,
    decay_embeddings: bool = False,
    embeddings: Sequence[type[nn.Module]] = (),
) -> list[Group]:
    """Optimizer groups `{"name", "params", "weight_decay"}`: "decayed" and "not decayed", empty ones left out.

    Args:
        model: parameters without a gradient are left out.
        weight_decay: of the decayed group.
        decay_norms: decay scales and shifts of normalisations.
        decay_biases: decay biases of other layers.
        decay_embeddings: decay parameters of the `embeddings` modules (class token, positions).
        embeddings: module types that count as embeddings.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for kind, parameter in _kinds(model, tuple(embeddings)):
        wanted = {"norm": decay_norms, "bias": decay_biases, "embedding": decay_embeddings, "weight": True}[kind]
        (decayed if wanted else kept).append(parameter)
    groups: list[Group] = [
        {"name": "decayed", "params": decayed, "weight_decay": weight_decay},
        {"name": "not decayed", "params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _kinds(model: nn.Module, embeddings: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if isinstance(module, _NORMS):
                yield "norm", parameter
            elif isinstance(module, embeddings):
                yield "embedding", parameter
            else:
                yield ("bias" if name == "bias" else "weight"), parameter
