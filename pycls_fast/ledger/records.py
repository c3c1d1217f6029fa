"""The numbers in a timing record, computed from turns: rates, spreads, shares of the peak, ratios of variants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pycls_fast.ledger.parts import PartName, Turn
from pycls_fast.ledger.statistics import CONFIDENCE, paired_ratio, spread

# Operations of a step, in forward passes: the backward pass has two products for each one of the forward pass
# (gradients of input and weight; Kaplan et al. 2020, section 2.1). Optimizer and recomputation are not counted.
_FORWARD_PASSES: Mapping[PartName, int] = {"train": 3, "inference": 1, "both": 3}

# Compute steps are alike, and each is a sample. Batches from workers arrive in bursts, so that most waits are zero and
# a few are long: there the mean of a turn is the sample.
_SAMPLE_PER_STEP: frozenset[PartName] = frozenset({"train", "inference"})

# At most so many points per loss curve; more could not be told apart.
_MOST_POINTS = 400


def part_record(
    name: PartName,
    turns: Sequence[Turn],
    *,
    images_per_step: int,
    forward_flops_per_image: int,
    matmul_flops_per_second: float | None,
    memory_peak_bytes: int | None,
    frozen: bool = False,
) -> dict[str, Any]:
    """The numbers of one part.

    Args:
        name: the part.
        turns: as measured, merged over the ranks by `slowest`.
        images_per_step: over all ranks.
        forward_flops_per_image: a multiply-add counts 2.
        matmul_flops_per_second: of all ranks together, or None if it was not measured.
        memory_peak_bytes: the largest of all ranks, or None if it is not known.
        frozen: some parameters are not trained; how much of the backward pass that saves is not known.
    """
    turn_seconds = [turn.total / len(turn.seconds) for turn in turns]
    samples = [s for turn in turns for s in turn.seconds] if name in _SAMPLE_PER_STEP else turn_seconds
    summary = spread(samples)
    images_per_second = images_per_step / summary.p50
    record: dict[str, Any] = {
        "images_per_second": images_per_second,
        "images_per_step": images_per_step,
        "step_seconds_p50": summary.p50,
        "step_seconds_p10": summary.p10,
        "step_seconds_p90": summary.p90,
        "step_seconds_mean": summary.mean,
        "samples": summary.count,
        "sample": "step" if name in _SAMPLE_PER_STEP else "turn",
        "memory_peak_bytes": memory_peak_bytes,
    }
    if name in _FORWARD_PASSES and not (frozen and _FORWARD_PASSES[name] > 1):
        flops_per_second = _FORWARD_PASSES[name] * forward_flops_per_image * images_per_second
        record["flops_per_second"] = flops_per_second
        if matmul_flops_per_second is not None:
            record["share_of_matmul"] = flops_per_second / matmul_flops_per_second
    if name == "both":
        record["data_wait_fraction"] = sum(turn.waited for turn in turns) / sum(turn.total for turn in turns)
    first_batches = [turn.first_batch for turn in turns if turn.first_batch is not None]
    if first_batches:
        record["first_batch_seconds_p50"] = spread(first_batches).p50
        record["first_batch_seconds"] = first_batches
    record["turn_seconds"] = turn_seconds
    record["step_seconds_each"] = [list(turn.seconds) for turn in turns]
    return record


def speed_comparison(part: str, reference: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """The variant's images per second over the reference's, turn by turn."""
    rates = [
        [record[part]["images_per_step"] / seconds for seconds in record[part]["turn_seconds"]]
        for record in (reference, variant)
    ]
    ratio = paired_ratio(*rates)
    low, high = ratio.interval or (None, None)
    return {
        "part": part,
        "variant": variant["name"],
        "reference": reference["name"],
        **{f"speedup_{key}": value for key, value in asdict(ratio.spread).items() if key.startswith("p")},
        "speedup_low": low,
        "speedup_high": high,
        "confidence": CONFIDENCE,
        "pairs": list(ratio.pairs),
        "memory_ratio": _memory_ratio(reference[part], variant[part]),
    }


def _memory_ratio(reference: Mapping[str, Any], variant: Mapping[str, Any]) -> float | None:
    old, new = reference["memory_peak_bytes"], variant["memory_peak_bytes"]
    return None if old is None or new is None else new / old


def curve(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Epochs and losses of training's metrics lines for a chart: at most 400 points, those with a finite loss."""
    known = [record for record in records if record["loss"] is not None]
    every = -(-len(known) // _MOST_POINTS) or 1
    return {key: [record[key] for record in known[::every]] for key in ("epoch", "loss")}
