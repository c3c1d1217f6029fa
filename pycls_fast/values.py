"""Types of single values in the configuration: ranges, `auto`, and what YAML reads as something else."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Wording:
    """The type in words, where the annotation does not say what can be typed."""

    text: str


Probability = Annotated[float, Field(ge=0.0, le=1.0)]
# For pixels in 0..1.
Mean = Annotated[float, Field(ge=0.0, le=1.0)]
Deviation = Annotated[float, Field(gt=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]


def _within_31_bits(value: int) -> int:
    # What is larger is a slip of the finger, which torch answers with an overflow.
    if value >= 2**31:
        raise PydanticCustomError("too_large", "must be less than 2147483648")
    return value


# The upper limit is no part of the field: the help does not repeat it at each key.
PositiveInt = Annotated[int, Field(gt=0), AfterValidator(_within_31_bits)]
NonNegativeInt = Annotated[int, Field(ge=0), AfterValidator(_within_31_bits)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Hue = Annotated[float, Field(ge=0.0, le=0.5)]
Betas = tuple[Rate, Rate]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Not empty: an unset shell variable (`data.root=$DATA`) must not become the current folder.
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class WordOr:
    """A word, in place of which the value has `meaning`, or a number: greater than 0, or 0 as well.

    One line for a bad value; a union of types would give one for each type.
    """

    word: str
    meaning: Any
    number: type[int] | type[float]
    zero: bool = False

    @property
    def text(self) -> str:
        kind = "a whole number" if self.number is int else "a number"
        return f"{self.word}, or {kind} {'of at least' if self.zero else 'greater than'} 0"

    def _read(self, value: Any) -> Any:
        if value == self.word:
            return self.meaning
        is_number = isinstance(value, int | self.number) and not isinstance(value, bool)
        if is_number and (0 < value <= sys.float_info.max or (value == 0 and self.zero)):
            return _within_31_bits(value) if self.number is int else float(value)
        raise PydanticCustomError("word_or_number", f"must be {self.text.replace(',', '')}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        typed = core_schema.plain_serializer_function_ser_schema(lambda x: self.word if x == self.meaning else x)
        return core_schema.no_info_plain_validator_function(self._read, serialization=typed)


AUTO = 0
"""The value that stands for `auto` until the data and the device are known (`plan.resolve_auto`)."""
AUTO_EPOCHS = -1.0
"""The same for a number of epochs that may be 0."""

LossScale = Annotated[Literal["dynamic"] | float, WordOr("dynamic", "dynamic", float)]
# Typed as the number that it becomes in every run.
PositiveIntOrAuto = Annotated[int, WordOr("auto", AUTO, int)]
EpochsOrAuto = Annotated[float, WordOr("auto", AUTO_EPOCHS, float, zero=True)]

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(value: Any) -> Any:
    parts = re.fullmatch(r"(\d+\.?\d*) ?([MGT]i?B)", value) if isinstance(value, str) else None
    count = 0.0 if parts is None else float(parts[1]) * _UNITS[parts[2]]
    if not 1 <= count < 2**63:
        raise PydanticCustomError("bytes", "must be an amount of memory such as 24GB or 22.5GiB")
    return round(count)


class Size(NamedTuple):
    """Height and width of images, in pixels. A configuration has one number if they are equal, else [height,width]."""

    height: int
    width: int

    @classmethod
    def of(cls, size: int | tuple[int, int]) -> Self:
        """That of a square with this side, or of this height and width."""
        return cls(size, size) if isinstance(size, int) else cls(*size)

    @property
    def typed(self) -> int | list[int]:
        """How a configuration writes it."""
        return self.height if self.height == self.width else list(self)

    def __str__(self) -> str:
        return str(self.height) if self.height == self.width else f"{self.height} x {self.width}"

    @classmethod
    def _read(cls, value: Any) -> Size:
        sides = list(value) if isinstance(value, list | tuple) else [value] * 2
        if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
            return cls(*map(_within_31_bits, sides))
        raise PydanticCustomError("size", f"must be {_SIZE}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        typed = core_schema.plain_serializer_function_ser_schema(lambda size: cls.of(size).typed)
        return core_schema.no_info_plain_validator_function(cls._read, serialization=typed)


_SIZE = "a whole number greater than 0, or [height,width]"
ImageSize = Annotated[Size, Wording(_SIZE)]

Bytes = Annotated[
    int,
    PlainValidator(_bytes),
    PlainSerializer(lambda value: f"{value / 1e9:.15g}GB"),
    Wording("an amount of memory such as 24GB or 22.5GiB"),
]


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str | dict):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Several = BeforeValidator(_as_tuple)
ModuleNames = Annotated[tuple[Text, ...], Several]


# YAML reads a bare `off` as false, and `on` as true.
Off = BeforeValidator(lambda value: "off" if value is False else value)
OffOn = BeforeValidator(lambda value: ("on" if value else "off") if isinstance(value, bool) else value)
