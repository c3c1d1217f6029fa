"""Timing one experiment, or several variants of it in turns: build, measure, record, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import DONE, refuse
from pycls_fast.ledger.measure.stages import measure_stages
from pycls_fast.ledger.measure.variant import Session, TimedVariant, TurnLength, speed_comparison
from pycls_fast.ledger.measure.workloads import PartName
from pycls_fast.ledger.report.statistics import Speedup
from pycls_fast.parallel.world import World
from pycls_fast.train.display import Display, human, plain_table, wide_console
from pycls_fast.train.environment import provenance
from pycls_fast.train.folder import new_file, output_file, write_json

Mode = Literal["train", "model", "loader", "both", "all"]

PARTS: Mapping[Mode, tuple[PartName, ...]] = {
    "train": ("train",),
    "model": ("train", "inference"),
    "loader": ("loader",),
    "both": ("both",),
    "all": ("train", "inference", "loader", "both"),
}


def time_variants(
    variants: Sequence[tuple[str, RunConfig]],
    *,
    mode: Mode,
    steps: int,
    warmup_steps: int,
    repeats: int,
    seconds: float = 0.0,
    matmul_size: int | None = None,
    output: str | None = None,
) -> int:
    """Time configurations in turns, print a table, write JSON; returns the exit status.

    `variants` are names and configurations, of which the first is the one compared with; `TimeVerb` in
    `commands/measure.py` describes the rest. A `UserError` if something cannot be built, read, compared or written.
    """
    base = variants[0][1]
    _check_comparable(variants)
    with build.world(base) as world:
        file = output_file(output or new_file(base, "timings"), world)
        display = Display(speaks=world.is_main, mode="plain")
        session, length = Session(PARTS[mode], world, matmul_size), TurnLength(steps, warmup_steps, seconds)
        built = session.variants
        for name, config in variants:
            built.append(TimedVariant(name, config, session))
        for part in PARTS[mode]:
            each = f"{steps} steps each" + (f" or more, for {seconds:g} s" if seconds else "")
            display.note(f"timing {part}: {repeats} turns of {each}; variants: {len(built)}")
            _measure(built, part, repeats, length)
        for variant in built:
            if {"loader", "both"} & set(PARTS[mode]):
                display.note(f"timing the stages of the input pipeline in this process: {variant.name}")
                train, start = variant.sources["train"], session.order.take(repeats + 1)
                variant.stages = measure_stages(
                    variant.config, train, world, variant.switches, start=start, repeats=repeats
                )
            if variant.skipped_steps:
                display.warn(
                    f"{variant.name}: {variant.skipped_steps} steps had gradients that are not finite; "
                    "if loss scaling skips them, they take less time than full steps"
                )
        if not world.is_main:
            return DONE
        record = _record(built, {"mode": mode, "repeats": repeats, **asdict(length)}, world)
        write_json(file, record)
        print_record(display, record)
        display.note(f"written to {file}")
        return DONE


def _check_comparable(variants: Sequence[tuple[str, RunConfig]]) -> None:
    base = variants[0][1]
    problems = []
    for name, config in variants:
        for key in ("runtime", "parallel", "imports"):
            if getattr(config, key) != getattr(base, key):
                problems.append(f"compare: '{name}' changes {key}, which all variants share; time it in a separate run")
    refuse(dict.fromkeys(problems))


def _measure(variants: Sequence[TimedVariant], part: PartName, repeats: int, length: TurnLength) -> None:
    for variant in variants:
        variant.begin(part, length)
    owners = {id(v.matmul): v for v in variants if v.matmul is not None and part != "loader"}
    for repeat in range(repeats):
        for owner in owners.values():
            owner.measure_peak()
        # Alternating order: a steady drift and the position in the round cancel over two rounds.
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            variant.take_turn(part)
    for variant in variants:
        variant.end(part)


def _record(variants: Sequence[TimedVariant], settings: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The record to write: a single variant's values at the top level, several in `variants`."""
    shared: dict[str, Any] = {
        "kind": "timing",
        "config_name": variants[0].config.config_name,
        **settings,
        **provenance(world.device, world.size),
    }
    if len(variants) == 1:
        return {**shared, **variants[0].record()}
    records = [variant.record() for variant in variants]
    comparisons = [
        speed_comparison(part, records[0], other) for part in PARTS[settings["mode"]] for other in records[1:]
    ]
    return {**shared, "variants": records, "comparisons": comparisons}


# Part -> its name in the tables.
_TITLES = {
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
    parts = [part for part in _TITLES if part in first]
    display.table(f"{record['config_name']} on {record['device']}, ranks: {record['world_size']}", _setup(first))
    if len(variants) == 1:
        tables = [[{"": _TITLES[part], **_cells(first[part])} for part in parts]]
    else:
        speedups = {(c["part"], c["variant"]): Speedup(**c["speedup"]) for c in record["comparisons"]}
        tables = [
            [
                {
                    _TITLES[part]: each["name"],
                    **_cells(each[part]),
                    "speed-up (95%)": str(speedups.get((part, each["name"]), 1)),
                }
                for each in variants
            ]
            for part in parts
        ]
    if "input_pipeline" in first:
        tables.append([_stages(each, each["name"] if len(variants) > 1 else "on one core") for each in variants])
    console = display.console if display.console.is_terminal else wide_console()
    for rows in tables:
        console.print(plain_table(rows, right={column for row in rows for column in list(row)[1:]}, no_wrap=True))
    if len(variants) > 1:
        display.note("speed-up: images/s over those of the first line, in pairs of neighbouring turns")


def _stages(record: Mapping[str, Any], name: str) -> Row:
    """Images per second of each stage on one core, in pipeline order."""
    found = record["input_pipeline"]
    row = {"input pipeline, images/s": name}
    for stage, numbers in found["stages"].items():
        rate = numbers["images_per_second"]
        row[stage] = "-" if rate is None else f"{rate:,.0f} ({numbers['share']:.0%})"
    row["per worker"] = f"{found['images_per_second_per_core']:,.0f}"
    row["all workers, expected"] = f"{found['images_per_second_expected']:,.0f}"
    return {**row, "limit": found["limit"]}


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
        ("data", f"{record['data']}, workers: {record['num_workers']}"),
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
    if part["memory_peak_bytes"] is not None:
        row["memory"] = human(part["memory_peak_bytes"], "B")
    return row
