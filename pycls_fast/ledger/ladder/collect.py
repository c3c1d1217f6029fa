"""The record of a ladder, `ledger.json`, from what its folder holds so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from pycls_fast.config.ladder import Variant
from pycls_fast.ledger.ladder.folder import SavedRounding, SavedTiming, read_measurement
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import tree_path
from pycls_fast.ledger.report.record import (
    Commit,
    GradientCounts,
    Machine,
    Measured,
    Record,
    Status,
    Timing,
    Unfinished,
    VariantRecord,
    compare_speed,
)
from pycls_fast.ledger.report.statistics import geometric_mean
from pycls_fast.train.environment import environment, environment_command, git_state, versions

_MODEL = (
    "model", "parameters", "forward_flops_per_image", "image_size", "train_forward_flops_per_image",
    "train_image_size", "num_classes", "data", "global_batch_size",
)  # fmt: skip


def collect(ledger: Ledger, config_name: str, *, finished: bool = True) -> Record:
    variants, total = ledger.selection.variants(), ledger.total()
    records = [_variant(ledger, variant) for variant in variants]
    compare_speed(records)
    rounds, gradients = ledger.settings.rounds, ledger.folder.file("gradients", variants[0])
    timed = next((record for variant in variants for record in ledger.folder.timings(variant, rounds)), None)
    # Device and ranks of this process, which measures nothing, are not the variants'.
    here = environment(torch.device("cpu"), 1)
    return Record(
        config_name=config_name,
        time=time.time(),
        wall_seconds=ledger.folder.seconds,
        command=environment_command(),
        ladder=ledger.ladder,
        settings=ledger.settings,
        base=[*ledger.flags, *ledger.typed],
        model=Measured(**timed.model_dump(include=set(_MODEL))) if timed else None,
        device=timed.device if timed else None,
        versions=versions(),
        code=ledger.folder.codes,
        environment=Machine(**{key: value for key, value in here.items() if key not in ("device", "world_size")}),
        gradients=read_measurement(gradients, GradientCounts) if gradients.is_file() else None,
        unmeasured=ledger.unmeasured,
        unfinished=None if finished else Unfinished(done=total - sum(ledger.missing().values()), of=total),
        accuracy=ledger.trainings.record() if ledger.trainings else None,
        variants=records,
    )


def _variant(ledger: Ledger, variant: Variant) -> VariantRecord:
    out: tuple[Status, str | None] = ledger.selection.out.get(variant.name, ("measured", None))
    (status, reason), numerics = out, ledger.folder.file("numerics", variant)
    note, git = variant.note, None
    if variant.tree is not None:
        git = git_state(tree_path(variant.tree))
        commit = "" if git is None else f" (commit {git['commit'][:10]}{', changed' if git['changed'] else ''})"
        note = f"{note}{'; ' if note else ''}the code in {variant.tree}{commit}"
    return VariantRecord(
        name=variant.name,
        note=note,
        overrides=list(variant.overrides),
        ranks=variant.ranks or 1,
        tree=variant.tree,
        git=Commit(**git) if git else None,
        before=variant.against,
        status=status,
        reason=reason,
        # Only on the CPU: on CUDA other errors (out of memory, an old GPU) may contain these words.
        needs="CUDA" if status == "cannot run" and ledger.device == "cpu" and "needs CUDA" in str(reason) else None,
        timing=_timing(ledger.folder.timings(variant, ledger.settings.rounds)),
        numerics=read_measurement(numerics, SavedRounding).errors if numerics.is_file() else None,
    )


def _timing(rounds: Sequence[SavedTiming]) -> Timing | None:
    if not rounds:
        return None
    parts = [record.train for record in rounds]
    steps = [seconds for part in parts for turn in part.step_seconds_each for seconds in turn]
    p50, p90 = (float(np.quantile(steps, q)) for q in (0.5, 0.9))
    rate = geometric_mean([part.images_per_second for part in parts]).ratio
    memory = [record.memory_peak_bytes for record in rounds if record.memory_peak_bytes is not None]
    products = [record.matmul.flops_per_second for record in rounds if record.matmul]
    shares = [part.share_of_matmul for part in parts if part.share_of_matmul is not None]
    return Timing(
        images_per_second=rate,
        step_seconds_p50=p50,
        step_seconds_p90=p90,
        images_per_step=parts[0].images_per_step,
        samples=len(steps),
        flops_per_second=None
        if parts[0].flops_per_second is None
        else 3 * rounds[0].train_forward_flops_per_image * rate,
        share_of_matmul=float(np.median(shares)) if shares else None,
        memory_peak_bytes=max(memory, default=None),
        rounds=[part.images_per_second for part in parts],
        matmul_flops_per_second=products if len(products) == len(rounds) else None,
        image_size=rounds[0].train_image_size,
        precision=rounds[0].precision,
        switches=rounds[0].switches,
    )
