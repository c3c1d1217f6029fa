"""A state as tensors by path, `optimizer/blocks.0.mlp.first.weight/exp_avg`, and plain values, which JSON can hold."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pycls_fast.errors import UserError

State = dict[str, Any]
"""A nested dictionary of tensors, DTensors and plain values."""
Tensors = dict[str, Tensor]
"""Tensors by path."""

# Tensor subclasses made of several tensors: torchao's optimizer state. No other class is rebuilt from a file.
_COMPOSITE = {"OptimState8bit": "torchao.optim.subclass_8bit"}


def split(state: State) -> tuple[Tensors, State]:
    """The tensors of a state by their path, and the state without them.

    Raises:
        UserError: a tensor subclass that cannot be saved in shards.
    """
    tensors: Tensors = {}

    def walk(values: Mapping[str, Any], prefix: str) -> State:
        plain: State = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                plain[key] = walk(value, f"{path}/")
            elif not isinstance(value, Tensor):
                plain[key] = value
            elif type(value) in (Tensor, nn.Parameter, DTensor):
                _check_local(path, value)
                tensors[path] = value.detach()
            else:
                inner, plain[key] = _take_apart(path, value)
                tensors.update(inner)
        return plain

    return tensors, walk(state, "")


def join(tensors: Tensors, plain: State) -> State:
    """The inverse of `split` (shares the dictionaries of `plain`)."""
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        place = plain
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = tensor
    return _put_together(plain)


def own_share(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    """What this rank writes: its shards, and its share of the replicated tensors, which are divided among the ranks."""
    if ranks == 1:
        return tensors
    loads = [0] * ranks
    owner: dict[str, int] = {}
    whole = {path: t.nbytes for path, t in tensors.items() if not isinstance(t, DTensor)}
    for path in sorted(whole, key=lambda path: (-whole[path], path)):
        owner[path] = loads.index(min(loads))
        loads[owner[path]] += whole[path]
    return {path: tensor for path, tensor in tensors.items() if owner.get(path, rank) == rank}


def _check_local(path: str, value: Tensor) -> None:
    local = value._local_tensor if isinstance(value, DTensor) else value
    if type(local) not in (Tensor, nn.Parameter):
        raise UserError(
            f"optim.name: the state {path} of type {type(local).__name__} cannot be saved in shards; use optim=adamw, "
            "or parallel=ddp"
        )


def _take_apart(path: str, value: Any) -> tuple[Tensors, State]:
    name = type(value).__name__
    if name not in _COMPOSITE:
        raise UserError(f"optim.name: a state of type {name} cannot be saved ({path}); use optim=adamw")
    parts, context = value.__tensor_flatten__()
    inner = {f"{path}/{part}": getattr(value, part) for part in parts}
    return inner, {"composite": name, "context": _plain(context)}


def _plain(context: Any) -> list[Any]:
    return [str(item) if isinstance(item, torch.dtype) else item for item in context]


def _context(plain: list[Any]) -> list[Any]:
    return [getattr(torch, x.removeprefix("torch.")) if isinstance(x, str) else x for x in plain]


def _put_together(values: State) -> State:
    for key, value in values.items():
        if not isinstance(value, dict):
            continue
        if value.get("composite") in _COMPOSITE:
            kind = getattr(importlib.import_module(_COMPOSITE[value["composite"]]), value["composite"])
            inner = {name: part for name, part in value.items() if isinstance(part, Tensor)}
            values[key] = kind.__tensor_unflatten__(inner, _context(value["context"]))
        else:
            _put_together(value)
    return values


def differing_shapes(there: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]]) -> str | None:
    """How many names are missing or have a different shape on the other side, and the first; None if all match."""
    mine, saved = ({name: tuple(shape) for name, shape in shapes.items()} for shapes in (here, there))
    wrong = sorted(name for name in mine.keys() | saved.keys() if mine.get(name) != saved.get(name))
    if not wrong:
        return None
    first = wrong[0]
    return (
        f"{len(wrong)} tensors differ, the first is {first} with shape {saved.get(first)} there and {mine.get(first)}"
    )
