"""Timing one experiment, or several variants of it in turns: build, measure, record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.parts import PartName, StepRange, TrainPart, slowest
from pycls_fast.ledger.records import speed_comparison
from pycls_fast.ledger.stages import measure_stages
from pycls_fast.ledger.timing_table import print_record
from pycls_fast.ledger.turn_length import turn_length
from pycls_fast.ledger.variant import Variant, build_variant
from pycls_fast.ledger.variant_record import variant_record
from pycls_fast.parallel import World
from pycls_fast.paths import timestamp
from pycls_fast.train.display import Display
from pycls_fast.train.enough import enough_images
from pycls_fast.train.environment import environment_command, provenance
from pycls_fast.train.metrics import memory_peak_bytes
from pycls_fast.train.output_file import output_file, write_json

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

    Args:
        variants: name and configuration; the others are compared with the first.
        mode: which parts are timed.
        steps: timed steps per turn, at least.
        warmup_steps: steps before the first turn (before every turn for parts with the input pipeline), at least.
        repeats: turns per part and variant.
        seconds: a turn lasts at least this long, and the warm-up half of it, whatever the number of steps.
        matmul_size: side of the matrices whose product sets the peak; None for the device's default.
        output: the JSON file; None for one in `run_dir` if that is set, else in `timings/`.

    Raises:
        UserError: something cannot be built, read, compared or written.
    """
    base = variants[0][1]
    _check_comparable(variants)
    with build.world(base) as world:
        file = _output_file(base, output, world)
        display = Display(speaks=world.is_main, mode="plain")
        order = StepRange()
        built: list[Variant] = []
        for name, config in variants:
            built.append(build_variant(name, config, PARTS[mode], world, order, built, matmul_size))
        for part in PARTS[mode]:
            length = f"{steps} steps each" + (f" or more, for {seconds:g} s" if seconds else "")
            display.note(f"timing {part}: {repeats} turns of {length}, {len(built)} variant(s)")
            _measure(built, part, world, steps=steps, warmup_steps=warmup_steps, repeats=repeats, seconds=seconds)
        if {"loader", "both"} & set(PARTS[mode]):
            for variant in built:
                display.note(f"timing the stages of the input pipeline in this process: {variant.name}")
                first = order.take(repeats + 1)
                train = variant.sources["train"]
                variant.stages = measure_stages(
                    variant.config, train, world, variant.switches, start=first, repeats=repeats
                )
        for variant in built:
            if variant.skipped_steps:
                display.warn(
                    f"{variant.name}: {variant.skipped_steps} steps had gradients that are not finite; "
                    "if loss scaling skips them, they take less time than full steps"
                )
        if not world.is_main:
            return DONE
        settings = {
            "mode": mode, "steps": steps, "warmup_steps": warmup_steps, "repeats": repeats, "seconds": seconds
        }  # fmt: skip
        record = _record(built, settings, world)
        write_json(file, record)
        print_record(display, record)
        display.note(f"written to {file}")
        return DONE


def _check_comparable(variants: Sequence[tuple[str, RunConfig]]) -> None:
    base = variants[0][1]
    problems = []
    for name, config in variants:
        if config.weights is not None:
            problems.append("weights: timing does not depend on them; leave it out")
        for key in ("runtime", "parallel", "imports"):
            if getattr(config, key) != getattr(base, key):
                problems.append(f"compare: '{name}' changes {key}, which all variants share; time it in a separate run")
    if problems:
        raise UserError(*dict.fromkeys(problems))


def _output_file(config: RunConfig, output: str | None, world: World) -> Path:
    if output is not None:
        return output_file(output, world)
    if config.run_dir is not None:
        return output_file(Path(config.run_dir) / f"timing-{timestamp()}.json", world)
    return output_file(Path("timings") / f"{config.config_name}-{timestamp()}.json", world)


def _measure(
    variants: Sequence[Variant],
    name: PartName,
    world: World,
    *,
    steps: int,
    warmup_steps: int,
    repeats: int,
    seconds: float = 0.0,
) -> None:
    lengths = {}
    for variant in variants:
        variant.turns[name] = []
        with _at_work(variant, name, world):
            variant.parts[name].warm_up(warmup_steps)
            lengths[variant.name] = turn_length(variant.parts[name], world, steps, seconds)
        _read_metrics(variant, world)
    owners = {id(v.matmul): v for v in variants if v.matmul is not None and name != "loader"}
    for repeat in range(repeats):
        for owner in owners.values():
            assert owner.matmul is not None
            build.set_backend(owner.config, world.device, owner.switches)
            owner.matmul.measure()
        # Alternating order: a steady drift and the position in the round cancel over two rounds.
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            world.at(f"timing {variant.name}, {name}: turn {repeat + 1}")
            with _at_work(variant, name, world):
                turn = variant.parts[name].turn(lengths[variant.name])
            variant.turns[name].append(slowest(turn, world))
    for variant in variants:
        variant.skipped_steps += _read_metrics(variant, world)
        part = variant.parts[name]
        if isinstance(part, TrainPart) and part.memory.counted is not None:
            variant.memory.peaks[name] = part.memory.counted
        if world.device.type == "cpu" and variant.process_peak is None:
            variant.process_peak = max(world.gather(memory_peak_bytes(world.device)))
        elif world.device.type == "cuda":
            variant.memory.peaks[name] = max(world.gather(variant.memory.peaks[name]))


@contextmanager
def _at_work(variant: Variant, part: PartName, world: World) -> Iterator[None]:
    """Apply this variant's process-wide settings, count its memory, start together with the other ranks."""
    build.set_backend(variant.config, world.device, variant.switches)
    world.barrier()
    with variant.memory.during(part), enough_images():
        yield


def _read_metrics(variant: Variant, world: World) -> int:
    """Number of steps since the last call whose gradients were not finite."""
    return int(variant.trainer.metrics.read(world)["skipped_steps"]) if variant.trainer is not None else 0


def _record(variants: Sequence[Variant], settings: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The record to write: a single variant's values at the top level, several in `variants`."""
    shared: dict[str, Any] = {
        "kind": "timing",
        "config_name": variants[0].config.config_name,
        "time": time.time(),
        "command": environment_command(),
        **settings,
        **provenance(world.device, world.size),
        # Of rank 0 so far, without its workers; on the CPU the system keeps only this peak.
        "process_memory_peak_bytes": memory_peak_bytes(world.device) if world.device.type == "cpu" else None,
    }
    if len(variants) == 1:
        return {**shared, **variant_record(variants[0], alone=True)}
    records = [variant_record(variant, alone=False) for variant in variants]
    comparisons = [
        speed_comparison(part, records[0], other) for part in PARTS[settings["mode"]] for other in records[1:]
    ]
    return {**shared, "variants": records, "comparisons": comparisons}
