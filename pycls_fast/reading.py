"""Reading what anybody may have written: only ordinary files of a sane size, as plain data, with the expected types.

The files of a run may be a stranger's, or damaged. Nothing in them is resolved, imported or followed; whatever is wrong
is an `OSError` or a `ValueError` of one line.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

TEXT_BYTES = 1 << 28
"""The largest file of JSON, and the longest header of weights."""
CONFIG_BYTES = 1 << 20
"""The largest configuration: PyYAML reads 100 kB a second."""
IMAGE_BYTES = 1 << 30


def read_bytes(file: str | Path, limit: int = TEXT_BYTES) -> bytes:
    """The contents of an ordinary file; never waits for a pipe or a device.

    Raises:
        OSError: it is no ordinary file or has more than `limit` bytes, besides the system's reasons.
    """
    if "\0" in os.fspath(file):
        raise OSError(errno.EINVAL, "has a NUL in its name", repr(file))
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no ordinary file", str(file))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"has {status.st_size:,} bytes, more than {limit:,}", str(file))
        return opened.read(status.st_size)


def parse_json(text: str | bytes) -> Any:
    """Decoded JSON.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(file: Path, limit: int = TEXT_BYTES) -> Any:
    """A file's decoded JSON.

    Raises:
        OSError: see `read_bytes`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(file, limit))


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines can stand for more than fits into memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*NAME)")
        return super().compose_node(parent, index)


def read_yaml(file: Path) -> Any:
    """The values in a file of YAML.

    Raises:
        OSError: see `read_bytes`.
        ValueError: it is no YAML, nested too deeply, or has aliases.
    """
    try:
        return yaml.load(read_bytes(file, CONFIG_BYTES).decode(), _PlainLoader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(reason) from error


def interpolation(values: Any, key: str = "") -> str | None:
    """The first key whose name or value OmegaConf would resolve (`${oc.env:TOKEN}`); None if there is none."""
    if isinstance(values, str):
        return key if "${" in values else None
    if isinstance(values, Mapping):
        items = [(f"{key}.{name}".strip("."), name, value) for name, value in values.items()]
        return next((at for at, name, value in items if interpolation(str(name), at) or interpolation(value, at)), None)
    parts = values if isinstance(values, list | tuple) else ()
    return next((found for part in parts if (found := interpolation(part, key))), None)


class _Saved(BaseModel):
    """Fields that are read; a file may have more."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Batches(_Saved):
    global_batch_size: PositiveInt | str
    image_size: PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class _Named(_Saved):
    name: str


class _Accumulation(_Named):
    accumulation_steps: PositiveInt | Literal["auto"]


class _Threads(_Saved):
    threads: PositiveInt | None


class _Switches(_Saved):
    preset: str


class SavedConfiguration(_Saved):
    """What is read of a run's configuration before `RunConfig` checks it."""

    config_name: str
    weights: str | None
    model: dict[str, Any]
    augment: dict[str, Any]
    data: _Batches
    optim: _Accumulation
    precision: _Named
    loss: _Named
    speed: _Switches
    runtime: _Threads


class SavedWeights(_Saved):
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


class _Record(_Saved):
    """What every line of `metrics.jsonl` has."""

    kind: str
    step: NonNegativeInt
    epoch: NonNegativeFloat


class _Train(_Record):
    kind: Literal["train"]
    loss: float | None
    images_per_second: float | None


class _Eval(_Record):
    kind: Literal["eval"]
    split: str
    weights: str
    count: PositiveInt
    loss: float | None
    top1: float | None
    class_top1: float | None = None
    class_top1_standard_error: float | None = None
    map: float | None = None
    map_standard_error: float | None = None


class _Event(_Record):
    kind: Literal["event"]
    event: str


class _DamagedImage(_Event):
    event: Literal["damaged image"]
    name: str
    reason: str


_RECORDS: Mapping[Any, type[_Record]] = {"train": _Train, "eval": _Eval, "event": _Event}


Model = TypeVar("Model", bound=BaseModel)


def check(schema: type[Model], values: Any) -> Model:
    """Decoded values, or bytes of JSON, that have a schema's fields and types.

    Raises:
        ValueError: the first that is wrong.
    """
    try:
        return schema.model_validate_json(values) if isinstance(values, bytes) else schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def parse_record(line: str) -> dict[str, Any] | None:
    """A line of `metrics.jsonl`; None for half a line, as a kill leaves it, and for one with fields that are wrong."""
    try:
        record = parse_json(line)
        kind = record.get("kind") if isinstance(record, dict) else None
        is_damage = kind == "event" and record.get("event") == "damaged image"
        check(_DamagedImage if is_damage else _RECORDS.get(kind, _Record) if isinstance(kind, str) else _Record, record)
    except ValueError:
        return None
    return dict(record)


def cell(value: Any) -> Any:
    """A value for a CSV file: a text that a spreadsheet would compute as a formula begins with an apostrophe."""
    if not isinstance(value, str) or not value.lstrip().startswith(("=", "+", "-", "@")):
        return value
    try:
        float(value)
    except ValueError:
        return value if value == "-" else f"'{value}"
    return value
