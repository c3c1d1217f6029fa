"""The ledger as a table: on the terminal and in `ledger.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.ledger.details import seed_rows
from pycls_fast.ledger.headline import headline, machine, origin, title, unfinished
from pycls_fast.ledger.remarks import has_imagenet_size, remarks
from pycls_fast.train.display import human, plain_table, wide_console


def rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per arm (column -> text), without the columns that are empty for all arms."""
    made = [_row(arm, record) for arm in record["arms"]]
    filled = [column for column in made[0] if any(row[column] for row in made)]
    return [{column: row[column] or "-" for column in filled} for row in made]


def _row(arm: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, str]:
    timing, training = arm["timing"], arm["training"]
    first = arm["name"] == record["reference"]
    row = {"rung": arm["name"] + (f" ({arm['ranks']} ranks)" if arm["ranks"] > 1 else "")}
    row["images/s"] = f"{timing['images_per_second']:,.1f}" if timing else ""
    row["speed-up (95%)"] = "1" if first else _speedup(timing and timing["speedup"])
    row["over the one before"] = "" if first else _speedup(timing and timing["speedup_before"])
    row["ms a step (p90)"] = _steps(timing) if timing else ""
    flops, share = (timing.get(key) if timing else None for key in ("flops_per_second", "share_of_matmul"))
    row["FLOP/s"] = human(flops) if flops is not None else ""
    row["of matmul"] = f"{share:.0%}" if share is not None else ""
    row["memory"] = _memory(timing, record["arms"][0]["timing"], first) if timing else ""
    epoch = timing and has_imagenet_size(record)
    row["ImageNet epoch"] = duration(timing["imagenet_epoch_seconds"]) if epoch else ""
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


def repeats(settings: Mapping[str, Any]) -> tuple[str, str]:
    """How many seeds and rounds of timing there were, in words."""
    seeds, rounds = settings["seeds"], settings["rounds"]
    return f"{seeds} seed{'' if seeds == 1 else 's'}", f"{rounds} round{'' if rounds == 1 else 's'} of timing"


def size_text(count: float) -> str:
    """A number of bytes in MB, from 10 GB on in GB; peaks of memory are not known more precisely."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e10 else f"{count / 1e6:,.0f} MB"


def _steps(timing: Mapping[str, Any]) -> str:
    median, slow = timing["step_seconds_p50"], timing["step_seconds_p90"]
    return "" if median is None else f"{median * 1e3:.1f}" + ("" if slow is None else f" ({slow * 1e3:.1f})")


def _memory(timing: Mapping[str, Any], reference: Mapping[str, Any] | None, first: bool) -> str:
    """Peak memory, and in brackets the difference from the first arm's."""
    peak, least = timing["memory_peak_bytes"], (reference or {}).get("memory_peak_bytes")
    if peak is None:
        return ""
    if first or least is None:
        return size_text(peak)
    sign = "-" if peak < least else "+"
    return f"{size_text(peak)} ({sign}{size_text(abs(peak - least))})"


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
    return f"measured with {len(codes)} states of the code, which need not be equally fast or accurate"


def time_taken(record: Mapping[str, Any]) -> str | None:
    """The wall time of the whole ledger, in words; None if it is not known."""
    if record.get("wall_seconds") is None:
        return None
    jobs = record["settings"]["jobs"]
    return f"{record['wall_seconds'] / 60:.0f} min" + (f" with jobs={jobs}" if jobs is not None else "")


def markdown(record: Mapping[str, Any]) -> str:
    """The text of `ledger.md`."""
    seeds, rounds = repeats(record["settings"])
    taken, codes, partly = time_taken(record), several_codes(record), unfinished(record)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"# {title(record)}",
        "",
        record["ladder"]["description"],
        "",
        *([f"**{partly}**", ""] if partly else []),
        *(f"- {sentence}" for sentence in headline(record)),
        "",
        f"Measured: {origin(record)}.",
        "",
        f"Command: `{record['command'] or 'unknown'}`",
        "",
        f"Machine: {machine(record)}; {versions or 'versions unknown'}.",
        "",
        *([f"Time: {taken}.", ""] if taken else []),
        *([f"Code: {codes}.", ""] if codes else []),
        f"{record['settings']['mode'].replace('_', ' ')}; {seeds}, {rounds}. Speed-ups are over "
        f"'{record['reference']}'.",
        "",
        *_table(rows(record)),
        *(f"\n{remark}" for remark in remarks(record)),
        *([f"\nHow verdicts are reached: {record['rule']}"] if record["settings"]["seeds"] else []),
    ]
    each = seed_rows(record)
    if each:
        lines += [
            "",
            "## Each seed",
            "",
            f"Images lost and won are those against '{record['reference']}'.",
            "",
            *_table(each),
        ]
    notes = [f"- {arm['name']}: {arm['note']}" for arm in record["arms"] if arm["note"]]
    missing = [f"- {arm['name']}: {arm['reason']}" for arm in record["arms"] if arm["reason"]]
    failed = [f"- {what}: {reason}" for what, reason in record["unmeasured"].items()]
    for heading, items in (("Notes", notes), ("Not measured", failed), ("Not run here", missing)):
        if items:
            lines += ["", f"## {heading}", "", *items]
    return "\n".join(lines) + "\n"


def _table(made: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(made[0])
    return [_line(columns), _line(["---"] * len(columns)), *(_line([row[c] for c in columns]) for row in made)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def print_table(record: Mapping[str, Any]) -> None:
    """Print the table on the terminal."""
    made = rows(record)
    numbers = [column for column in made[0] if not column.startswith(("rung", "against"))]
    wide_console().print(plain_table(list(made[0]), [list(row.values()) for row in made], right=numbers))
