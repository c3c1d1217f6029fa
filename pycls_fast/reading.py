"""Reading what anybody may have written: only ordinary files of a sane size, as plain data, with the expected types.

The files of a run may be a stranger's, or damaged. Nothing in them is resolved, imported or followed; whatever is wrong
is an `OSError` or a `ValueError` of one line.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import yaml
from pydantic import (
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

TEXT_BYTES = 1 << 28
"""The largest file of JSON, and the longest header of weights."""
CONFIG_BYTES = 1 << 20
"""The largest configuration: PyYAML reads 100 kB a second."""
IMAGE_BYTES = 1 << 30
TABLE_BYTES = 1 << 33
"""The largest table, and the largest file of arrays."""
_MOST_UNPACKED = 200
"""How far a file may shrink: weights and names hardly do, zeros a thousandfold."""
DEPTH = 50
"""The most containers inside each other: who walks through what was read needs no limit of its own."""


def open_file(file: str | Path, limit: int | None) -> BinaryIO:
    """An ordinary file, open for reading; never waits for a pipe or a device. An `OSError` if it has more than `limit`
    bytes (None for what is read piece by piece) or is no ordinary file, besides the system's reasons."""
    if "\0" in os.fspath(file):
        raise OSError(errno.EINVAL, "has a NUL in its name", repr(file))
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no ordinary file", str(file))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"has {status.st_size:,} bytes, more than {limit:,}", str(file))
    except OSError:
        opened.close()
        raise
    return opened


def read_bytes(file: str | Path, limit: int = TEXT_BYTES) -> bytes:
    """The contents of a file; see `open_file`."""
    with open_file(file, limit) as opened:
        return opened.read(os.fstat(opened.fileno()).st_size)


def read_npz(file: Path) -> dict[str, Any]:
    """The arrays in an `.npz`, by name; raises as `open_file`, and a `ValueError` if it is damaged, something else, or
    would unpack to far more than it is."""
    import numpy as np

    kinds = (AttributeError, KeyError, TypeError, EOFError, SyntaxError, MemoryError, NotImplementedError)
    try:
        with open_file(file, TABLE_BYTES) as opened, np.load(opened, allow_pickle=False) as stored:
            check_unpacked(opened)
            return {name: stored[name] for name in stored.files}
    except (*kinds, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged ({error})") from error


def check_unpacked(archive: BinaryIO) -> None:
    """Raise a `ValueError` for a zip file that would unpack to far more than it is."""
    packed = os.fstat(archive.fileno()).st_size
    with suppress(zipfile.BadZipFile):
        unpacked = sum(part.file_size for part in zipfile.ZipFile(archive).infolist())
        if unpacked > _MOST_UNPACKED * packed:
            raise ValueError(f"it would unpack to {unpacked:,} bytes")


def plain(values: Any, depth: int = DEPTH) -> Any:
    """The values themselves: containers with names that are text, and what JSON has; a `ValueError` if there is
    something else in them, or they are nested too deeply."""
    if isinstance(values, dict | list):
        if depth == 0:
            raise ValueError("it is nested too deeply")
        if isinstance(values, dict) and (odd := [key for key in values if not isinstance(key, str)]):
            raise ValueError(f"the name {odd[0]} is no text; write it in quotes")
        for value in values.values() if isinstance(values, dict) else values:
            plain(value, depth - 1)
    elif not isinstance(values, str | int | float | None):
        raise ValueError(f"{values} is a {type(values).__name__}; write it in quotes")
    return values


def parse_json(text: str | bytes) -> Any:
    """Decoded JSON; a `ValueError` if it is none, or nested too deeply."""
    try:
        return plain(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(file: Path) -> Any:
    """A file's decoded JSON; raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(file))


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines can stand for more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME)")
        return super().compose_node(parent, index)


def read_yaml(file: Path) -> Any:
    """The values in a file of YAML; raises as `read_bytes`, and a `ValueError` if it is no YAML, nested too deeply, or
    has aliases or dates."""
    try:
        return plain(yaml.load(read_bytes(file, CONFIG_BYTES).decode(), _PlainLoader))  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(reason) from error


class Saved(BaseModel):
    """Fields that are read; a file may have more."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


Item = TypeVar("Item")
_Pair = Annotated[list[Item], Field(min_length=2, max_length=2)]
_Colors = Annotated[list[float], Field(min_length=3, max_length=3)]


def _at(section: str, key: str, **default: Any) -> Any:
    """A field that is read from a section of a configuration."""
    return Field(validation_alias=AliasPath(section, key), **default)


class SavedConfiguration(Saved):
    """What is read of a run's configuration before `RunConfig` checks it."""

    config_name: str
    weights: str | None = None
    model: dict[str, Any]
    eval_crop: str = _at("augment", "eval_crop")
    eval_crop_ratio: float = _at("augment", "eval_crop_ratio")
    interpolation: str = _at("augment", "interpolation")
    global_batch_size: PositiveInt | str = _at("data", "global_batch_size")
    image_size: PositiveInt | _Pair[PositiveInt] = _at("data", "image_size")
    root: str | None = _at("data", "root", default=None)
    mean: _Colors = _at("data", "mean")
    std: _Colors = _at("data", "std")
    exif_orientation: bool = _at("data", "exif_orientation")
    transparent: str = _at("data", "transparent")
    label_separator: str | None = _at("data", "label_separator")
    optimizer: str = _at("optim", "name")
    accumulation_steps: PositiveInt | Literal["auto"] = _at("optim", "accumulation_steps")
    precision_name: str = _at("precision", "name")
    loss_name: str = _at("loss", "name")
    tensor_degree: PositiveInt = _at("parallel", "tensor_degree")
    pipeline_degree: PositiveInt = _at("parallel", "pipeline_degree")
    preset: str = _at("speed", "preset")
    decode: str | None = _at("speed", "decode")
    threads: PositiveInt | None = _at("runtime", "threads")


class SavedWeights(Saved):
    """What a checkpoint's `state.json` says of its weights."""

    step: NonNegativeInt
    classes: list[str] = Field(min_length=1)
    config: SavedConfiguration
    train_names: str | None = None


class SavedState(SavedWeights):
    """What it says of the run, which goes on from it; the state of the optimizer and others is read by its owners."""

    train_images: NonNegativeInt
    train_names: str
    order: str
    seconds: NonNegativeFloat
    world_size: PositiveInt
    model: dict[str, Any]
    ema: dict[str, Any] | None
    optimizer: dict[str, Any]
    loss_scaler: dict[str, Any]


class _Record(Saved):
    """What every line of `metrics.jsonl` has."""

    kind: str
    step: NonNegativeInt
    epoch: NonNegativeFloat


class _Train(_Record):
    kind: Literal["train"]
    loss: float | None
    lr: float | None
    images_per_second: NonNegativeFloat
    step_seconds: NonNegativeFloat
    memory_peak_bytes: NonNegativeInt


class _Eval(_Record):
    kind: Literal["eval"]
    split: str
    weights: str
    count: PositiveInt
    loss: float | None
    top1: float | None
    top1_standard_error: float | None = None
    top5: float | None = None
    class_top1: float | None = None
    class_top1_standard_error: float | None = None
    map: float | None = None
    map_standard_error: float | None = None
    f1: float | None = None


class _Event(_Record):
    kind: Literal["event"]
    event: str


class _DamagedImage(_Event):
    event: Literal["damaged image"]
    name: str
    reason: str


class _Resumed(_Event):
    event: Literal["resumed"]
    changed: dict[str, _Pair[Any]]
    asked: str


_RECORDS: Mapping[str, type[_Record]] = {
    "train": _Train, "eval": _Eval, "event": _Event, "damaged image": _DamagedImage, "resumed": _Resumed,
}  # fmt: skip


class SavedProgress(Saved):
    """What is read of the newest checkpoint's `state.json` where runs are listed and compared."""

    seconds: NonNegativeFloat | None = None
    classes: list[str] | None = None


class SavedSummary(Saved):
    """What is read of `summary.json`."""

    steps: NonNegativeInt
    epochs: NonNegativeFloat
    best: dict[str, Any] | None
    final: dict[str, Any] | None
    images_per_second: NonNegativeFloat | None
    wall_seconds: NonNegativeFloat
    step_seconds_p50: NonNegativeFloat | None = None
    memory_peak_bytes: NonNegativeInt | None = None
    parameters: NonNegativeInt | None = None
    forward_flops_per_image: NonNegativeFloat | None = None
    world_size: PositiveInt | None = None
    device: str | None = None


Model = TypeVar("Model", bound=BaseModel)


def check(schema: type[Model], values: Any) -> Model:
    """Decoded values, or bytes of JSON, that have a schema's fields and types; a `ValueError` tells the first that is
    wrong."""
    try:
        return schema.model_validate_json(values) if isinstance(values, bytes) else schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def our_config(texts: Mapping[str, str]) -> dict[str, Any] | None:
    """A run's configuration from the metadata of a file; None if there is none, or another program's under that key."""
    try:
        values = parse_json(texts.get("config", ""))
        check(SavedConfiguration, values)
    except ValueError:
        return None
    # Nothing is imported because a file of weights says so.
    return {key: value for key, value in values.items() if key != "imports"}


def parse_record(line: str) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`; None for half a line, as a kill leaves it, and for one with fields that are wrong."""
    try:
        record = parse_json(line)
        kind = check(_Record, record).kind
        check(_RECORDS.get(str(record.get("event")), _RECORDS.get(kind, _Record)), record)
    except ValueError:
        return None
    return dict(record)


_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Ratio = Annotated[float, Field(ge=0.1, le=10.0)]
_Shape = Annotated[list[PositiveInt], Field(min_length=2, max_length=3)]


class TimmConfig(Saved):
    """What is read of the `config.json` that timm writes beside weights."""

    input_size: _Shape | None = None
    test_input_size: _Shape | None = None
    crop_pct: _Ratio | None = None
    test_crop_pct: _Ratio | None = None
    mean: list[_Share] | None = None
    std: list[_Share] | None = None
    crop_mode: str | None = None
    interpolation: str | None = None
    tag: str | None = None
    num_classes: int | None = None
    label_names: list[str] | dict[str, str] | None = None
    model_args: dict[str, Any] | None = None
