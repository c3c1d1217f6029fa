"""What several checks share."""

from __future__ import annotations

from pycls_fast.config.schema import Section


def default_of(section: Section, key: str) -> object:
    """The default of a section's key."""
    return type(section).model_fields[key].default


def not_divisible(value: int, divisor: int, of: str) -> str:
    """What to say of a value that `of` does not divide, with the nearest ones that it does."""
    below = max(value // divisor, 1) * divisor
    return f"{value} is not divisible by {of}; use {below} or {below + divisor}"
