"""A comparison in words and rows: on the terminal and for the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pycls_fast.ledger.table import duration
from pycls_fast.train.display import human, plain_table, wide_console

Record = Mapping[str, Any]

_CLASSES = 10
_MACHINE = {"processor", "threads"}


def verdict(record: Record) -> str:
    """What the images say of the two, in a sentence or two."""
    if record["not_paired"] is not None:
        return f"Not compared image by image: {record['not_paired']}. The numbers below are each of its own images."
    pair = record["images"]["pair"]
    if not pair["changed"]:
        return f"Every prediction is the same on all {pair['images']:,} images."
    numbers = (
        f"{pair['difference']:+.2f} points of top-1, B minus A (95% over the images: {pair['low']:+.2f} to "
        f"{pair['high']:+.2f}; McNemar p = {pair['p_value']:.2g})"
    )
    if pair["p_value"] >= 0.05:
        said = f"No difference that {pair['images']:,} images could show"
    else:
        said = f"{'B' if pair['difference'] > 0 else 'A'} is right more often on these {pair['images']:,} images"
    return f"{said}: {numbers}. It is about these two runs: with other seeds both would score a little differently."


SETTINGS = ("setting", "A", "B", "owes")
ENVIRONMENT = ("ran with", "A", "B")
NUMBERS = ("", "A", "B", "B to A")
"""Heads of the rows that `settings`, `environment` and `numbers` give."""


def settings(record: Record) -> list[tuple[str, str, str, str]]:
    """Rows (key, A, B, what a switch's values owe each other); long fractions are shortened where they still differ."""
    rows = []
    for row in record["settings"]:
        a, b = (re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6g}", row[name]) for name in ("a", "b"))
        a, b = (row["a"], row["b"]) if a == b else (a, b)
        rows.append((row["key"], a, b, row["class"] or ""))
    return rows


def environment(record: Record) -> list[tuple[str, str, str]]:
    """Rows (key, A, B) of versions, commit and machine that differ."""
    return [(row["key"], row["a"], row["b"]) for row in record["environment"]]


def numbers(record: Record) -> list[tuple[str, str, str, str]]:
    """Rows (what, A, B, B against A) of what both runs have a number for."""
    a, b = record["a"], record["b"]
    rows: list[tuple[str, str, str, str]] = []

    def add(what: str, key: str, text: Callable[[float], str], against: str) -> None:
        one, two = a[key], b[key]
        if one is None and two is None:
            return
        compared = ""
        if one is not None and two is not None:
            compared = f"{two - one:+.2f}" if against == "points" else f"{two / one:.2f}x" if against and one else ""
            if against == "loss":
                compared = f"{two - one:+.4f}"
        rows.append((what, "-" if one is None else text(one), "-" if two is None else text(two), compared))

    add("top-1, %", "top1", "{:.2f}".format, "points")
    add("top-5, %", "top5", "{:.2f}".format, "points")
    add("loss", "loss", "{:.4f}".format, "loss")
    add("best top-1, %", "best_top1", "{:.2f}".format, "points")
    add("images evaluated", "count", "{:,}".format, "")
    add("epochs", "epochs", "{:.1f}".format, "")
    add("images/s", "images_per_second", "{:,.0f}".format, "ratio")
    add("ms a step", "step_seconds_p50", lambda value: f"{1e3 * value:.1f}", "ratio")
    add("peak memory", "memory_peak_bytes", lambda value: human(value, "B"), "ratio")
    add("time in all", "wall_seconds", duration, "ratio")
    add("parameters", "parameters", human, "ratio")
    add("forward pass", "forward_flops_per_image", lambda value: human(value, "FLOP"), "ratio")
    add("ranks", "world_size", "{}".format, "")
    if a["device"] != b["device"]:
        rows.append(("device", a["device"] or "-", b["device"] or "-", ""))
    return rows


def notes(record: Record) -> list[str]:
    """What one has to know of the numbers."""
    a, b, found = record["a"], record["b"], record["images"]
    lines = [f"{name} is not finished." for name, run in (("A", a), ("B", b)) if not run["finished"]]
    other = {row["key"] for row in record["environment"]}
    places = [(run["device"], run["world_size"]) for run in (a, b)]
    if None not in (a["device"], b["device"]) and places[0] != places[1]:
        lines.append("The runs were on other devices or numbers of ranks: their speeds are not comparable.")
    elif _MACHINE & other:
        lines.append("The runs were on other machines, or with other threads: their speeds are not comparable.")
    elif "cpu_count" in other:
        # The loader has as many workers, with the same threads as well.
        lines.append(
            "The runs name other numbers of cores (older ones all of the machine's): their speeds are comparable only "
            "if they could use the same ones."
        )
    if found is not None:
        if found["left_out"]:
            lines.append(f"{found['left_out']:,} images that only one of the two could read are left out.")
        if record["without_pictures"]:
            lines.append(f"No pictures: {record['without_pictures']}.")
    return lines


def print_comparison(record: Record) -> None:
    """The whole on the terminal."""
    console = wide_console()

    def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        console.print(plain_table(columns, rows))

    for name in ("a", "b"):
        console.print(f"{name.upper()}: {record[name]['path']} ({record[name]['config_name']})", markup=False)
    console.print()
    if record["settings"]:
        table(SETTINGS, settings(record))
    else:
        console.print("Their settings are the same.")
    if record["environment"]:
        console.print()
        table(ENVIRONMENT, environment(record))
    console.print()
    table(NUMBERS, numbers(record))
    console.print()
    console.print(verdict(record), markup=False)
    for line in notes(record):
        console.print(line, markup=False)
    found = record["images"]
    if found is None or not found["pair"]["changed"]:
        return
    pair = found["pair"]
    console.print(
        f"only A right: {pair['only_first']:,}   only B right: {pair['only_second']:,}   both wrong: "
        f"{found['both_wrong']:,}, of those {found['both_wrong_otherwise']:,} in other ways"
    )
    changed = [row for row in found["classes"] if row["difference"]][:_CLASSES]
    if changed:
        console.print()
        table(("class", "images", "A, %", "B, %", "points"), [class_row(row) for row in changed])


def nats(loss: float | None) -> str:
    """Cross-entropy of one image."""
    return "-" if loss is None else f"{loss:.2f}"


def class_row(row: Record) -> tuple[str, str, str, str, str]:
    """(class, images, A, B, difference)."""
    return row["class"], f"{row['images']:,}", f"{row['a']:.1f}", f"{row['b']:.1f}", f"{row['difference']:+.1f}"
