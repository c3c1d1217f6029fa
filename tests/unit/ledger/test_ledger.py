"""A ladder at work, with stand-ins for its processes: what is measured, resumed, left out and refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pycls_fast.config import RunConfig
from pycls_fast.config.ladder import LadderSettings, Mode, Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import collect as collecting
from pycls_fast.ledger.ladder import run as running
from pycls_fast.ledger.ladder.collect import collect
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import timed_variants
from pycls_fast.ledger.ladder.processes import OURS, ProcessResult
from pycls_fast.ledger.ladder.run import refusal
from pycls_fast.ledger.report.record import read_record
from tests.factories import config_of
from tests.unit.ledger.stand_ins import LADDER, SETTINGS, FakeProcess, given, ladder_of, slug_of, start, work

pytestmark = pytest.mark.usefixtures("fake")
OWN = ("a=", "b=", "c=", "precision=")


def own(file: Path) -> tuple[str, ...]:
    """The overrides of the variant that a file's process was given."""
    return tuple(argument for argument in given(file) if argument.startswith(OWN))


def assert_each_measured_its_variant(ledger: Ledger) -> None:
    found = 0
    for variant in ledger.selection.runnable():
        files = [ledger.folder.timing_file(variant, number) for number in range(ledger.settings.rounds)]
        assert {own(file) for file in files} == {variant.overrides}
        found += len(files)
    assert found


def test_a_variant_that_can_run_later_is_below_the_others_from_the_beginning(
    tmp_path: Path, fake: type[FakeProcess]
) -> None:
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    first = start(tmp_path)
    assert first.selection.out == {"B": ("cannot run", "b needs a package")}
    assert {v.name: v.overrides for v in first.selection.runnable()} == {"base": (), "C": ("c=1",)}
    assert_each_measured_its_variant(first)
    fake.broken = {}
    fake.started.clear()
    second = start(tmp_path)
    assert {v.name: v.overrides for v in second.selection.runnable()}["C"] == ("b=1", "c=1")
    assert_each_measured_its_variant(second)
    # A machine's speed today is not that of the day on which the base was timed: its rounds are timed again.
    assert len(fake.started) == 6
    start(tmp_path, rounds=4)
    assert len(fake.started) == 6 + 2 * 3
    # In turns, forth and back.
    turns = [[each for each in words if each in ("b=1", "c=1")] for words in fake.started[6:]]
    assert turns[:3] == [[], ["b=1"], ["b=1", "c=1"]] == turns[:2:-1]


def test_there_is_a_page_after_the_timings(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    write = fake._write

    def looking(process: FakeProcess, file: Path, arguments: list[str]) -> None:
        page = tmp_path / "index.html"
        seen.append(page.is_file() and "unfinished: 6 of 9 measurements" in page.read_text())
        write(process, file, arguments)

    monkeypatch.setattr(fake, "_write", looking)
    assert work(tmp_path, numerics_steps=2) == 0
    assert seen == [False] * 6 + [True] * 3


def test_a_variant_that_fails_later_fails_alone(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"timings-{slug_of('B')}-round_1": (1, "RuntimeError: broken")}
    ledger = start(tmp_path, rounds=3)
    assert ledger.selection.out == {"B": ("failed", "RuntimeError: broken")}
    assert [variant.overrides for variant in ledger.selection.runnable()] == [(), ("b=1", "c=1")]
    assert_each_measured_its_variant(ledger)
    # The rounds of the others stay: when it still fails, that is tried twice.
    fake.started.clear()
    start(tmp_path, rounds=3)
    assert len(fake.started) == 2
    fake.broken = {f"timings-{slug_of('base')}-round_1": (1, "RuntimeError: broken")}
    with pytest.raises(UserError, match="ladder: the reference 'base' does not run: RuntimeError"):
        start(tmp_path / "other", rounds=3)


def test_a_timing_that_fails_after_the_first_round_is_tried_once_more(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = fake.finished
    ends: list[Path] = []

    def once(process: FakeProcess) -> ProcessResult:
        ends.append(process._log)
        if process._log.name == f"timings-{slug_of('base')}-round_1.txt" and ends.count(process._log) == 1:
            return ProcessResult(1, 1.0, process._log)
        return finished(process)

    monkeypatch.setattr(fake, "finished", once)
    ledger = start(tmp_path, rounds=3)
    assert (ledger.selection.out, len(fake.started)) == ({}, 10)
    assert (ledger.total(), sum(ledger.missing().values())) == (9, 0)


def test_every_measurement_has_the_weights(tmp_path: Path) -> None:
    """Of `finetune` they choose the model."""
    weights = "weights=timm:vit"
    ledger = start(tmp_path, typed=[weights], runs_at_most=8, margin=50, numerics_steps=2, gradients=True)
    for variant in ledger.selection.runnable():
        assert weights in given(ledger.folder.timing_file(variant, 0))
        assert weights in given(ledger.folder.file("numerics", variant))
    assert weights in given(ledger.trainings.planned()[0].path / "summary.json")
    assert weights in given(ledger.folder.file("gradients", ledger.selection.variants()[0]))


def test_what_could_not_be_measured_is_in_the_record(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"numerics-{slug_of('B')}": (2, "error: parallel.x: no"), "gradients-": (1, "RuntimeError: g")}
    record = collect(start(tmp_path, gradients=True, numerics_steps=2), "x")
    assert record.unmeasured == {"B: rounding": "parallel.x: no", "gradients": "RuntimeError: g"}
    assert [variant.status for variant in record.variants] == ["measured"] * 3


def test_rounding_is_that_of_variants_with_one_rank(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """One process would measure the others without what their ranks do."""
    half = Variant(name="half the traffic", overrides=("parallel=ddp", "parallel.compression=fp16"), ranks=2)
    ledger = start(tmp_path, ladder_of(half, LADDER.variants[1]), mode="crossed", numerics_steps=2)
    assert len([each for each in fake.started if each[0] == "ledger numerics"]) == 2
    found = [variant.name for variant in collect(ledger, "x").variants if variant.numerics is not None]
    assert found == ["base", "C"]
    assert sum(ledger.missing().values()) == 0


def test_what_cannot_be_trained_by_itself_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timed on top of others it runs."""

    def composed(overrides: Sequence[str]) -> RunConfig:
        if "c=1" in overrides and "b=1" not in overrides:
            raise UserError("c: 1 needs b=1")
        return config_of()

    settings = LadderSettings(**{**SETTINGS, "rounds": 1, "runs_at_most": 8, "margin": 50})
    running.run_ladder(running.Experiment(config_of(), [], [], composed), LADDER, settings, tmp_path, dry_run=False)
    record = read_record(tmp_path / "ledger.json")
    assert record.unmeasured == {"C: accuracy": "c: 1 needs b=1"}
    assert [effect.variant for effect in record.accuracy.effects] == ["B"]
    assert "C: not trained: c: 1 needs b=1" in capsys.readouterr().out


def test_trainings_have_as_many_ranks_as_timings(tmp_path: Path, fake: type[FakeProcess]) -> None:
    two = (Variant(name="B", overrides=("b=1",)), Variant(name="three", overrides=("c=1",), ranks=3))
    start(tmp_path, ladder_of(*two), mode="crossed", ranks=2, rounds=1, runs_at_most=6, margin=50)
    trained = {fake.ranks[place] for place, (verb, *_) in enumerate(fake.started) if verb == "train"}
    assert trained == set(fake.ranks) == {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cumulative", "crossed"])
def test_what_the_experiment_cannot_have_is_not_timed(
    mode: Mode, tmp_path: Path, fake: type[FakeProcess], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a dry run and in the ledger itself; it is below no other variant."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ladder = ladder_of(Variant(name="B", overrides=("c=conv",)), LADDER.variants[1])
    why = "c: conv is for a ResNet; use c=1"
    assert work(tmp_path, ladder, mode=mode, dry_run=True) == 0
    assert f"B: not run, {why}" in capsys.readouterr().out
    assert work(tmp_path, ladder, mode=mode) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"B: cannot run: {why}" in lines
    assert not [started for started in fake.started if "c=conv" in started]
    # The pieces of work that are announced are those that there are.
    counts = [line.partition(" s  (")[2].partition(",")[0] for line in lines if " s  (" in line]
    assert counts == [f"{i + 1} of {len(counts)}" for i in range(len(counts))]
    found = {variant.name: variant for variant in read_record(tmp_path / "ledger.json").variants}
    assert (found["B"].status, found["B"].reason, found["B"].timing) == ("cannot run", why, None)
    assert "c=conv" not in found["C"].overrides


def test_a_variant_for_the_cpu_is_checked_there() -> None:
    overrides = ("runtime.device=cpu", "speed.allocator=keep")
    variant = timed_variants(ladder_of(Variant(name="B", overrides=overrides)), "cumulative")[1]
    cuda = torch.device("cuda")
    assert refusal(variant, lambda overrides: config_of(*overrides), cuda) is None
    assert "keep needs CPU" in str(refusal(variant, lambda overrides: config_of(*overrides[1:]), cuda))


@pytest.mark.parametrize(
    ("typed", "settings", "changed", "line"),
    [
        (("weights=/nowhere",), {}, {}, r"weights: .*nowhere is neither a weights file"),
        (("seed=3", "resume=never", "run_dir=x"), {}, {}, r"^run_dir: .*\nseed: .*use first_seed=\nresume: .*leave it"),
        # Both trainings of a pair have its seed, and would be identical.
        ((), {}, {"variants": (Variant(name="luck", overrides=("seed=1",)),)}, "^seed: .*use first_seed=$"),
        ((), {}, {"baseline": Variant(name="base", needs="cuda")}, "the reference 'base' does not run: needs CUDA"),
        ((), {}, {"baseline": Variant(name="base", overrides=("c=conv",))}, "the reference 'base' does not run: c: "),
        ((), {}, {"variants": (Variant(name="old", tree="x"),)}, "mode: 'old' has its own tree .*; use crossed"),
        (
            (), {"mode": "crossed"}, {"variants": (Variant(name="old", tree="/nowhere"),)},
            "ladder: 'old': /nowhere is no checkout of pycls_fast; give the folder of one as its tree",
        ),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_carried_out(
    typed: tuple[str, ...], settings: dict[str, str], changed: dict[str, object], line: str, tmp_path: Path,
    fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for dry_run in (True, False):
        with pytest.raises(UserError, match=line):
            work(tmp_path / "report", LADDER.model_copy(update=changed), typed=typed, dry_run=dry_run, **settings)
    assert not fake.started
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("tracker", "more"), [("wandb", ["trackers=[]"]), ("tensorboard", [])])
def test_trainings_are_not_tracked(
    tracker: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tracker the key is left out: a variant may run an older checkout, which does not know it."""
    begun: list[Ledger] = []

    def begin(ledger: Ledger, name: str) -> None:
        begun.append(ledger)
        raise KeyboardInterrupt

    monkeypatch.setattr("pycls_fast.ledger.ladder.run._work", begin)
    typed = [f"trackers=[{tracker}]"]
    assert work(tmp_path, typed=typed) == 3
    assert [ledger.typed for ledger in begun] == [[*typed, *more]]


@pytest.mark.slow
def test_a_variant_runs_the_code_of_its_checkout(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old/pycls_fast").mkdir(parents=True)
    (tmp_path / "old/pycls_fast/__main__.py").touch()
    # This code refuses the override; the other checkout may have it.
    ladder = ladder_of(Variant(name="old", tree="old", overrides=("c=conv",)), Variant(name="new"))
    state = {"commit": "0123456789abcdef", "changed": True}
    monkeypatch.setattr(collecting, "git_state", {tmp_path / "old": state}.get)
    assert work(tmp_path / "report", ladder, mode="crossed", rounds=1) == 0
    assert fake.trees == [OURS, tmp_path / "old", OURS]
    found = read_record(tmp_path / "report" / "ledger.json").variants[1]
    assert (found.tree, vars(found.git), found.note) == ("old", state, "the code in old (commit 0123456789, changed)")
    (tmp_path / "old" / "pycls_fast" / "__init__.py").write_text("# changed")
    with pytest.raises(UserError, match="holds a ledger with different code"):
        work(tmp_path / "report", ladder, mode="crossed", rounds=1)


@pytest.mark.parametrize("name", ["charts", "index.html"])
def test_what_cannot_be_written_is_one_line(name: str, tmp_path: Path) -> None:
    """As on a full disk."""
    if name == "index.html":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"^output: {tmp_path}.* \(.*\)"):
        work(tmp_path)


def test_names_that_look_alike_in_paths_share_nothing(tmp_path: Path, fake: type[FakeProcess]) -> None:
    names = ("基线", "注意力", "wd+", "WD -", "w" * 300)
    base, *variants = (Variant(name=name, overrides=(f"c={i}",) if i else ()) for i, name in enumerate(names))
    ledger = start(tmp_path, ladder_of(*variants, baseline=base), mode="crossed")
    assert len(fake.started) == 10
    assert_each_measured_its_variant(ledger)


def test_the_same_folder_whatever_its_variants_are_against(tmp_path: Path) -> None:
    start(tmp_path, mode="crossed")
    saved = json.loads((tmp_path / "plan.json").read_text())["ladder"]
    assert not [each for each in (saved["baseline"], *saved["variants"]) if "against" in each]
    b, c = LADDER.variants
    record = collect(start(tmp_path, ladder_of(b, c.model_copy(update={"against": "B"})), mode="crossed"), "x")
    assert [variant.before for variant in record.variants] == [None, "base", "B"]
