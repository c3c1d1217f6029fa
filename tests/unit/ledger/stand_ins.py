"""Stand-ins that the ledger's tests share: a process that writes what its tool would, a finished run, a record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pycls_fast.config import RunConfig
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.folder import LedgerFolder
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import slug, timed_variants
from pycls_fast.ledger.ladder.processes import ProcessResult
from pycls_fast.ledger.ladder.run import Experiment, run_ladder
from pycls_fast.ledger.report.effects import Effect, Interplay, Look, Together, Word
from pycls_fast.ledger.report.record import Accuracy, OverallFit, Record, TrainedRun
from pycls_fast.ledger.report.statistics import Speedup, geometric_mean
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder
from tests.factories import config_of

# Of gradients.
TOTAL = {
    "exponents": {"-7": 3}, "below_subnormal": 0.1, "below_subnormal_scaled": 0.0, "updates_lost_float16": 0.2,
    "updates_lost_bfloat16": 0.3,
}  # fmt: skip
LADDER = Ladder(
    description="two changes",
    baseline=Variant(name="base"),
    variants=(Variant(name="B", overrides=("b=1",)), Variant(name="C", overrides=("c=1",))),
)
SETTINGS: Mapping[str, Any] = {
    "runs_at_most": 0, "mode": "cumulative", "rounds": 2, "numerics_steps": None, "gradients": False,
}  # fmt: skip


def ladder_of(*variants: Variant, **changed: Any) -> Ladder:
    """The ladder with other variants."""
    return LADDER.model_copy(update={"variants": variants, **changed})


def slug_of(name: str) -> str:
    """A part of the paths of one of the ladder's variants."""
    return next(slug(variant) for variant in timed_variants(LADDER, "cumulative") if variant.name == name)


STEPS = {"step_seconds_each": [[0.1, 0.1]], "images_per_step": 8, "images_per_second": 80.0, "step_seconds_p50": 0.1}
# Of any measurement.
RECORD: dict[str, Any] = {
    "errors": [], "train": STEPS, "both": {**STEPS, "step_seconds_p50": 0.125}, "step_seconds_p50": 0.125,
    "steps_per_run": 9000, "evaluated_images": 100, "evaluated_images_per_run": 1600, "memory_peak_bytes": None,
    "forward_flops_per_image": 1, "train_forward_flops_per_image": 1, "precision": "fp32", "switches": {},
    "device": "cpu", "model": "vit", "parameters": 9, "image_size": 8, "train_image_size": 8, "num_classes": 10,
    "data": "x", "global_batch_size": 8, "total": TOTAL, "steps": 1, "warmup_steps": 0, "loss_scale": 1.0,
}  # fmt: skip


class FakeProcess:
    """Writes what its tool would, or ends with the status and words that `broken` has for a part of its log's name."""

    broken: ClassVar[Mapping[str, tuple[int, str]]] = {}
    started: ClassVar[list[list[str]]] = []
    trees: ClassVar[list[object]] = []
    ranks: ClassVar[list[int]] = []

    def __init__(
        self, verb: str, arguments: list[str], *, ranks: int, log: Path, tree: object = None, devices: object = ()
    ) -> None:  # fmt: skip
        del devices
        self.trees.append(tree)
        self.ranks.append(ranks)
        self.started.append([verb, *arguments])
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._status, said = next((end for part, end in self.broken.items() if part in log.name), (0, ""))
        log.write_text(said)
        if self._status == 0:
            given = dict(argument.partition("=")[::2] for argument in arguments)
            file = Path(given["output"]) if "output" in given else Path(given["run_dir"]) / "summary.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            self._write(file, arguments)

    def _write(self, file: Path, arguments: list[str]) -> None:
        if file.name == "summary.json":
            make_run(file.parent, wrong=5)
            (file.parent / "arguments").write_text(json.dumps(arguments))
            return
        file.write_text(json.dumps({**RECORD, "arguments": arguments}))

    def finished(self) -> ProcessResult:
        return ProcessResult(self._status, 1.0, self._log)

    wait = finished

    def stop(self) -> None:
        pass


def given(file: Path) -> list[str]:
    """The arguments of the process that wrote a file."""
    if file.name == "summary.json":
        return list(json.loads((file.parent / "arguments").read_text()))
    return list(json.loads(file.read_text())["arguments"])


def quiet(text: str) -> None:
    """Say nothing."""
    del text


def made(
    folder: Path, ladder: Ladder = LADDER, *, device: str = "cpu", typed: Sequence[str] = (), **settings: Any
) -> Ledger:
    """A ledger that is not open."""
    chosen = LadderSettings(**{**SETTINGS, **settings})
    return Ledger(ladder, chosen, ["--config-name", "x"], typed, device, LedgerFolder(folder), say=quiet)


def run(ledger: Ledger) -> None:
    """Do all of an open ledger's work."""
    ledger.time_variants()
    ledger.measure_numerics()
    if ledger.settings.trains:
        ledger.plan_trainings().run()


def start(folder: Path, ladder: Ladder = LADDER, **settings: Any) -> Ledger:
    """A ledger that has done its work."""
    ledger = made(folder, ladder, **settings)
    with ledger.folder.opened(ledger.plan()):
        run(ledger)
    return ledger


def composed(overrides: Sequence[str]) -> RunConfig:
    """An experiment that has no convolutions, and knows nothing of keys that the ladders here make up."""
    if "c=conv" in overrides:
        raise UserError("c: conv is for a ResNet; use c=1")
    return config_of()


def work(
    folder: Path, ladder: Ladder = LADDER, *, typed: Sequence[str] = (), dry_run: bool = False, **settings: Any
) -> int:
    """The whole command; returns its status."""
    experiment = Experiment(config_of(*typed), [], list(typed), composed)
    return run_ladder(experiment, ladder, LadderSettings(**{**SETTINGS, **settings}), folder, dry_run=dry_run)


def make_run(path: Path, wrong: int, count: int = 100) -> None:
    """A finished run that got the first so many of its images wrong."""
    predicted = (np.arange(count) < wrong).astype(np.int64)
    folder = RunFolder(path)
    folder.create()
    ones = np.ones(count, np.float32)
    Predictions(np.arange(count), np.zeros(count, np.int64), predicted, ones, ones).save(folder.predictions)
    top1 = 100.0 - 100 * wrong / count
    final = {"top1": top1, "top5": 100.0, "loss": 0.1, "count": count, "weights": "model", "split": "val"}
    sizes = {"steps": 1, "epochs": 1.0, "wall_seconds": 1.0, "images_per_second": 1.0, "memory_peak_bytes": None}
    folder.write_json("summary.json", {"final": final, "best": {"top1": top1}, **sizes})


def timing(rounds: Sequence[float], speedup: Speedup | None = None, **changed: Any) -> dict[str, Any]:
    """The values of a timing whose rounds had these rates."""
    rate = geometric_mean(rounds).ratio
    return {
        "images_per_second": rate, "step_seconds_p50": 64 / rate, "step_seconds_p90": 70 / rate, "images_per_step": 64,
        "samples": 9, "flops_per_second": 1e9 * rate, "share_of_matmul": 0.25, "memory_peak_bytes": 2_000_000_000,
        "rounds": list(rounds), "matmul_flops_per_second": None, "image_size": 224,
        "precision": "fp32", "switches": {}, "speedup": speedup, "speedup_before": speedup, **changed,
    }  # fmt: skip


def variant(name: str, before: str | None, **values: Any) -> dict[str, Any]:
    """The values of a variant."""
    empty = {
        "note": "", "overrides": [f"{name}=1"], "ranks": 1, "tree": None, "git": None, "status": "measured",
        "reason": None, "needs": None, "timing": None, "numerics": None,
    }  # fmt: skip
    return {"name": name, "before": before, **empty, **values}


def accuracy(*effects: Effect, broken: Mapping[str, str] | None = None, count: int = 64) -> Accuracy:
    """What so many trainings of 1,000 images each said, at the second look."""
    looked = [effect for effect in effects if effect.word not in (None, "identical")]
    run = TrainedRun(seed=0, on=[], top1=90.0, count=1000, seconds=60.0, failed=None)
    return Accuracy(
        runs=[run] * count, effects=list(effects), looks=[Look(1, count, (0.02, 0.01, 0.01), looked)],
        broken=dict(broken or {}),
        fit=OverallFit(
            deviation=0.2, floor=0.1, variance_ratio=4.0, resolution=0.15,
            together=Together(["z"], -0.1, 0.1, -0.3, 0.1), interplay=Interplay(("quick", "two"), -1.5, 0.001),
        ),
    )  # fmt: skip


def effect(name: str, word: Word | None, difference: float = 0.0, error: float = 0.1) -> Effect:
    """What trainings said about a variant."""
    low, high = difference - 2 * error, difference + 2 * error
    return Effect(name, difference, error, 24, low, high, low, 0.5, 0.01, word)


def record_of(*variants: Mapping[str, Any], **changed: Any) -> Record:
    """A record of these variants."""
    return Record.model_validate(
        {
            "config_name": "vit", "time": 1.8e9, "wall_seconds": 60.0, "command": "python tools/ledger.py",
            "ladder": LADDER, "settings": LadderSettings(), "base": ["--config-name", "vit", "optim.lr=1"],
            "model": None, "device": "cpu", "versions": {"torch": "2"}, "code": ["a"],
            "environment": {"processor": "P", "cpu_count": 2, "git": None}, "gradients": None, "unmeasured": {},
            "unfinished": None, "variants": list(variants), **changed,
        }
    )  # fmt: skip
