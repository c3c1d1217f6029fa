"""What a folder holds reaches the record: timings, and why a variant has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.processes import ProcessResult
from pycls_fast.ledger.ladder.run import collect
from pycls_fast.ledger.report.record import read_record
from pycls_fast.ledger.report.text import state
from pycls_fast.train.folder import write_json
from tests.unit.ledger.stand_ins import FakeProcess, ladder_of, made, start


def named(*names: str) -> list[Variant]:
    return [Variant(name=name, overrides=(f"{name}=1",)) for name in names]


def test_a_record_is_read_as_it_was_written(tmp_path: Path, fake: type[FakeProcess]) -> None:
    record = collect(start(tmp_path, runs_at_most=8, margin=50, numerics_steps=2, gradients=True), "x")
    write_json(tmp_path / "ledger.json", record.model_dump(mode="json"))
    assert read_record(tmp_path / "ledger.json") == record
    # The environment is not that of any variant: each has its own ranks, and the device is that of the timings.
    assert record.device == "cpu"
    assert not {"device", "world_size"} & set(record.environment)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "cannot be read"),
        ("no json", "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ('{"kind": "timing"}', "as a ledger.json \\(kind: "),
    ],
)
def test_a_file_that_is_no_record(text: str | None, line: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "x").write_text(text)
    with pytest.raises(UserError, match=f"^{tmp_path / 'x'}: .*{line}"):
        read_record(tmp_path / "x")


def test_a_variant_has_the_size_of_its_training_images(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Its steps are timed at that one, and evaluation may have another."""
    ledger = start(tmp_path)
    for number in range(2):
        file = ledger.folder.timing_file(ledger.selection.variants()[0], number)
        record = json.loads(file.read_text())
        record["train"]["flops_per_second"] = 0.0
        file.write_text(json.dumps({**record, "train_image_size": 4, "train_forward_flops_per_image": 7}))
    ((_, timing), *_) = collect(ledger, "x").timed
    assert (timing.image_size, timing.flops_per_second) == ((4, 4), pytest.approx(3 * 7 * 80))


def test_the_matrix_product_of_each_round_is_kept(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """The machine's speed may differ from round to round; of folders with a round without it nothing is kept."""
    ledger = start(tmp_path)
    files = [ledger.folder.timing_file(ledger.selection.variants()[0], number) for number in range(2)]
    for file, flops in zip(files, (2e11, 1e11), strict=True):
        file.write_text(json.dumps({**json.loads(file.read_text()), "matmul": {"flops_per_second": flops}}))
    assert collect(ledger, "x").timed[0][1].matmul_flops_per_second == [2e11, 1e11]
    file.write_text(json.dumps({**json.loads(file.read_text()), "matmul": None}))
    assert collect(ledger, "x").timed[0][1].matmul_flops_per_second is None
    # A power failure may cut a file, or leave zeros.
    for damaged in (file.read_bytes()[:99], b"", b"\0" * 99, b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^output: .*round_1\.json is damaged \(.*\); remove it, and it is"):
            collect(ledger, "x")
    file.unlink()
    assert collect(ledger, "x").timed[0][1].rounds == [80.0]


def test_why_a_variant_was_not_measured(tmp_path: Path) -> None:
    ledger = made(tmp_path, ladder_of(*named("large", "far", "odd", "broken")), device="cuda")
    log = tmp_path / "log.txt"
    log.write_text("error: data.global_batch_size: 1 x NVIDIA H200 is out of memory with 64; raise it\n")
    ledger.selection.blame(ledger.selection.variants()[1], ProcessResult(2, 1.0, log), is_first=True)
    ledger.selection.impossible |= {"far": "precision: tf32 needs CUDA from Ampere on", "odd": "model: has no head"}
    ledger.selection.failed["broken"] = "RuntimeError: boom"

    def states() -> list[str]:
        return [state(variant) for variant in collect(ledger, "vit").variants[1:]]

    # Here is CUDA: another card may do.
    assert states() == ["failed", "cannot run here", "cannot run here", "failed"]
    ledger.device = "cpu"
    assert states() == ["failed", "needs CUDA", "cannot run here", "failed"]
    assert collect(ledger, "vit").variants[4].reason == "RuntimeError: boom"
