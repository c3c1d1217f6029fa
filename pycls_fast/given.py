"""Objects that a Python program gives to `pycls_fast.train` or `pycls_fast.load`: they live in this process only."""

from __future__ import annotations

from typing import Any

from pycls_fast.errors import UserError

_OBJECTS: dict[str, Any] = {}


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
