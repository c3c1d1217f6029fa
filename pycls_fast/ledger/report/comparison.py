"""A comparison of two runs in words, tables and charts: on the terminal and on its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pycls_fast.config.keys import as_typed
from pycls_fast.ledger.report.page import INK, PALE, Chart, plain_axes
from pycls_fast.ledger.runs import shortened
from pycls_fast.train.display import SCORES, duration, epochs, human, plain_table, wide_console
from pycls_fast.train.pictures import render

Record = Mapping[str, Any]
Row = dict[str, str]

# The number of loader workers follows the cores, even if the numbers of threads are equal.
_MACHINE = {"processor", "cpu_count", "threads"}
# At most so many points per loss curve: more could not be seen.
_MOST_POINTS = 400


def curve(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Epochs and losses of training's metrics lines for a chart: at most 400 points, those with a finite loss."""
    known = [record for record in records if record["loss"] is not None]
    every = -(-len(known) // _MOST_POINTS) or 1
    return {key: [each[key] for each in known[::every]] for key in ("epoch", "loss")}


def verdict(record: Record) -> str:
    if record["not_paired"] is not None:
        return f"Not compared image by image: {record['not_paired']}. The numbers below are each over its own images."
    pair = record["images"]["pair"]
    if not pair["changed"]:
        return f"Every prediction is the same on all {pair['images']:,} images."
    winner = "B" if pair["difference"] > 0 else "A"
    no = f"No difference that {pair['images']:,} images can show"
    result = no if pair["p_value"] >= 0.05 else f"{winner} is right more often on these {pair['images']:,} images"
    return (
        f"{result}: {pair['difference']:+.2f} points of top-1, B minus A (95% over the images: {pair['low']:+.2f} to "
        f"{pair['high']:+.2f}; McNemar p = {pair['p_value']:.2g}). This holds for these two runs, not for other seeds."
    )


def notes(record: Record) -> list[str]:
    a, b, found = record["a"], record["b"], record["images"]
    lines = [f"{name} is not finished." for name, run in (("A", a), ("B", b)) if not run["finished"]]
    for name in ("a", "b"):
        for change in record[name]["changes"]:
            pairs = (f"{key} {as_typed(old)} -> {as_typed(new)}" for key, (old, new) in change["changed"].items())
            lines.append(f"{name.upper()} changed after epoch {epochs(change['epoch'])}: {', '.join(pairs)}")
    places = [(run["device"], run["world_size"]) for run in (a, b)]
    elsewhere = None not in (a["device"], b["device"]) and places[0] != places[1]
    if elsewhere or _MACHINE & {row["key"] for row in record["environment"]}:
        lines.append("The runs had different devices, ranks, machines or threads: their speeds are not comparable.")
    if found is None:
        return lines
    if found["left_out"]:
        lines.append(f"{found['left_out']:,} images that only one of the two could read are left out.")
    if record["without_pictures"]:
        lines.append(f"No pictures: {record['without_pictures']}.")
    if found["pair"]["changed"]:
        pair = found["pair"]
        lines.append(
            f"only A right: {pair['only_first']:,}; only B right: {pair['only_second']:,}; both wrong: "
            f"{found['both_wrong']:,}, of which {found['both_wrong_otherwise']:,} with different predictions"
        )
    return lines


# What a row of numbers is called, its key, its text, and how B is compared with A.
_NUMBERS: Sequence[tuple[str, str, Callable[[float], str], str]] = (
    *((f"{name}, %", key, "{:.2f}".format, "+.2f") for key, name in SCORES.items()),
    ("loss", "loss", "{:.4f}".format, "+.4f"),
    ("best top-1, %", "best_top1", "{:.2f}".format, "+.2f"),
    ("images evaluated", "count", "{:,}".format, ""),
    ("epochs", "epoch", "{:.1f}".format, ""),
    ("images/s", "images_per_second", "{:,.0f}".format, "ratio"),
    ("ms a step", "step_seconds_p50", lambda value: f"{1e3 * value:.1f}", "ratio"),
    ("peak memory", "memory_peak_bytes", lambda value: human(value, "B"), "ratio"),
    ("total time", "wall_seconds", duration, "ratio"),
    ("parameters", "parameters", human, "ratio"),
    ("forward pass", "forward_flops_per_image", lambda value: human(value, "FLOP"), "ratio"),
    ("ranks", "world_size", "{}".format, ""),
)


def numbers(record: Record) -> list[Row]:
    """Rows (number, A, B, B compared with A) of what at least one of the runs has."""
    a, b = record["a"], record["b"]
    rows = []
    for what, key, text, against in _NUMBERS:
        one, two = a[key], b[key]
        compared = ""
        if None not in (one, two) and against:
            compared = f"{two - one:{against}}" if against != "ratio" else f"{two / one:.2f}x" if one else ""
        if {one, two} != {None}:
            cells = {name: "-" if value is None else text(value) for name, value in (("A", one), ("B", two))}
            rows.append({"number": what, **cells, "B to A": compared})
    if a["device"] != b["device"]:
        rows.append({"number": "device", "A": a["device"] or "-", "B": b["device"] or "-", "B to A": ""})
    return rows


def _rows(found: Sequence[Record]) -> list[Row]:
    """Differing settings as table rows; long fractions are shortened if they still differ then."""
    rows = []
    for row in found:
        whole, short = ({name.upper(): text(row[name]) for name in "ab"} for text in (str, shortened))
        numerics = {"numerics": row["class"] or ""} if "class" in row else {}
        rows.append({"setting": row["key"]} | (whole if short["A"] == short["B"] else short) | numerics)
    return rows


def _class_rows(record: Record) -> list[Row]:
    found = record["images"]["classes"] if record["images"] is not None else []
    return [
        {
            "class": row["class"],
            "images": f"{row['images']:,}",
            "A, %": f"{row['a']:.1f}",
            "B, %": f"{row['b']:.1f}",
            "points": f"{row['difference']:+.1f}",
        }
        for row in found
    ]


def print_comparison(record: Record) -> None:
    console = wide_console()
    for name in ("a", "b"):
        console.tell(f"{name.upper()}: {record[name]['path']} ({record[name]['config_name']})")
    if not record["settings"]:
        console.print("Their settings are the same.")
    for rows in (_rows(record["settings"]), _rows(record["environment"]), numbers(record)):
        if rows:
            console.print()
            console.print(plain_table(rows))
    console.print()
    for line in (verdict(record), *notes(record)):
        console.tell(line)
    classes = [row for row in _class_rows(record) if float(row["points"])][:10]
    if classes:
        console.print()
        console.print(plain_table(classes))


def comparison_page(record: Record, pictures: Mapping[int, str]) -> str:
    """The page; of images without an address of a picture it shows the name."""
    return render(
        "ledger/report/comparison.html.j2",
        record=record,
        title=f"{record['a']['path']} and {record['b']['path']}",
        lead=verdict(record),
        facts=[
            time.strftime("%Y-%m-%d", time.gmtime(record["time"])),
            *notes(record),
            ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        ],
        charts=charts(record),
        numbers=numbers(record),
        settings=_rows(record["settings"]),
        environment=_rows(record["environment"]),
        pictures=pictures,
        classes=_class_rows(record),
    )


# A thick pale line and a thin dark one stay distinguishable where they overlap.
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "a": {"color": PALE, "linewidth": 4.5, "marker": "s"},
    "b": {"color": INK, "linewidth": 1.3, "marker": "o"},
}


def charts(record: Record) -> list[Chart]:
    made = (
        _lines(record, "loss", "loss, nats", "Training loss (thick and thin lines) and that of evaluations (dashed)."),
        _lines(record, "top1", "top-1, %", "Top-1 of the evaluated weights."),
    )
    return [chart for chart in made if chart is not None]


def _lines(record: Record, key: str, label: str, what: str) -> Chart | None:
    figure, axes = plain_axes(3.6)
    for name in ("a", "b"):
        run, looks = record[name], _LOOKS[name]
        if key == "loss" and run["curve"]["epoch"]:
            axes.plot(run["curve"]["epoch"], run["curve"]["loss"], label=f"{name.upper()}, training",
                      color=looks["color"], linewidth=looks["linewidth"])  # fmt: skip
        scored = [(each["epoch"], each[key]) for each in run["evaluations"] if each[key] is not None]
        if scored:
            style = {"linestyle": "--", "linewidth": 0.9, "color": INK} if key == "loss" else {}
            axes.plot(*zip(*scored, strict=True), label=name.upper(), markersize=5, **{**looks, **style})
    if not axes.lines:
        return None
    axes.set(xlabel="epoch", ylabel=label)
    axes.legend(fontsize=8, frameon=False)
    return Chart(key, label.partition(",")[0].capitalize(), what, figure)
