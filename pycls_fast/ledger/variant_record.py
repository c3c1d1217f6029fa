"""The record of one timed variant."""

from __future__ import annotations

from typing import Any

from pycls_fast import build
from pycls_fast.ledger.records import part_record
from pycls_fast.ledger.variant import Variant


def variant_record(variant: Variant, *, alone: bool) -> dict[str, Any]:
    """What a timing file says of a variant; rates in images per second, memory in bytes.

    Args:
        variant: with its turns.
        alone: no other variant was timed in this process: only then is the process's peak memory this one's.
    """
    config, counted, trained = variant.config, variant.complexity, variant.training_complexity
    first = next(iter(variant.turns))
    parts: dict[str, Any] = {}
    for name, turns in variant.turns.items():
        peak = variant.memory.peaks.get(name)
        if peak is None and alone and name == first:
            peak = variant.process_peak
        parts[name] = part_record(
            name,
            turns,
            images_per_step=variant.parts[name].images_per_step,
            forward_flops_per_image=(counted if name == "inference" else trained).forward_flops,
            matmul_flops_per_second=variant.matmul.flops_per_second if variant.matmul is not None else None,
            memory_peak_bytes=peak,
            frozen=config.optim.trainable != ("all",),
        )
    return {
        "name": variant.name,
        "model": config.model.kind,
        "parameters": counted.parameters,
        "forward_flops_per_image": counted.forward_flops,
        "activations_per_image": counted.activations,
        "image_size": config.data.image_size,
        # The training steps are timed with images of the first epoch (`data.image_size_schedule`).
        "train_image_size": config.data.training_image_sizes[0],
        "train_forward_flops_per_image": trained.forward_flops,
        "num_classes": variant.classes,
        "data": variant.sources["train"].describe(),
        "global_batch_size": config.data.global_batch_size,
        "accumulation_steps": config.optim.microbatches,
        "steps_per_run": _steps_per_run(variant),
        "evaluated_images_per_run": _evaluated_images_per_run(variant),
        "num_workers": build.num_workers(config),
        "precision": config.precision.name,
        "switches": {str(switch): value for switch, value in variant.switches.items()},
        "matmul": variant.matmul.record() if variant.matmul is not None else None,
        "skipped_steps": variant.skipped_steps,
        **({"input_pipeline": variant.stages} if variant.stages is not None else {}),
        # The part that the names shared by all tools refer to.
        "headline": first,
        **{key: parts[first][key] for key in ("images_per_second", "step_seconds_p50", "memory_peak_bytes")},
        **parts,
        "config": config.model_dump(mode="json"),
    }


def _steps_per_run(variant: Variant) -> int:
    schedule = variant.config.schedule
    whole = schedule.epochs * (len(variant.sources["train"]) // variant.config.data.global_batch_size)
    return min(whole, schedule.max_steps or whole)


def _evaluated_images_per_run(variant: Variant) -> int:
    """Images that the evaluations of a whole run score, twice each if there is an average of the weights."""
    config = variant.config
    steps_per_epoch = max(1, len(variant.sources["train"]) // config.data.global_batch_size)
    every = config.runtime.eval_every_steps or steps_per_epoch * config.runtime.eval_every_epochs
    evaluations = -(-_steps_per_run(variant) // every)
    return evaluations * len(variant.sources["val"]) * (1 if config.optim.ema_decay is None else 2)
