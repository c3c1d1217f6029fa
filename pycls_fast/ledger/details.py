"""The results of every seed, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def seed_rows(record: Record) -> list[dict[str, str]]:
    """One row (column -> text) per arm and seed; images are lost and won against the first arm's run of that seed."""
    return [row for arm in record["arms"] if arm["training"] for row in _rows(arm)]


def _rows(arm: Record) -> list[dict[str, str]]:
    compared = arm["training"].get("against_reference")
    pairs = {pair["seed"]: pair for pair in compared["images"]} if compared else {}
    return [_row(arm["name"], run, pairs.get(run["seed"])) for run in arm["training"]["runs"]]


def _row(name: str, run: Record, pair: Record | None) -> dict[str, str]:
    found = pair or {}
    return {
        "rung": name,
        "seed": _text(run["seed"], "d"),
        "top-1": _text(run["top1"], ".2f"),
        "top-5": _text(run["top5"], ".2f"),
        "difference": _text(found.get("difference"), "+.2f"),
        "images lost": _text(found.get("only_first"), "d"),
        "images won": _text(found.get("only_second"), "d"),
        "McNemar p": _text(found.get("p_value"), ".2g"),
    }


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
