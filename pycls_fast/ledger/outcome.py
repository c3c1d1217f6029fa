"""`ledger.json`: everything that a ledger's folder holds, as one record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pycls_fast.ledger.accuracy import ImagePair, pair_images
from pycls_fast.ledger.folder import read_measurement
from pycls_fast.ledger.plan import Arm, tree_path
from pycls_fast.ledger.rates import compare_speed, with_rates
from pycls_fast.ledger.records import curve
from pycls_fast.ledger.runner import Ledger
from pycls_fast.ledger.statistics import mean_interval
from pycls_fast.ledger.verdicts import Comparison, Verdict, judge, rule
from pycls_fast.train.environment import environment, environment_command, git_state, versions
from pycls_fast.train.evaluation import Predictions
from pycls_fast.train.run_folder import RunFolder

FORMAT = 1

Record = dict[str, Any]


def collect(ledger: Ledger, config_name: str, *, finished: bool = True) -> Record:
    """The record of a ledger, finished or not.

    The structure is `{..., "arms": [{"name", "status", "timing", "numerics", "training"}, ...]}`; the first arm is the
    one that the others are compared with. `docs/ledger.md` describes the fields.
    """
    plan, stopwatch = ledger.selection.arms(), ledger.folder.stopwatch
    records = [_arm(ledger, arm) for arm in plan]
    by_name = {record["name"]: record for record in records}
    of_different_starts = compare_speed(plan, by_name, stopwatch.starts if stopwatch else [])
    _compare_accuracy(ledger, plan, by_name)
    timed = next((record for arm in plan for record in _timings(ledger, arm)), None)
    return {
        "kind": "ledger",
        "format": FORMAT,
        "config_name": config_name,
        "time": time.time(),
        "wall_seconds": stopwatch and stopwatch.seconds,
        "command": environment_command(),
        "ladder": ledger.ladder.model_dump(mode="json"),
        "settings": asdict(ledger.settings),
        "base": [*ledger.flags, *ledger.typed],
        "rule": rule(ledger.folder.looks),
        "looks": ledger.folder.looks,
        "reference": plan[0].name,
        "model": timed and {k: timed[k] for k in _MODEL if k in timed},
        "device": timed["device"] if timed else None,
        "versions": versions(),
        "code": ledger.folder.codes,
        "environment": _environment(),
        "gradients": _gradients(ledger),
        "unmeasured": ledger.unmeasured | of_different_starts,
        "unfinished": None if finished else _progress(ledger, records),
        "arms": records,
    }


def _progress(ledger: Ledger, records: Sequence[Record]) -> Record:
    """How many of the measurements of the arms that run here exist."""
    s, arms = ledger.settings, [record for record in records if record["status"] == "measured"]
    done = sum(
        len((arm["timing"] or {}).get("rounds", ()))
        + (arm["numerics"] is not None)
        + len((arm["training"] or {}).get("runs", ()))
        for arm in arms
    )
    gradients = ledger.folder.gradients_file(ledger.selection.arms()[0]).is_file()
    rounding = 0 if s.numerics_steps is None else len(ledger.with_rounding())
    return {
        "done": done + (s.gradients and gradients),
        "of": len(arms) * (s.rounds + s.seeds) + rounding + s.gradients,
    }


def _environment() -> Record:
    """The environment without device and ranks: those of this process, which measures nothing, are not the arms'."""
    here = environment(torch.device("cpu"), 1)
    return {key: value for key, value in here.items() if key not in ("device", "world_size")}


def _gradients(ledger: Ledger) -> Record | None:
    """Gradient counts over all layers; those of each layer stay in their own file."""
    file = ledger.folder.gradients_file(ledger.selection.arms()[0])
    if not file.is_file():
        return None
    record = read_measurement(file)
    return {key: record[key] for key in ("total", "steps", "warmup_steps", "loss_scale")}


_MODEL = (
    "model", "parameters", "forward_flops_per_image", "image_size", "train_forward_flops_per_image",
    "train_image_size", "num_classes", "data", "global_batch_size",
)  # fmt: skip


def _arm(ledger: Ledger, arm: Arm) -> Record:
    status, reason = "measured", None
    for name, reasons in (("cannot run", ledger.selection.impossible), ("failed", ledger.selection.failed)):
        if arm.name in reasons:
            status, reason = name, reasons[arm.name]
    if arm.overridden is not None:
        status, reason = "overridden", arm.overridden
    git = None if arm.tree is None else git_state(tree_path(arm.tree))
    return {
        "name": arm.name,
        "note": "; ".join(filter(None, [arm.note, _code_note(arm, git)])),
        "overrides": list(arm.overrides),
        "ranks": arm.ranks,
        "tree": arm.tree,
        "git": git,
        "before": arm.before,
        "status": status,
        "reason": reason,
        # Only on the CPU: on CUDA other errors (out of memory, an old GPU) may contain these words.
        "needs": "CUDA" if status == "cannot run" and ledger.device == "cpu" and "needs CUDA" in str(reason) else None,
        "timing": _timing(ledger, arm),
        "numerics": _numerics(ledger, arm),
        "training": _training(ledger, arm),
    }


def _code_note(arm: Arm, git: Mapping[str, Any] | None) -> str | None:
    """The checkout that an arm runs and its commit, if it is known; None for an arm with this code."""
    if arm.tree is None:
        return None
    commit = "" if git is None else f" (commit {git['commit'][:10]}{', changed' if git['changed'] else ''})"
    return f"the code in {arm.tree}{commit}"


def _timings(ledger: Ledger, arm: Arm) -> list[Record]:
    return list(ledger.folder.timings(arm, ledger.settings.rounds))


def _timing(ledger: Ledger, arm: Arm) -> Record | None:
    rounds = _timings(ledger, arm)
    if not rounds:
        return None
    parts = [record["train"] for record in rounds]
    steps = [seconds for part in parts for turn in part["step_seconds_each"] for seconds in turn]
    p50, p90 = (float(np.quantile(steps, q)) for q in (0.5, 0.9))
    images = parts[0]["images_per_step"]
    median_rate, flops = images / p50, rounds[0]["train_forward_flops_per_image"]
    memory = [record["memory_peak_bytes"] for record in rounds if record["memory_peak_bytes"] is not None]
    products = [record["matmul"]["flops_per_second"] for record in rounds if record.get("matmul")]
    shares = [part["share_of_matmul"] for part in parts if "share_of_matmul" in part]
    timing = {
        "images_per_second": median_rate,
        "step_seconds_p50": p50,
        "step_seconds_p90": p90,
        "images_per_step": images,
        "samples": len(steps),
        # Not known if parts of the network are frozen.
        "flops_per_second": 3 * flops * median_rate if "flops_per_second" in parts[0] else None,
        "share_of_matmul": float(np.median(shares)) if shares else None,
        "memory_peak_bytes": max(memory, default=None),
        "rounds": [part["images_per_second"] for part in parts],
        "paired_rounds": [],
        # The machine's own speed in each round, of all ranks together.
        "matmul_flops_per_second": products if len(products) == len(rounds) else None,
        "times": [record["time"] for record in rounds],
        "image_size": rounds[0]["train_image_size"],
        "precision": rounds[0]["precision"],
        "switches": rounds[0]["switches"],
    }
    return with_rates(timing, arm.ranks)


def _numerics(ledger: Ledger, arm: Arm) -> list[Record] | None:
    file = ledger.folder.numerics_file(arm)
    return read_measurement(file)["errors"] if file.is_file() else None


def _training(ledger: Ledger, arm: Arm) -> Record | None:
    runs = [run for seed in ledger.seeds() if (run := _run(ledger, arm, seed)) is not None]
    reason = ledger.untrained.get(arm.name)
    if not runs and reason is None:
        return None
    top1 = [run["top1"] for run in runs]
    return {"reason": reason, "runs": runs, "top1": _mean(top1), "top5": _mean([run["top5"] for run in runs])}


def _mean(values: Sequence[float]) -> Record | None:
    """Mean over the seeds with its 95% interval (Student's t)."""
    if not values:
        return None
    mean, half = mean_interval(values)
    return {"mean": mean, "half": half, "seeds": len(values)}


def _run(ledger: Ledger, arm: Arm, seed: int) -> Record | None:
    folder = RunFolder(ledger.folder.run_dir(arm, seed))
    file = folder.path / "summary.json"
    if not file.is_file():
        return None
    summary = read_measurement(file)
    final = summary["final"]
    return {
        "seed": seed,
        **{key: final[key] for key in ("top1", "top5", "loss", "count", "weights", "split")},
        "best_top1": summary["best"]["top1"],
        **{key: summary[key] for key in ("steps", "epochs", "wall_seconds", "images_per_second", "memory_peak_bytes")},
        "curve": curve(r for r in folder.records() if r["kind"] == "train"),
        "evaluations": [
            {key: r[key] for key in ("epoch", "top1", "loss")}
            for r in folder.records()
            if r["kind"] == "eval" and r["weights"] == final["weights"]
        ],
    }


def _compare_accuracy(ledger: Ledger, plan: Sequence[Arm], records: Mapping[str, Record]) -> None:
    """Add `against_reference` and `against_before` to the trainings."""
    trained = [arm for arm in plan if records[arm.name]["training"] is not None]
    by_name = {arm.name: arm for arm in plan}
    columns = {
        key: [
            Comparison(other, arm.name, _pairs(ledger, by_name[other], arm))
            for arm in trained
            if (other := plan[0].name if key == "against_reference" else arm.before) is not None and other != arm.name
        ]
        for key in ("against_reference", "against_before")
    }
    verdicts = judge(list(columns.values()), margin=ledger.settings.margin, look=len(ledger.folder.looks))
    for (key, column), found in zip(columns.items(), verdicts, strict=True):
        for comparison, verdict in zip(column, found, strict=True):
            records[comparison.second]["training"][key] = _comparison(comparison, verdict)


def _comparison(comparison: Comparison, verdict: Verdict) -> Record:
    return {
        "reference": comparison.first,
        "verdict": asdict(verdict),
        "images": [{"seed": seed, **asdict(pair)} for seed, pair in comparison.pairs.items()],
    }


def _pairs(ledger: Ledger, first: Arm, second: Arm) -> dict[int, ImagePair]:
    pairs = {}
    for seed in ledger.seeds():
        files = [ledger.folder.run_dir(arm, seed) for arm in (first, second)]
        if not all((file / name).is_file() for file in files for name in ("summary.json", "predictions.npz")):
            continue
        one, two = (Predictions.load(RunFolder(file).predictions) for file in files)
        # Images that one of the two could not read are left out of both.
        _, at_one, at_two = np.intersect1d(one.indices_N, two.indices_N, assume_unique=True, return_indices=True)
        pairs[seed] = pair_images(one.labels_N[at_one], one.predicted_N[at_one], two.predicted_N[at_two])
    return pairs
