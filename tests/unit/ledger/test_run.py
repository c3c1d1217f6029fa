"""A folder reaches the record, and why a variant has no numbers; how long a ladder takes, by a known timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.collect import collect
from pycls_fast.ledger.ladder.folder import SavedTiming
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.run import estimate
from pycls_fast.ledger.report.record import read_record
from pycls_fast.ledger.report.text import state
from pycls_fast.train.folder import write_json
from tests.unit.ledger.stand_ins import RECORD, STEPS, FakeProcess, ladder_of, made, start, work


def test_a_record_is_read_as_it_was_written(tmp_path: Path, fake: type[FakeProcess]) -> None:
    record = collect(start(tmp_path, runs_at_most=8, margin=50, numerics_steps=2, gradients=True), "x")
    write_json(tmp_path / "ledger.json", record.model_dump(mode="json"))
    assert read_record(tmp_path / "ledger.json") == record
    # The environment is not that of any variant: each has its own ranks, and the device is that of the timings.
    assert record.device == "cpu"
    assert not {"device", "world_size"} & set(record.environment.model_dump())


def test_a_field_that_is_lost_is_one_line(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """A flipped bit in a name leaves valid JSON."""
    ledger = start(tmp_path, runs_at_most=8, margin=50, numerics_steps=2, gradients=True)

    def read_all() -> None:
        with ledger.folder.opened(ledger.plan()):
            ledger.plan_trainings()
        collect(ledger, "x")

    fields = {
        "plan.json": "crossing",
        "timings": "train",
        "numerics": "errors",
        "gradients": "total",
    }
    for place, field in fields.items():
        file = tmp_path / place
        file = next(file.rglob("*.json")) if file.is_dir() else file
        whole = file.read_text()
        for damaged in (whole.replace(f'"{field}"', '"lost"'), whole[:-2], "", "[]"):
            file.write_text(damaged)
            with pytest.raises(UserError, match=f"^output: {file} (is damaged|cannot be read)"):
                read_all()
        file.write_text(whole)
    read_all()


def test_what_is_kept_of_the_rounds_of_a_variant(tmp_path: Path, fake: type[FakeProcess]) -> None:
    ledger = start(tmp_path)
    files = [ledger.folder.timing_file(ledger.selection.variants()[0], number) for number in range(2)]
    train = {**STEPS, "flops_per_second": 1.0}
    for file, flops in zip(files, (2e11, 1e11), strict=True):
        more = {"train": train, "train_image_size": 4, "train_forward_flops_per_image": 7}
        file.write_text(json.dumps({**json.loads(file.read_text()), **more, "matmul": {"flops_per_second": flops}}))
    timing = collect(ledger, "x").timed[0][1]
    # Of the size of its training images: evaluation may have another.
    assert (timing.image_size, timing.flops_per_second) == ((4, 4), pytest.approx(3 * 7 * 80))
    # The machine's speed may differ from round to round; of folders with a round without it nothing is kept.
    assert timing.matmul_flops_per_second == [2e11, 1e11]
    file.write_text(json.dumps({**json.loads(file.read_text()), "matmul": None}))
    assert collect(ledger, "x").timed[0][1].matmul_flops_per_second is None
    file.unlink()
    assert collect(ledger, "x").timed[0][1].rounds == [80.0]


def test_why_a_variant_was_not_measured(tmp_path: Path) -> None:
    variants = (Variant(name=name, overrides=(f"{name}=1",)) for name in ("large", "far", "odd", "broken"))
    ledger = made(tmp_path, ladder_of(*variants), device="cuda")
    ledger.selection.out |= {
        "large": ("failed", "data.global_batch_size: 1 x NVIDIA H200 is out of memory with 64; raise it"),
        "far": ("cannot run", "precision: tf32 needs CUDA from Ampere on"),
        "odd": ("cannot run", "model: has no head"), "broken": ("failed", "RuntimeError: boom"),
    }  # fmt: skip

    def states() -> list[str]:
        return [state(variant) for variant in collect(ledger, "vit").variants[1:]]

    # Here is CUDA: another card may do.
    assert states() == ["failed", "cannot run here", "cannot run here", "failed"]
    ledger.device = "cpu"
    assert states() == ["failed", "needs CUDA", "cannot run here", "failed"]
    assert collect(ledger, "vit").variants[4].reason == "RuntimeError: boom"


EVERYTHING: dict[str, Any] = {"numerics_steps": 20, "gradients": True}
# A process took 5 s and its steps.
TRAIN = {**STEPS, "step_seconds_each": [[0.5, 0.5]], "step_seconds_p50": 0.5}
TIMED = {**RECORD, "train": TRAIN, "steps_per_run": 100, "evaluated_images_per_run": 320}


def estimated(ledger: Ledger, **timed: Any) -> dict[str, float]:
    return estimate(ledger, 6.5, SavedTiming(**{**TIMED, **timed}), 0.75)


def test_every_piece_counts(tmp_path: Path) -> None:
    assert estimated(made(tmp_path, rounds=4, **EVERYTHING)) == {
        # 10 steps and 5 to warm up, which last longer than 2 s and 1 s.
        "timings": 3 * 4 * (5 + 15 * 0.5),
        "rounding": 3 * (5 + 30 * 0.75),
        "gradients": 5 + 40 * 0.75,
        "training": 0,
    }
    assert estimated(made(tmp_path, runs_at_most=16))["training"] == 16 * (5 + 120 * 0.75)
    # Each of two that are compared by themselves has eight with it, and both have the eight without.
    alone = ladder_of(*(Variant(name=f"{ranks} ranks", ranks=ranks) for ranks in (2, 4)))
    assert estimated(made(tmp_path, alone, mode="crossed", runs_at_most=16))["training"] == 24 * (5 + 120 * 0.75)
    quick = estimated(made(tmp_path, rounds=1, seconds=4.0), train={**TRAIN, "step_seconds_p50": 0.01})
    assert quick == {"timings": 3 * (5 + 4 + 2), "rounding": 0, "gradients": 0, "training": 0}


def test_what_the_folder_has_is_not_counted(tmp_path: Path) -> None:
    ledger = made(tmp_path, rounds=2, runs_at_most=16, **EVERYTHING)
    ledger.plan_trainings()
    before = estimated(ledger)
    first, *_, last = ledger.selection.variants()
    files = (
        ledger.folder.timing_file(first, 0),
        ledger.folder.timing_file(last, 1),
        ledger.folder.file("numerics", last),
        ledger.folder.file("gradients", first),
        ledger.trainings.planned()[0].path / "summary.json",
    )
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text('{"steps": 1}')
    after = estimated(ledger)
    shares = {name: after[name] / before[name] for name in before}
    assert shares == pytest.approx({"timings": 4 / 6, "rounding": 2 / 3, "gradients": 0, "training": 15 / 16})


def test_what_is_announced_after_the_first_timing(
    tmp_path: Path, fake: type[FakeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(tmp_path / "a", runs_at_most=8, margin=50) == 0
    said = capsys.readouterr().out
    first, *_ = [line for line in said.splitlines() if "timing 2 of 2" in line]
    before = said[: said.index(first)]
    assert "training: at most about 121 min" in before
    assert "8 trainings, scored on 100 images, show differences of 1.52 points at best" in before
    with pytest.raises(UserError, match=r"^margin: 0.9 points are less than one of 100 images; use margin=2, or more"):
        work(tmp_path / "b", runs_at_most=8, margin=0.9)
    assert not list((tmp_path / "b").rglob("summary.json"))
    with pytest.raises(UserError, match=r"^runs_at_most: 4 trainings say nothing about 2 variants; use 6 or more"):
        work(tmp_path / "c", runs_at_most=4, margin=50)
    assert not (tmp_path / "c").exists()
