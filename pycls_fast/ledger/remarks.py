"""Sentences below the table of a ledger: what its numbers are, and what they cannot say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pycls_fast.published import IMAGENET_TRAINING_IMAGES

Record = Mapping[str, Any]

# Below this, an epoch of ImageNet at the measured rate says nothing about training on ImageNet.
_SMALLEST_IMAGENET_SIZE = 64


def remarks(record: Record) -> list[str]:
    """The sentences that apply to this record."""
    timed, settings = [arm["timing"] for arm in record["arms"] if arm["timing"]], record["settings"]
    several = any(arm["ranks"] > 1 for arm in record["arms"])
    trained = settings["seeds"] > 0
    steps = settings["numerics_steps"]
    return [
        *([_rates(record["reference"], several)] if timed else []),
        *([_MATMUL] if any(timing.get("share_of_matmul") is not None for timing in timed) else []),
        *([_memory(record)] if any(timing["memory_peak_bytes"] for timing in timed) else []),
        *([_epoch(record)] if timed else []),
        *([f"Gradient error: relative, against float64, before training and after {steps} steps."] if steps else []),
        *([text] if trained and (text := _small_margin(record)) else []),
    ]


def _rates(reference: str, several: bool) -> str:
    ranks = ", of all ranks together" if several else ""
    return (
        f"images/s{ranks}: the geometric mean of the rounds that are paired with those of '{reference}', so that rows "
        "whose rounds are all paired agree with their speed-up; ms a step: the median of all steps, in brackets the "
        "90th percentile."
    )


_MATMUL = (
    "FLOP/s: forward and backward pass (three forward passes); 'of matmul': its share of what one large matrix product "
    "reaches on this machine in the same precision, like MFU, but of a measured peak."
)


def _memory(record: Record) -> str:
    what = (
        "the highest of the device during training steps"
        if record["device"] != "cpu"
        else "the highest of the tensors alive in a step (of compiled rungs and several ranks: of the process)"
    )
    return f"Memory: {what}, per rank; in brackets the difference from '{record['reference']}'."


def has_imagenet_size(record: Record) -> bool:
    """Whether some arm's images are large enough for a time per epoch of ImageNet to mean something."""
    # Earlier versions did not record each rung's size.
    known = image_sizes(record) or [(record["model"] or {}).get("image_size") or _SMALLEST_IMAGENET_SIZE]
    return max(known) >= _SMALLEST_IMAGENET_SIZE


def _epoch(record: Record) -> str:
    if has_imagenet_size(record):
        return f"ImageNet epoch: {IMAGENET_TRAINING_IMAGES:,} images{of_size(record)} at this rate."
    return (
        f"No time per epoch of ImageNet: these images{of_size(record)} are smaller than the "
        f"{_SMALLEST_IMAGENET_SIZE} pixels from which it would mean something."
    )


def image_sizes(record: Record) -> list[int]:
    """The sizes of the images that were timed; empty if they are not known."""
    return sorted({arm["timing"]["image_size"] for arm in record["arms"] if arm["timing"]} - {None})


def of_size(record: Record) -> str:
    """The sizes of the images that were timed, in words."""
    sizes = image_sizes(record)
    own = ", depending on the rung," if len(sizes) > 1 else ""
    return f" of {' or '.join(map(str, sizes))} pixels{own}" if sizes else ""


def _small_margin(record: Record) -> str | None:
    """A remark on a margin that is smaller than one image of the validation set; else None."""
    runs = [run for arm in record["arms"] if arm["training"] for run in arm["training"]["runs"]]
    counts, margin = [run["count"] for run in runs if run.get("count")], record["settings"]["margin"]
    if not counts or margin is None or margin >= 100 / min(counts):
        return None
    image = 100 / min(counts)
    enough = math.ceil(10 * image) / 10
    return (
        f"The margin of {margin:g} points is smaller than one of the {min(counts):,} validation images "
        f"({image:.2g} points), so that one lost image exceeds it; use margin={enough:g}, or more images."
    )
