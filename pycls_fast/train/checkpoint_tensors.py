"""Tensors in and out of a checkpoint's folder, through torch.distributed.checkpoint.

A state is a nested dictionary of tensors, DTensors and plain values (what JSON can hold). Each tensor is stored under
its path, `optimizer/blocks.0.mlp.first.weight/exp_avg`, in its full logical shape: each rank writes a part of them, and
a reader with any number of ranks and any placement reads what it needs.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from pycls_fast.errors import UserError

State = dict[str, Any]
Tensors = dict[str, Tensor]

# Tensor subclasses made of several tensors: torchao's optimizer state. No other class is rebuilt from a file.
_COMPOSITE = {"OptimState8bit": "torchao.optim.subclass_8bit"}


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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


def write(tensors: Tensors, folder: Path, group: ProcessGroup | None) -> None:
    """Write into a folder made by `checkpoint_files.begin` and flush; all ranks of the group call this.

    Raises:
        OSError: or any other error of this or another rank that torch raises.
    """
    _quiet()
    dcp.save(
        tensors,
        # With CUDA, torch would copy ahead (host tensors too), and once per 10 MB wait for all work that training has
        # queued.
        storage_writer=dcp.FileSystemWriter(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=0),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        no_dist=group is None,
    )


def read(into: Tensors, folder: Path) -> None:
    """Fill tensors in place, by path. Each rank reads only the parts that it holds."""
    if not into:
        return
    _quiet()
    dcp.load(
        dict(into),
        storage_reader=_Reader(folder),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def specs(folder: Path) -> dict[str, Spec]:
    """Shapes and dtypes of all tensors by path.

    Raises:
        Exception: of many kinds, if torch did not write `.metadata`.
    """
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return {path: Spec(tuple(entry.size), entry.properties.dtype) for path, entry in _tensor_entries(entries)}


def _tensor_entries(entries: Mapping[str, Any]) -> Iterator[tuple[str, TensorStorageMetadata]]:
    for path, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{path} is not a tensor")
        yield path, entry


def _quiet() -> None:
    # Intended: a file is read without the other ranks. Set at import, before another thread restores filters that it
    # saved, and again before each use, in case they were changed since.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


_quiet()


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


class _Reader(dcp.FileSystemReader):
    """torch's reader, but reading `.metadata` runs no code from it (torch unpickles anything)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        text = (Path(self.path) / ".metadata").read_bytes()
        metadata = _Unpickler(io.BytesIO(text)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("not the description of a distributed checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Properties(TensorProperties):
    """A tensor's properties from any torch version: 2.11 has five, later ones append strides, which no reader needs."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:5])


class _Unpickler(pickle.Unpickler):
    """Allows only the classes of a checkpoint's `.metadata`, whichever versions of torch and Python wrote it."""

    _CLASSES: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size"},
        "pathlib": {"Path", "PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            # Written by Python 3.13; earlier versions have no such module.
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self._CLASSES.get(module, ()):
            if name == "TensorProperties":
                return _Properties
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
