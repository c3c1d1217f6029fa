"""Trainings from their plan to its words: the design, interruptions, failures, what is refused, the page."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycls_fast.config.ladder import Ladder, Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.collect import collect
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import Family, check_runs, combination, families, find_factors
from pycls_fast.ledger.ladder.processes import FAILED
from pycls_fast.ledger.report.page import ledger_page
from pycls_fast.ledger.report.record import Record
from pycls_fast.ledger.report.text import headline, remarks
from tests.unit.ledger.stand_ins import FakeProcess, made, make_run, run

NAMES = "abcdefgh"
LADDER = Ladder(
    description="eight changes",
    baseline=Variant(name="base"),
    variants=tuple(Variant(name=name, overrides=(f"{name}=1",)) for name in NAMES),
)


def planned(ladder: Ladder = LADDER, **settings: Any) -> list[list[Family]]:
    """The families of a ladder whose combinations are all allowed."""
    factors = find_factors(ladder, [v.name for v in ladder.variants], lambda variant: None)
    return families(ladder, factors, settings.get("runs_at_most"), 0)


def test_every_variant_is_on_in_half_of_the_runs_and_each_pair_is_a_mirror() -> None:
    (((family,),)) = planned()
    assert len(family.pairs) == 32
    assert all(set(a) | set(b) == set(NAMES) and not set(a) & set(b) for a, b in (pair.on for pair in family.pairs))
    x = np.array([[(name in pair.on[0]) * 2 - 1 for name in NAMES] for pair in family.pairs])
    np.testing.assert_array_equal(x.T @ x, 32 * np.eye(8))
    np.testing.assert_allclose(family.errors, 2 / 8)
    assert all(set(pair.on[0]) == set(NAMES) for pair in family.pairs[: family.pilot])
    assert len({pair.seed for pair in family.pairs}) == 32


def test_many_variants_have_four_first_pairs_and_stay_told_apart() -> None:
    many = [f"v{i}" for i in range(15)]
    ladder = LADDER.model_copy(update={"variants": tuple(Variant(name=name) for name in many)})
    for runs in (96, 48, 34):
        (((family,),)) = planned(ladder, runs_at_most=runs)
        assert len(family.pairs) == runs // 2
        assert family.pilot == min(4, runs // 2 - 15)
        assert [set(pair.on[0]) for pair in family.pairs[: family.pilot]] == [set(many)] * family.pilot
        x = np.array([[(name in pair.on[0]) * 2 - 1 for name in many] for pair in family.pairs])
        assert np.linalg.matrix_rank(x) == 15
        assert len({pair.seed for pair in family.pairs}) == runs // 2


@pytest.mark.parametrize("steps", [2, 4, 6])
def test_changes_of_changes_are_told_apart(steps: int) -> None:
    variants = [Variant(name="v0", overrides=("a0=1",))]
    variants += [Variant(name=f"v{i}", overrides=(f"a{i}=1",), against=f"v{i - 1}") for i in range(1, steps)]
    groups = planned(LADDER.model_copy(update={"variants": tuple(variants)}))
    check_runs(groups)
    assert (np.diff(groups[0][0].errors) > 0).all()


def test_alternatives_are_compared_with_none_of_them_as_well() -> None:
    """With k of them and each pair of levels as often, errors would be sqrt(k) times those of the others."""
    levels = tuple(Variant(name=f"z{i}", overrides=(f"z={i}",)) for i in range(4))
    ladder = LADDER.model_copy(update={"variants": (*levels, *LADDER.variants[:4])})
    errors = planned(ladder)[0][0].errors * math.sqrt(64) / 2
    assert errors[:4].max() < 1.3 * math.sqrt(4)
    assert errors[4:].max() < 1.1


def test_too_few_trainings_for_alternatives_are_refused() -> None:
    variants = tuple(Variant(name=name, overrides=(f"a={name}",)) for name in NAMES[:6])
    few, enough = (planned(LADDER.model_copy(update={"variants": variants}), runs_at_most=runs) for runs in (14, 28))
    with pytest.raises(UserError, match=r"^runs_at_most: 14 trainings say nothing about 6 variants; use 28 or more"):
        check_runs(few)
    check_runs(enough)
    # A variant that is left out may make too few of them.
    assert np.isfinite(few[0][0].errors).all()


def test_many_variants_are_not_paired_in_silence(tmp_path: Path) -> None:
    """Those of 40 take more than a minute."""
    said: list[str] = []
    for count in (8, 9):
        variants = tuple(Variant(name=name, overrides=(f"{name}=1",)) for name in "abcdefghi"[:count])
        ledger = made(tmp_path, LADDER.model_copy(update={"variants": variants}), mode="crossed", runs_at_most=64)
        ledger.say = said.append
        ledger.plan_trainings()
    assert said == ["composing the pairs of 9 variants, to know which cannot be on together"]


def test_alternatives_are_never_on_together_and_children_need_their_parent() -> None:
    variants = (
        Variant(name="bf16", overrides=("precision=amp_bf16",)),
        Variant(name="fp8", overrides=("precision.name=fp8",)),
        Variant(name="compile", overrides=("speed.compile=model",)),
        Variant(name="gelu", overrides=("speed.gelu=polynomial", "speed.compile=model"), against="compile"),
        # A change of a change may replace the first one's value.
        Variant(name="blocks", overrides=("speed.gelu=torch", "speed.compile=blocks"), against="gelu"),
        Variant(name="two", overrides=("x=1",), ranks=2),
        Variant(name="high", overrides=("lr=2",), ranks=1),
        Variant(name="low", overrides=("optim.lr=1",)),
    )
    ladder = LADDER.model_copy(update={"variants": variants})
    crossed, alone = planned(ladder)
    assert crossed[0].names == ("bf16", "fp8", "compile", "gelu", "blocks", "high", "low")
    assert [family.names for family in alone] == [("two",)]
    halves = [set(on) for pair in crossed[0].pairs for on in pair.on]
    assert not any({"bf16", "fp8"} <= half or {"high", "low"} <= half for half in halves)
    assert all("compile" in half for half in halves if "gelu" in half)
    assert all("gelu" in half for half in halves if "blocks" in half)
    assert all(sum(name in half for half in halves) >= 8 for name in crossed[0].names)
    # What the first pairs differ by is chance, not which of the alternatives is on.
    first = ("bf16", "compile", "gelu", "blocks", "high")
    assert {pair.on for pair in crossed[0].pairs[: crossed[0].pilot]} == {(first, ())}
    assert alone[0].pairs[3].on == (("two",), ())


def test_a_baseline_may_have_older_code() -> None:
    variants = (Variant(name="now"), Variant(name="larger", overrides=("a=2",), against="now"))
    ladder = LADDER.model_copy(update={"baseline": Variant(name="before", tree="../before"), "variants": variants})
    now, larger = planned(ladder)[0]
    trees = {on: combination(ladder, on).tree for family in (now, larger) for on in family.pairs[0].on}
    assert trees == {(): "../before", ("now",): None, ("now", "larger"): None}


class Training(FakeProcess):
    """Writes a run whose number of wrong images follows its variants: "a" costs 2 points, the seed moves all."""

    # Settings, or seeds, with which trainings fail.
    breaking: tuple[str, ...] = ()
    # Those that change no bit of the first steps, and those that change no prediction.
    alike: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()

    def __init__(self, verb: str, arguments: list[str], **more: Any) -> None:
        super().__init__(verb, arguments, **more)
        if "run_dir" in dict(a.partition("=")[::2] for a in arguments) and set(self.breaking) & set(arguments):
            self._status = 1
            folder = next(a for a in arguments if a.startswith("run_dir=")).removeprefix("run_dir=")
            # As one that is refused leaves it.
            shutil.rmtree(folder)

    def _write(self, file: Path, arguments: list[str]) -> None:
        own = [a for a in arguments if a in {f"{name}=1" for name in NAMES}]
        if file.name == "summary.json":
            own = [a for a in own if a not in self.inert]
            seed = next(int(a.removeprefix("seed=")) for a in arguments if a.startswith("seed="))
            generator = np.random.default_rng([seed, len(own)])
            wrong = 500 + 40 * (seed % 3) + 200 * ("a=1" in arguments) + int(generator.integers(0, 12))
            make_run(file.parent, wrong, 10_000)
        elif "numerics" in str(file.parent):
            file.write_text(json.dumps({"errors": [], "weights": str([a for a in own if a not in self.alike])}))
        else:
            super()._write(file, arguments)


@pytest.fixture
def trained(fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch) -> type[Training]:
    """Processes of ledgers are stand-ins whose trainings have a score."""
    del fake
    monkeypatch.setattr("pycls_fast.ledger.ladder.ledger.Process", Training)
    monkeypatch.setattr(Training, "breaking", ())
    return Training


def crossed(folder: Path, **settings: Any) -> Ledger:
    """A ledger that is not open."""
    return made(folder, LADDER, **{"mode": "crossed", "runs_at_most": None, "rounds": 1, **settings})


def work(ledger: Ledger) -> Record:
    """Let it work to its end."""
    with ledger.folder.opened(ledger.plan()):
        run(ledger)
        return collect(ledger, "x")


def words(record: Record) -> Mapping[str, object]:
    """By variant, its word."""
    return {effect.variant: effect.word for effect in record.accuracy.effects}


def test_a_loss_is_found_the_rest_is_free_and_an_interrupted_ledger_ends_alike(
    trained: type[Training], tmp_path: Path
) -> None:
    whole = work(crossed(tmp_path / "whole"))
    assert words(whole) == {"a": "costs", **dict.fromkeys("bcdefgh", "free")}
    # Everything is settled at the first look.
    assert len(whole.accuracy.runs) - 32 in range(9)
    total = sum(effect.difference for effect in whole.accuracy.effects)
    assert whole.accuracy.fit.together.difference == pytest.approx(total)

    stopped = crossed(tmp_path / "stopped")
    start = len(trained.started)

    def say(text: str) -> None:
        # Twenty trainings in, Ctrl-C.
        if len(trained.started) - start > 9 + 20:
            stopped.stop.name = "SIGINT"

    stopped.say = say
    with stopped.folder.opened(stopped.plan()), pytest.raises(KeyboardInterrupt):
        run(stopped)
    partly = collect(stopped, "x", finished=False)
    assert set(words(partly).values()) <= {None}
    again = work(crossed(tmp_path / "stopped"))
    assert again.accuracy == whole.accuracy
    # The plan is fixed after a verdict.
    with pytest.raises(UserError, match="a ledger with different runs_at_most; choose another folder"):
        work(crossed(tmp_path / "stopped", runs_at_most=128))

    page = ledger_page(whole, [])
    assert headline(whole) == (
        "7 of 8 variants are free, 1 costs accuracy (a: 2.00 points): a loss of 0.25 points matters, on x."
    ).replace("2.00", f"{-whole.accuracy.effects[0].difference:.2f}")
    assert "free: at most" in page


def test_one_that_breaks_training_is_counted_and_the_others_are_decided(
    trained: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that needs it."""
    monkeypatch.setattr(trained, "breaking", ("c=1",))
    variants = tuple(v.model_copy(update={"against": "c"}) if v.name == "d" else v for v in LADDER.variants)
    ladder = LADDER.model_copy(update={"variants": variants})
    record = work(made(tmp_path, ladder, mode="crossed", runs_at_most=None, rounds=1))
    assert "trainings failed with it" in record.accuracy.broken["c"]
    assert set(record.accuracy.broken) == {"c", "d"}
    assert words(record) == {"a": "costs", **dict.fromkeys("befgh", "free")}
    # Trainings of the design with it are still told.
    assert {run.failed is not None for run in record.accuracy.runs if "c" in run.on} == {True}
    failed = list(tmp_path.rglob(FAILED))
    assert sum("c" in run.on for run in record.accuracy.runs) == len(failed)
    # It is tried again, as docs/ledger.md says.
    for file in failed:
        file.unlink()
    monkeypatch.setattr(trained, "breaking", ())
    record = work(made(tmp_path, ladder, mode="crossed", runs_at_most=None, rounds=1))
    assert (record.accuracy.broken, words(record)["c"]) == ({}, "free")


def test_failures_that_no_variant_explains(
    trained: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of two that failed is left out, and told; more of them end the ledger."""
    monkeypatch.setattr(trained, "breaking", ("seed=9",))
    record = work(crossed(tmp_path / "one"))
    assert words(record) == {"a": "costs", **dict.fromkeys("bcdefgh", "free")}
    assert "2 trainings failed and are left out." in remarks(record)

    monkeypatch.setattr(trained, "breaking", ("seed=9", "seed=10"))
    with pytest.raises(UserError, match=r"4 trainings fail, .* \([a-h] may: [12] of 16 trainings failed with"):
        work(crossed(tmp_path / "two"))
    # They were all before the first look.
    assert len(list((tmp_path / "two").rglob("summary.json"))) + 4 == 32


def test_what_cannot_be_decided_is_refused_after_the_pilot(trained: type[Training], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trainings show differences of"):
        work(crossed(tmp_path, margin=0.012))
    assert len(list(tmp_path.rglob("summary.json"))) == 8
    # The pilot counts, and a wider margin is the way out.
    assert words(work(crossed(tmp_path)))["a"] == "costs"


def test_what_trainings_can_show_of_alternatives_is_promised(trained: type[Training], tmp_path: Path) -> None:
    """They are on less often than the others, so that their effects have larger errors."""
    alternatives = [v.model_copy(update={"overrides": (*v.overrides, f"z={v.name}")}) for v in LADDER.variants[:2]]
    ladder = LADDER.model_copy(update={"variants": (*alternatives, *LADDER.variants[2:])})
    said: list[str] = []
    ledger = made(tmp_path, ladder, mode="crossed", runs_at_most=None, rounds=1)
    ledger.say = said.append
    record = work(ledger)
    (promise,) = (line for line in said if "smallest difference" in line)
    best, worst = map(float, promise.removesuffix(" points").rpartition(" is ")[2].split(" to "))
    effects = record.accuracy.effects if record.accuracy else []
    errors = {effect.variant: effect.error for effect in effects}
    assert worst / best == pytest.approx(max(errors["a"], errors["b"]) / min(errors.values()), rel=0.1)
    assert worst / best > 1.4


def test_what_changes_nothing_is_identical_and_not_tested(
    trained: type[Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "alike", ("c=1", "d=1"))
    monkeypatch.setattr(trained, "inert", ("c=1", "d=1"))
    record = work(crossed(tmp_path / "a", numerics_steps=2))
    assert words(record) == {**dict.fromkeys("cd", "identical"), "a": "costs", **dict.fromkeys("befgh", "free")}
    # But for screening.
    assert [run.on for run in record.accuracy.runs if {"c", "d"} & set(run.on)] == [["c", "d"]]
    # Whoever changes something only later is found out by one training, and tested like all others.
    monkeypatch.setattr(trained, "inert", ("c=1",))
    assert words(work(crossed(tmp_path / "b", numerics_steps=2))) == {"a": "costs", **dict.fromkeys("bcdefgh", "free")}
