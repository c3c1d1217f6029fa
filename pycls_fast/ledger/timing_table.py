"""The tables that a timing prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.train.display import Display, human, plain_table, wide_console

# Part -> its name in the tables.
_PARTS = {
    "train": "training step",
    "inference": "forward pass",
    "loader": "loader",
    "both": "training + loader",
}

Row = dict[str, str]


def print_record(display: Display, record: Mapping[str, Any]) -> None:
    """Print a timing: a table of the parts or, with several variants, one table of variants per part."""
    variants: Sequence[Mapping[str, Any]] = record.get("variants", [record])
    first = variants[0]
    parts = [part for part in _PARTS if part in first]
    display.table(f"{record['config_name']} on {record['device']}, {record['world_size']} rank(s)", _setup(first))
    if len(variants) == 1:
        _print(display, [{"": _PARTS[part], **_cells(first[part])} for part in parts])
        _print_stages(display, variants)
        return
    for part in parts:
        speedups = {c["variant"]: _speedup(c) for c in record["comparisons"] if c["part"] == part}
        _print(
            display,
            [
                {
                    _PARTS[part]: each["name"],
                    **_cells(each[part]),
                    **speedups.get(each["name"], {"speed-up": "1"}),
                }
                for each in variants
            ],
        )
    _print_stages(display, variants)
    display.note("speed-up: images/s over those of the first line, in pairs of neighbouring turns")


def _print_stages(display: Display, variants: Sequence[Mapping[str, Any]]) -> None:
    """Print images per second of each stage on one core, in pipeline order."""
    if "input_pipeline" not in variants[0]:
        return
    rows: list[Row] = []
    for each in variants:
        found = each["input_pipeline"]
        row = {"input pipeline, images/s": each["name"] if len(variants) > 1 else "on one core"}
        for stage, numbers in found["stages"].items():
            rate = numbers["images_per_second"]
            row[stage] = "-" if rate is None else f"{rate:,.0f} ({numbers['share']:.0%})"
        row["per worker"] = f"{found['images_per_second_per_core']:,.0f}"
        row["all workers, expected"] = f"{found['images_per_second_expected']:,.0f}"
        rows.append({**row, "limit": found["limit"]})
    _print(display, rows)


def _setup(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    matmul = record["matmul"]
    model = f"{record['model']}, {human(record['parameters'])} parameters, {record['num_classes']} classes"
    one = f"{record['image_size']} px, {human(record['forward_flops_per_image'], 'FLOP')} forward"
    if record["train_image_size"] != record["image_size"]:
        trained = human(record["train_forward_flops_per_image"], "FLOP")
        one += f"; in training {record['train_image_size']} px, {trained}"
    batch = f"{record['global_batch_size']}"
    if record["accumulation_steps"] > 1:
        batch += f" in {record['accumulation_steps']} microbatches"
    rows = [
        ("model", model),
        ("one image", one),
        ("data", f"{record['data']}, {record['num_workers']} workers"),
        ("global batch", batch),
        ("precision", record["precision"]),
        ("switches", "  ".join(f"{key}={value}" for key, value in record["switches"].items())),
    ]
    if matmul is not None:
        product = f"{matmul['size']} x {matmul['size']}, {matmul['dtype']}"
        rows.append(("matrix product", f"{human(matmul['flops_per_second'], 'FLOP/s')} ({product})"))
    return rows


def _cells(part: Mapping[str, Any]) -> Row:
    rate = part["images_per_second"]
    p10, p50, p90 = (f"{part[f'step_seconds_{p}'] * 1e3:.2f}" for p in ("p10", "p50", "p90"))
    row = {
        "images/s": f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}",
        "ms a step": p50,
        "p10 - p90": f"{p10} - {p90}",
    }
    if "flops_per_second" in part:
        row["FLOP/s"] = human(part["flops_per_second"])
        row["of matmul"] = f"{part['share_of_matmul']:.1%}"
    if "data_wait_fraction" in part:
        row["data wait"] = f"{part['data_wait_fraction']:.1%}"
    if "first_batch_seconds_p50" in part:
        row["1st batch"] = f"{part['first_batch_seconds_p50']:.2f} s"
    if part["memory_peak_bytes"] is not None:
        row["memory"] = human(part["memory_peak_bytes"], "B")
    return row


def _speedup(comparison: Mapping[str, Any]) -> Row:
    low, high = comparison["speedup_low"], comparison["speedup_high"]
    return {
        "speed-up": f"{comparison['speedup_p50']:.3f}",
        "95% interval": "needs 6 pairs" if low is None else f"{low:.3f} - {high:.3f}",
    }


def _print(display: Display, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[row.get(column, "") for column in columns] for row in rows]
    console = display.console if display.console.is_terminal else wide_console()
    console.print(plain_table(columns, cells, right=columns[1:], no_wrap=True))
