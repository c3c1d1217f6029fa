"""What float16 would lose in a real training: gradients below its range, updates below its resolution."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data import to_device
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.gradient_counts import Watch
from pycls_fast.parallel import World
from pycls_fast.paths import timestamp
from pycls_fast.speed import SwitchName
from pycls_fast.train.building import TrainingParts, build_parts
from pycls_fast.train.damage import noting_damage, report_damage
from pycls_fast.train.display import Display
from pycls_fast.train.enough import enough_images
from pycls_fast.train.environment import environment_command, provenance
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.output_file import is_special_file, output_file, write_json


def count_gradients(config: RunConfig, *, steps: int, warmup_steps: int, loss_scale: float, output: str | None) -> int:
    """Train, count, write the numbers as JSON and draw a PNG beside it; returns the exit status.

    Args:
        config: an experiment in float32 or under autocast, so that its gradients and weights are float32.
        steps: training steps to count.
        warmup_steps: training steps before them.
        loss_scale: tried on the gradients; the training itself is not scaled.
        output: the JSON file; None for one in `run_dir` if that is set, else in `gradients/`.

    Raises:
        UserError: a precision that rounds gradients, several ranks, CUDA graphs, an `output` that cannot be written,
            or anything that training would refuse.
    """
    level = build.level(config)
    if level.compute == "float16" or level.weights != "float32":
        raise UserError(
            f"precision: {config.precision.name} rounds gradients before they are counted; use precision=fp32 or "
            "amp_bf16"
        )
    with build.world(config) as world:
        if world.size > 1:
            raise UserError("mode: gradients are counted by one process; start without torchrun")
        if build.switches(config, world.device)[SwitchName.CUDA_GRAPHS] == "on":
            raise UserError(
                "speed.cuda_graphs: on replays steps without Python, which counts; use speed.cuda_graphs=off"
            )
        file = _output_file(config, output)
        display = Display(speaks=True, mode="plain")
        parts = build_parts(config, world, display)
        config, step = parts.config, parts.step
        metrics, watch = TrainMetrics(world.device), Watch(parts.network, loss_scale)
        whole = warmup_steps + steps
        loader = build.train_loader(config, parts.sources["train"], world, parts.switches, start_step=0, steps=whole)
        damaged: dict[str, str] = {}
        batches = noting_damage(to_device(loader, world.device, mode="blocking"), damaged)
        with closing(batches), enough_images():
            for number in range(whole):
                microbatches = list(islice(batches, config.optim.microbatches))
                if number < warmup_steps:
                    step(number, microbatches, metrics)
                    continue
                with watch.around(step.optimizer):
                    step(number, microbatches, metrics)
        report_damage(damaged, config.data.max_damaged, world, display)
        record = _record(parts, world, watch, metrics, steps=steps, warmup_steps=warmup_steps)
        write_json(file, record)
        written = [file]
        # A pipe or a device has no place beside it for a picture.
        if not is_special_file(file):
            written.append(file.with_suffix(".png"))
            # Only here: it needs matplotlib, which takes long to import.
            from pycls_fast.ledger.charts.gradients import draw

            draw(record, written[-1])
        _print(display, record)
        print(f"written to {' and '.join(map(str, written))}")
        return DONE


def _output_file(config: RunConfig, output: str | None) -> Path:
    if output is not None:
        return output_file(output)
    if config.run_dir is not None:
        return output_file(Path(config.run_dir) / "gradients.json")
    return output_file(Path("gradients") / f"{config.config_name}-{timestamp()}.json")


def _record(
    parts: TrainingParts, world: World, watch: Watch, metrics: TrainMetrics, *, steps: int, warmup_steps: int
) -> dict[str, Any]:
    """The record to write."""
    config = parts.config
    return {
        "kind": "gradients",
        "config_name": config.config_name,
        "time": time.time(),
        "command": environment_command(),
        "steps": steps,
        "warmup_steps": warmup_steps,
        "loss_scale": watch.scale,
        "clip_norm": config.optim.clip_norm,
        "parameters": parts.complexity.parameters,
        "loss": metrics.read(world)["loss"],
        **provenance(world.device, world.size),
        "total": watch.total().record(),
        "layers": watch.layers(),
        "config": config.model_dump(mode="json"),
    }


def _print(display: Display, record: Mapping[str, Any]) -> None:
    total, scale = record["total"], record["loss_scale"]

    def percent(key: str) -> str:
        return f"{100 * total[key]:.3g}%"

    display.table(
        f"{record['config_name']}: {record['steps']} steps after {record['warmup_steps']}",
        [
            ("gradients that are zero in float16", percent("below_subnormal")),
            (f"the same, loss x {scale:g}", percent("below_subnormal_scaled")),
            ("gradients subnormal or zero in float16", percent("below_normal")),
            (f"the same, loss x {scale:g}", percent("below_normal_scaled")),
            (f"gradients above float16's largest number, loss x {scale:g}", percent("overflow_scaled")),
            ("updates lost without a float32 master, float16", percent("updates_lost_float16")),
            ("updates lost without a float32 master, bfloat16", percent("updates_lost_bfloat16")),
        ],
    )
