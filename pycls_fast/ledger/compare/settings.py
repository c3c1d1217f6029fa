"""Differences between the settings and the environments of two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.config.keys import flat
from pycls_fast.speed import CATALOGUE

Record = dict[str, Any]

OF_THE_PLACE = {"run_dir", "resume"}
"""Keys that say where a run is and how it started, not what it computes."""
# Other tables show the command, ranks and device; the memory size differs by a page from boot to boot.
_NOT_TOLD = {"command", "world_size", "device", "memory_bytes"}
NOT_SET = "-"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Record]:
    """Keys whose values differ, as `{key, a, b, class}`, in the order of the file.

    The `class` of a switch is that of its card ("identical", "rounding", "training"); it is None for other keys. The
    value of a key that a run lacks is "-".

    Args:
        a, b: the values in the runs' `config.yaml`, which has the switches as resolved, whether set by hand or by a
            preset.
    """
    first, second = texts(a), texts(b)
    cards = {f"speed.{switch.name}": switch.numerics for switch in CATALOGUE}
    return [
        {"key": key, "a": first.get(key, NOT_SET), "b": second.get(key, NOT_SET), "class": cards.get(key)}
        for key in dict.fromkeys((*first, *second))
        if key not in OF_THE_PLACE and first.get(key, NOT_SET) != second.get(key, NOT_SET)
    ]


def environment_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Record]:
    """Differing versions, commit and machine, as `{key, a, b}`; empty if either is empty, which means unknown."""
    if not a or not b:
        return []
    first, second = texts(a), texts(b)
    return [
        {"key": key, "a": first.get(key, NOT_SET), "b": second.get(key, NOT_SET)}
        for key in dict.fromkeys((*first, *second))
        if key not in _NOT_TOLD and first.get(key, NOT_SET) != second.get(key, NOT_SET)
    ]


def changes(records: Sequence[Record]) -> list[Record]:
    """The settings that were changed when a run was resumed, as `{step, epoch, changed}`, without undone steps."""
    found: list[Record] = []
    for record in records:
        if record.get("event") == "resumed":
            # Steps after a checkpoint are trained again.
            found = [earlier for earlier in found if earlier["step"] < record["step"]]
            if record["changed"]:
                found.append({key: record[key] for key in ("step", "epoch", "changed")})
    return found


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested values as text by their dotted keys (`optim.lr`), in order; values other than strings as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}
