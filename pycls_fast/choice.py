"""Everything that is chosen by name: a class that is its keys, their help and their checks, and builds what it names.

A family is a class such as `Optimizer`, declared with the key that chooses one of its members. A subclass with a name
is a member, wherever it is defined:

    class Sign(Optimizer, name="sign"):
        momentum: Rate = 0.9
        def build(self, ...): ...

A field of the family's type (`optim: Optimizer`) accepts every member that exists when a configuration is validated.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from pycls_fast.errors import UserError


class Section(BaseModel):
    """The base class of every group of keys; the string after a key is its description in `--help KEY`.

    pydantic does not read those strings when a class is made (`use_attribute_docstrings`): it would parse the file of
    each, and so many take a tenth of a second.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Only the classes that a configuration uses get validators.
        defer_build=True,
    )


FAMILIES: dict[str, type[Choice]] = {}
"""The families by the key that chooses a member."""


class Choice(Section):
    """The base class of families (`class Loss(Choice, key="loss")`), which declare the field that holds the name.

    Attributes:
        key: where a member is chosen in a configuration.
        tag: the field that holds its name.
        default: the member that is meant where no name is given; "" if there must be one.
        member: the name of this member; "" for the family.
    """

    key: ClassVar[str] = ""
    tag: ClassVar[str] = "name"
    default: ClassVar[str] = ""
    member: ClassVar[str] = ""
    _members: ClassVar[dict[str, type[Choice]]] = {}

    def __init_subclass__(
        cls, *, key: str = "", name: str = "", tag: str = "name", default: str = "", **settings: Any
    ) -> None:
        super().__init_subclass__(**settings)
        if key:
            cls.key, cls.tag, cls.default, cls._members = key, tag, default, {}
            FAMILIES[key] = cls
        if name:
            other = cls._members.get(name)
            if other is not None and _place(other) != _place(cls):
                raise TypeError(f"{cls.key}.{cls.tag}: {name} is {_place(other)} and {_place(cls)}; rename one")
            cls.__annotations__ = {**cls.__annotations__, cls.tag: Literal[name]}
            setattr(cls, cls.tag, name)
            cls.member = name
            cls._members[name] = cls

    @classmethod
    def choices(cls) -> Mapping[str, type[Self]]:
        return cast(Mapping[str, type[Self]], cls._members)

    def own(self) -> dict[str, Any]:
        """The keys that the whole family does not have, with their values."""
        shared = {self.tag, *FAMILIES[self.key].model_fields}
        return {key: getattr(self, key) for key in type(self).model_fields if key not in shared}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls is not FAMILIES.get(cls.key):
            return handler(source)
        return core_schema.no_info_plain_validator_function(cls._choose)

    @classmethod
    def _choose(cls, value: Any) -> Any:
        """The member for plain values. It is looked up now, when the user's modules have been imported."""
        if isinstance(value, cls):
            return value
        if not cls._members:
            raise ValueError("there are none to choose from; imports= names a file that has some")
        if isinstance(value, str):
            value = {cls.tag: value}
        if isinstance(value, dict) and cls.default:
            value = {cls.tag: cls.default, **value}
        # As JSON text, in which a list may become a tuple.
        return _adapter(tuple(cls._members.values()), cls.tag).validate_json(json.dumps(value))


@functools.cache
def _adapter(members: tuple[type[Choice], ...], tag: str) -> TypeAdapter[Any]:
    """Made once for the same members: it takes longer than all other validation."""
    several: Any = functools.reduce(operator.or_, members)
    return TypeAdapter(Annotated[several, Field(discriminator=tag)] if len(members) > 1 else several)


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_OBJECTS: dict[str, Any] = {}
"""What Python programs gave to `pycls_fast.train` or `pycls_fast.load`; these live in this process only."""


def give(thing: Any) -> str:
    """Keep an object under the name of its class, which stands for it in a configuration."""
    name = type(thing).__name__
    _OBJECTS[name] = thing
    return name


def given(key: str, name: str, way_out: str) -> Any:
    """The object that a key's value names; a `UserError` if no such object was given in this process."""
    if name not in _OBJECTS:
        raise UserError(f"{key}: {name} is an object of a Python program, not given in this one; {way_out}")
    return _OBJECTS[name]
