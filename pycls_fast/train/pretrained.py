"""Adapt weights of other projects, and of runs with different classes or sizes, to a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pycls_fast.errors import UserError
from pycls_fast.models import TimmNetwork, pretrained
from pycls_fast.network import Network


def fit_weights(
    read: pretrained.ReadWeights,
    network: Network,
    *,
    classes: tuple[str, ...],
    allow: Sequence[str] = (),
    for_training: bool = True,
) -> pretrained.Fitted:
    """Tensors with the network's names and shapes; tensors of different sizes are adapted or left out.

    Args:
        read: the source's contents.
        network: neither its values nor its memory are touched.
        classes: names of the data's classes, in the order of the outputs.
        allow: see `pretrained.fit`.
        for_training: if the file's classes differ, initialise the head newly; otherwise every tensor must be filled.

    Raises:
        UserError: weights that do not fit.
    """
    source = read.source
    place = other_class(read.classes, classes)
    if place is not None and not for_training:
        raise UserError(
            f"weights: {source} was trained on different classes than data.root has: output {place} was "
            f"{_named(read.classes or (), place)} and is {_named(classes, place)}"
        )
    head: str = network.head_name
    if place is not None:
        kept = {name: value for name, value in read.tensors.items() if not name.startswith(f"{head}.")}
        read = replace(read, tensors=kept)
    fitted = pretrained.fit(read, network, allow=allow)
    if place is not None:
        for name in fitted.fresh:
            if name.startswith(f"{head}."):
                fitted.fresh[name] = f"{len(classes)} classes, {len(read.classes or ())} different ones in the file"
    if fitted.fresh and not for_training:
        name, reason = next(iter(fitted.fresh.items()))
        raise UserError(
            f"weights: {source} leaves {len(fitted.fresh)} tensors of the model without values ({name}: {reason}), so "
            "it cannot be scored; train first, or choose the model that it belongs to"
        )
    return fitted


def mismatch_lines(
    error: pretrained.Mismatch, network: Network, about: pretrained.Preprocessing | None, source: str
) -> Sequence[str]:
    """The lines of a mismatch, with timm's model that the weights belong to, if they say it and the network is another.

    Args:
        error: from `fit_weights`.
        network: the one that the weights do not fit.
        about: the weights' description.
        source: where they come from.
    """
    if about is None or not about.weights.startswith("timm:"):
        return error.lines
    name = _without_tag(about.weights.removeprefix("timm:"))
    if not name or (isinstance(network, TimmNetwork) and _without_tag(network.name) == name):
        return error.lines
    use = f"use model=timm model.name={name}"
    if isinstance(error, pretrained.UnknownKind):
        return [f"weights: {source} belongs to timm's {name}; {use}"]
    *lines, last = error.lines
    return [*lines, f"weights: {use}, or {last.removeprefix('weights: ')}"]


def _without_tag(name: str) -> str:
    return name.partition(".")[0]


def other_class(saved: Sequence[str] | None, now: Sequence[str]) -> int | None:
    """The first output whose class differs from when the weights were saved; None if there is none."""
    if saved is None or tuple(saved[: len(now)]) == tuple(now):
        return None
    pairs = enumerate(zip(saved, now, strict=False))
    return next((place for place, (before, after) in pairs if before != after), len(saved))


def _named(classes: Sequence[str], place: int) -> str:
    return classes[place] if place < len(classes) else "none"
