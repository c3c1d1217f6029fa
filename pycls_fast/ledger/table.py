"""The ledger as a table: on the terminal and in `ledger.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.ledger.conditions import UNKNOWN_CODE
from pycls_fast.published import IMAGENET_TRAINING_IMAGES
from pycls_fast.train.display import human, plain_table, wide_console


def rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per arm (column -> text), without the columns that are empty for all arms."""
    made = [_row(arm, record["reference"]) for arm in record["arms"]]
    filled = [column for column in made[0] if any(row[column] for row in made)]
    return [{column: row[column] or "-" for column in filled} for row in made]


def _row(arm: Mapping[str, Any], reference: str) -> dict[str, str]:
    timing, training = arm["timing"], arm["training"]
    first = arm["name"] == reference
    row = {"rung": arm["name"] + (f" ({arm['ranks']} ranks)" if arm["ranks"] > 1 else "")}
    row["images/s"] = f"{timing['images_per_second']:,.1f}" if timing else ""
    row["speed-up (95%)"] = "1" if first else _speedup(timing and timing["speedup"])
    row["over the one before"] = "" if first else _speedup(timing and timing["speedup_before"])
    row["ms a step (p90)"] = (
        f"{timing['step_seconds_p50'] * 1e3:.1f} ({timing['step_seconds_p90'] * 1e3:.1f})" if timing else ""
    )
    flops = timing["flops_per_second"] if timing else None
    row["FLOP/s"] = human(flops) if flops is not None else ""
    memory = timing["memory_peak_bytes"] if timing else None
    row["memory"] = human(memory, "B") if memory is not None else ""
    row["ImageNet epoch"] = duration(timing["imagenet_epoch_seconds"]) if timing else ""
    numerics = arm["numerics"] or []
    row["gradient error"] = " / ".join(_error(each["gradient_error"]) for each in numerics)
    row["top-1"] = _mean(training and training["top1"])
    row["against the first"] = "the reference" if first and training else verdict(arm, "against_reference")
    row["against the one before"] = "" if first else verdict(arm, "against_before")
    if arm["status"] != "measured":
        row["against the first"] = state(arm)
    elif training and training["reason"]:
        row["against the first"] = f"training ended early: {training['reason']}"
    return row


def state(arm: Mapping[str, Any]) -> str:
    """Why an arm has no numbers, in a few words; the full reason is in the notes below."""
    if arm["needs"]:
        return f"needs {arm['needs']}"
    return {"cannot run": "cannot run here", "measured": ""}.get(arm["status"], arm["status"])


def verdict(arm: Mapping[str, Any], against: str) -> str:
    """The verdict's text, or "" without one."""
    training = arm["training"]
    found = training.get(against) if training else None
    return found["verdict"]["text"] if found else ""


def duration(seconds: float) -> str:
    """A readable time in seconds, minutes, hours or days."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def of_size(record: Mapping[str, Any]) -> str:
    """The sizes of the images that were timed, in words."""
    sizes = sorted({arm["timing"]["image_size"] for arm in record["arms"] if arm["timing"]})
    own = ", depending on the rung," if len(sizes) > 1 else ""
    return f" of {' or '.join(map(str, sizes))} pixels{own}" if sizes else ""


def repeats(settings: Mapping[str, Any]) -> tuple[str, str]:
    """How many seeds and rounds of timing there were, in words."""
    seeds, rounds = settings["seeds"], settings["rounds"]
    return f"{seeds} seed{'' if seeds == 1 else 's'}", f"{rounds} round{'' if rounds == 1 else 's'} of timing"


def _speedup(values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    low, high = values["low"], values["high"]
    if values["rounds"] == 1:
        return f"{values['ratio']:.2f} (one round)"
    return f"{values['ratio']:.2f}" + (f" ({low:.2f} - {high:.2f})" if low is not None else "")


def _mean(values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    half = f" ± {values['half']:.2f}" if values["half"] is not None else ""
    return f"{values['mean']:.2f}{half}"


def _error(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.1e}"


def several_codes(record: Mapping[str, Any]) -> str | None:
    """A remark on a ledger that was measured with more than one state of the code; else None."""
    # Ledgers of earlier versions do not have it.
    codes = record.get("code", ())
    if len(codes) < 2:
        return None
    with_what = (
        "partly with code that was not recorded" if UNKNOWN_CODE in codes else f"with {len(codes)} states of the code"
    )
    return f"measured {with_what}, which need not be equally fast or accurate"


def time_taken(record: Mapping[str, Any]) -> str | None:
    """The wall time of the whole ledger, in words; None if it is not known."""
    if record.get("wall_seconds") is None:
        return None
    return f"{record['wall_seconds'] / 60:.0f} min with jobs={record['settings']['jobs']}"


def markdown(record: Mapping[str, Any]) -> str:
    """The text of `ledger.md`."""
    table = rows(record)
    columns = list(table[0])
    seeds, rounds = repeats(record["settings"])
    environment, taken, codes = record["environment"], time_taken(record), several_codes(record)
    steps = record["settings"]["numerics_steps"]
    rounding = f"Gradient error: relative, against float64, before training and after {steps} steps. " if steps else ""
    lines = [
        f"# {record['config_name']}: {record['ladder']['description']}",
        "",
        f"Command: `{record['command']}`",
        "",
        f"Machine: {environment['processor']}, {environment['cpu_count']} cores, device {record['device']}; "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        + ".",
        "",
        *([f"Time: {taken}.", ""] if taken else []),
        *([f"Code: {codes}.", ""] if codes else []),
        f"{record['settings']['mode'].replace('_', ' ')}; {seeds}, {rounds}. Speed-ups are over "
        f"'{record['reference']}'. {rounding}ImageNet epoch: {IMAGENET_TRAINING_IMAGES:,} images{of_size(record)} at "
        "this rate.",
        "",
        _line(columns),
        _line(["---"] * len(columns)),
        *(_line([row[column] for column in columns]) for row in table),
        *(["", f"How verdicts are reached: {record['rule']}"] if record["settings"]["seeds"] else []),
    ]
    notes = [f"- {arm['name']}: {arm['note']}" for arm in record["arms"] if arm["note"]]
    missing = [f"- {arm['name']}: {arm['reason']}" for arm in record["arms"] if arm["reason"]]
    failed = [f"- {what}: {reason}" for what, reason in record["unmeasured"].items()]
    for title, items in (("Notes", notes), ("Not measured", failed), ("Not run here", missing)):
        if items:
            lines += ["", f"## {title}", "", *items]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def print_table(record: Mapping[str, Any]) -> None:
    """Print the table on the terminal."""
    made = rows(record)
    numbers = [column for column in made[0] if not column.startswith(("rung", "against"))]
    wide_console().print(plain_table(list(made[0]), [list(row.values()) for row in made], right=numbers))
