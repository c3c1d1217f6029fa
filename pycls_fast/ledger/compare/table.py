"""A comparison as sentences and table rows, for the terminal and the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pycls_fast.config.quoting import as_typed
from pycls_fast.ledger.table import duration
from pycls_fast.train.display import epochs, human, plain_table, wide_console

Record = Mapping[str, Any]

_CLASSES = 10
# The number of loader workers follows the cores, even if the numbers of threads are equal.
_MACHINE = {"processor", "cpu_count", "threads"}


def verdict(record: Record) -> str:
    """The result of the comparison image by image, in one or two sentences."""
    if record["not_paired"] is not None:
        return f"Not compared image by image: {record['not_paired']}. The numbers below are each over its own images."
    pair = record["images"]["pair"]
    if not pair["changed"]:
        return f"Every prediction is the same on all {pair['images']:,} images."
    numbers = (
        f"{pair['difference']:+.2f} points of top-1, B minus A (95% over the images: {pair['low']:+.2f} to "
        f"{pair['high']:+.2f}; McNemar p = {pair['p_value']:.2g})"
    )
    if pair["p_value"] >= 0.05:
        said = f"No difference that {pair['images']:,} images can show"
    else:
        said = f"{'B' if pair['difference'] > 0 else 'A'} is right more often on these {pair['images']:,} images"
    return f"{said}: {numbers}. This holds for these two runs only; other seeds would give slightly different scores."


SETTINGS = ("setting", "A", "B", "numerics")
ENVIRONMENT = ("ran with", "A", "B")
NUMBERS = ("", "A", "B", "B to A")
"""Column titles for the rows of `settings`, `environment` and `numbers`."""


def settings(record: Record) -> list[tuple[str, str, str, str]]:
    """Rows (key, A, B, class of a switch's numerics); long fractions are shortened if they still differ then."""
    rows = []
    for row in record["settings"]:
        a, b = (re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6g}", row[name]) for name in ("a", "b"))
        a, b = (row["a"], row["b"]) if a == b else (a, b)
        rows.append((row["key"], a, b, row["class"] or ""))
    return rows


def changes(record: Record) -> list[str]:
    """A line for each time that a run was resumed with changed settings; its table has the latest ones."""
    lines = []
    for name in ("a", "b"):
        for found in record[name]["changes"]:
            pairs = (f"{key} {as_typed(old)} -> {as_typed(new)}" for key, (old, new) in found["changed"].items())
            lines.append(f"{name.upper()} changed after epoch {epochs(found['epoch'])}: {', '.join(pairs)}")
    return lines


def environment(record: Record) -> list[tuple[str, str, str]]:
    """Rows (key, A, B) of versions, commit and machine that differ."""
    return [(row["key"], row["a"], row["b"]) for row in record["environment"]]


def numbers(record: Record) -> list[tuple[str, str, str, str]]:
    """Rows (what, A, B, B compared with A) of numbers that at least one of the runs has."""
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
    add("total time", "wall_seconds", duration, "ratio")
    add("parameters", "parameters", human, "ratio")
    add("forward pass", "forward_flops_per_image", lambda value: human(value, "FLOP"), "ratio")
    add("ranks", "world_size", "{}".format, "")
    if a["device"] != b["device"]:
        rows.append(("device", a["device"] or "-", b["device"] or "-", ""))
    return rows


def notes(record: Record) -> list[str]:
    """Remarks that the numbers need."""
    a, b, found = record["a"], record["b"], record["images"]
    lines = [f"{name} is not finished." for name, run in (("A", a), ("B", b)) if not run["finished"]]
    other = {row["key"] for row in record["environment"]}
    places = [(run["device"], run["world_size"]) for run in (a, b)]
    if None not in (a["device"], b["device"]) and places[0] != places[1]:
        lines.append("The runs had different devices or numbers of ranks: their speeds are not comparable.")
    elif _MACHINE & other:
        lines.append("The runs had different machines or numbers of cores or threads: their speeds are not comparable.")
    if found is not None:
        if found["left_out"]:
            lines.append(f"{found['left_out']:,} images that only one of the two could read are left out.")
        if record["without_pictures"]:
            lines.append(f"No pictures: {record['without_pictures']}.")
    return lines


def print_comparison(record: Record) -> None:
    """Print the comparison on the terminal."""
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
    for line in changes(record):
        console.print(line, markup=False)
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
        f"{found['both_wrong']:,}, of which {found['both_wrong_otherwise']:,} with different predictions"
    )
    changed = [row for row in found["classes"] if row["difference"]][:_CLASSES]
    if changed:
        console.print()
        table(("class", "images", "A, %", "B, %", "points"), [class_row(row) for row in changed])


def nats(loss: float | None) -> str:
    """The cross-entropy of one image in nats, as text."""
    return "-" if loss is None else f"{loss:.2f}"


def class_row(row: Record) -> tuple[str, str, str, str, str]:
    """The row (class, images, A, B, difference) as text."""
    return row["class"], f"{row['images']:,}", f"{row['a']:.1f}", f"{row['b']:.1f}", f"{row['difference']:+.1f}"
