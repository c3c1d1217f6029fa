"""Conversion tables for checkpoints: entries of their name, our names, and how the tensor differs.

A table works in both directions, so each pair of functions are inverses by construction. Tensors are renamed, reshaped,
split or joined, never computed with; they may share memory with the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycls_fast.errors import UserError

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """One of their tensors and its counterparts in ours."""

    theirs: str
    ours: tuple[str, ...]
    """One name, or several whose tensors, concatenated along dimension 0, are theirs."""
    ones: tuple[int, ...] = ()
    """Dimensions of size 1 that only theirs has."""
    counter: bool = False
    """Whether it is a batch norm's step counter, which old files lack; then it is 0."""


def depth(state: State, prefix: str) -> int:
    """One more than the highest number after the prefix; 0 if no key has the prefix."""
    tails = (name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix))
    return max((int(tail) + 1 for tail in tails if tail.isdigit()), default=0)


def layer(theirs: str, ours: str) -> list[Entry]:
    """A layer with a weight and a bias."""
    return [Entry(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for kind in ("weight", "bias")]


def joined(theirs_prefix: str, attention: str, parts: Sequence[str] = ("query", "key", "value")) -> list[Entry]:
    """A layer whose output is the concatenation of several of ours."""
    return [
        Entry(f"{theirs_prefix}{kind}", tuple(f"{attention}.{part}.{kind}" for part in parts))
        for kind in ("weight", "bias")
    ]


def conv_norm(theirs_conv: str, theirs_norm: str, ours_conv: str, ours_norm: str) -> list[Entry]:
    """A convolution without bias and the batch norm after it."""
    kinds = ("weight", "bias", "running_mean", "running_var")
    return [
        Entry(f"{theirs_conv}.weight", (f"{ours_conv}.weight",)),
        *(Entry(f"{theirs_norm}.{kind}", (f"{ours_norm}.{kind}",)) for kind in kinds),
        Entry(f"{theirs_norm}.num_batches_tracked", (f"{ours_norm}.num_batches_tracked",), counter=True),
    ]


def translate(state: State, table: Sequence[Entry], what: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of `state` that are in the table, in our names, and the names that are not.

    Raises:
        UserError: a tensor whose shape contradicts the table.
    """
    ours: dict[str, Tensor] = {}
    known = set()
    for entry in table:
        known.add(entry.theirs)
        if entry.theirs not in state:
            if entry.counter:
                ours[entry.ours[0]] = torch.tensor(0)
            continue
        tensor = state[entry.theirs]
        wrong = any(dim >= tensor.ndim or tensor.shape[dim] != 1 for dim in entry.ones)
        if wrong or tensor.shape[:1].numel() % len(entry.ours):
            raise UserError(f"weights: {entry.theirs} of shape {tuple(tensor.shape)} is not from a {what}")
        parts = tensor.chunk(len(entry.ours)) if len(entry.ours) > 1 else (tensor,)
        for name, part in zip(entry.ours, parts, strict=True):
            ours[name] = part.reshape([size for dim, size in enumerate(part.shape) if dim not in entry.ones])
    return ours, [name for name in state if name not in known]


def to_theirs(state: State, table: Sequence[Entry], what: str) -> dict[str, Tensor]:
    """All of `state`, ours, in their names.

    Raises:
        ValueError: missing or unexpected tensors.
    """
    names = {name for entry in table for name in entry.ours}
    if names != set(state):
        missing, unexpected = sorted(names - set(state)), sorted(set(state) - names)
        raise ValueError(f"not a {what}: missing {missing}, unexpected {unexpected}")
    return translate_back(state, table)[0]


def translate_back(state: State, table: Sequence[Entry]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of ours that are in the table, in their names, and our names of the rest."""
    theirs: dict[str, Tensor] = {}
    known: set[str] = set()
    for entry in table:
        if any(name not in state for name in entry.ours):
            continue
        known.update(entry.ours)
        parts = [state[name] for name in entry.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        for dim in entry.ones:
            tensor = tensor.unsqueeze(dim)
        theirs[entry.theirs] = tensor
    return theirs, [name for name in state if name not in known]
