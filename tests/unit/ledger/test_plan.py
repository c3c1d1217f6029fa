"""What a ladder's variants are made of, which are picked, mistakes in its file; and the keys of `pycls-fast ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.commands import measure
from pycls_fast.commands.measure import LedgerVerb
from pycls_fast.config import launch, this_command
from pycls_fast.config.compose import as_hydra_overrides
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.ladder import Ladder, Variant, for_experiment, ladder_of, read_ladder
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import run
from pycls_fast.ledger.ladder.plan import combination, merged, pick, timed_variants, with_parents
from pycls_fast.models.choices import ViTModel
from tests.factories import config_of

LADDER = Ladder(
    description="three changes",
    baseline=Variant(name="base", overrides=("speed=reference", "precision=fp32")),
    variants=(
        Variant(name="half", overrides=("precision=amp_bf16",)),
        Variant(name="two", overrides=("parallel=ddp",), ranks=2),
        Variant(name="fused", overrides=("speed.optimizer=fused",)),
    ),
)


def test_cumulative_variants_stand_on_each_other() -> None:
    made = timed_variants(LADDER, "cumulative")
    assert [(a.name, a.against, a.ranks) for a in made] == [
        ("base", None, 1), ("half", "base", 1), ("two", "half", 2), ("fused", "two", 2),
    ]  # fmt: skip
    assert made[1].overrides == ("speed=reference", "precision=amp_bf16")
    assert made[3].overrides == ("speed=reference", "precision=amp_bf16", "parallel=ddp", "speed.optimizer=fused")


def test_what_cannot_run_is_listed_and_not_below_the_others() -> None:
    made = timed_variants(LADDER, "cumulative", impossible={"two"})
    assert made[2].overrides[-1] == "parallel=ddp"
    assert (made[3].against, made[3].ranks) == ("half", 1)
    assert made[3].overrides == ("speed=reference", "precision=amp_bf16", "speed.optimizer=fused")


def test_alone_they_stand_on_the_baseline() -> None:
    base = LADDER.baseline.model_copy(update={"ranks": 3})
    made = timed_variants(LADDER.model_copy(update={"baseline": base}), "crossed")
    assert [(a.against, a.ranks) for a in made] == [(None, 3), ("base", 3), ("base", 2), ("base", 3)]
    assert made[3].overrides == ("speed=reference", "precision=fp32", "speed.optimizer=fused")


def test_the_last_of_two_overrides_stands() -> None:
    assert merged(["model=a", "++x=1"], ["y=2"], ["model=b", "x=3"]) == ("y=2", "model=b", "x=3")
    assert merged(["precision.name=fp32"], ["precision=amp_bf16"]) == ("precision=amp_bf16",)


@pytest.mark.parametrize("choice", ["data=cifar", "optim=lion"])
def test_a_measurement_is_given_what_was_typed(choice: str) -> None:
    """Also of a class without a file, which another choice replaces."""
    typed = as_hydra_overrides([choice, "data.root=/x"], [CONFIGS])
    assert config_of(*merged(typed, ["seed=1"])) == config_of(choice, "data.root=/x", "seed=1")
    for overrides in ((*typed, "data=folder"), merged(typed, ["data=folder"])):
        assert config_of(*overrides).data.source == "folder"


def test_variants_are_picked_by_name_or_switch() -> None:
    assert pick(LADDER, ()) == LADDER
    assert [variant.name for variant in pick(LADDER, ("optimizer", "half")).variants] == ["half", "fused"]
    with pytest.raises(UserError, match="did you mean fused"):
        pick(LADDER, ["fusde"])


STEPS = Ladder(
    description="one change behind the other",
    baseline=Variant(name="base"),
    variants=(
        Variant(name="one", overrides=("a=1",)),
        Variant(name="two", overrides=("b=1", "a=1"), against="one"),
        Variant(name="three", overrides=("c=1", "b=1", "a=1"), against="two", note="slow"),
        Variant(name="other", overrides=("d=1",)),
        Variant(name="rate", overrides=("lr=1",)),
    ),
)


@pytest.mark.parametrize(
    ("name", "picked"),
    [
        ("c", ["one", "two", "three"]),
        ("two", ["one", "two"]),
        # What it only repeats is not its own.
        ("a", ["one"]),
        ("lr", ["rate"]),
    ],
)
def test_a_variant_brings_along_what_it_is_against(name: str, picked: list[str]) -> None:
    assert [variant.name for variant in pick(STEPS, [name]).variants] == picked


def test_a_change_of_a_change_is_timed_on_top_of_it() -> None:
    """As it is trained, also if it does not repeat what the other one sets."""
    twice = Variant(name="twice", ranks=2, against="two")
    more = Variant(name="more", overrides=("e=1",), against="twice")
    ladder = STEPS.model_copy(update={"variants": (*STEPS.variants, twice, more)})
    timed = timed_variants(ladder, "crossed")
    assert [each.against for each in timed] == [None, "base", "one", "two", "base", "base", "two", "twice"]
    for made in (timed[-1], combination(ladder, with_parents(ladder, ["more"]))):
        assert (made.overrides, made.ranks) == (("b=1", "a=1", "e=1"), 2)


@pytest.mark.parametrize(
    ("switch", "picked"),
    [
        ("precision.amp_bf16", {"precision.amp_bf16": ("precision=amp_bf16",)}),
        ("optim.lr=0.1", {"optim.lr=0.1": ("optim.lr=0.1",)}),
        ("layout", {"layout batch_second": ("speed.layout=batch_second",)}),
        ("speed.layout", {"layout batch_second": ("speed.layout=batch_second",)}),
    ],
)
def test_a_question_about_the_experiment_as_it_is(switch: str, picked: dict[str, tuple[str, ...]]) -> None:
    ladder = pick(ladder_of([switch]), [switch])
    assert {variant.name: variant.overrides for variant in ladder.variants} == picked
    assert ladder.baseline.overrides == ()


def test_an_option_in_a_folder_of_ones_own_is_no_folder_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cats").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Variant(name="both", overrides=("data=cats", "lr=1")).overrides == ("data=cats", "optim.lr=1")


def test_a_larger_image_has_whole_patches() -> None:
    ladder = LADDER.model_copy(update={"variants": (Variant(name="larger", image_size_ratio=256 / 224),)})
    for name, overrides, size in (("vit_s16", ["data.root=/x"], 256), ("vit_digits", [], None)):
        config = config_of(*overrides, name=name)
        assert isinstance(config.model, ViTModel)
        patch, before = config.model.patch_size, config.data.image_size.height
        (override,) = for_experiment(ladder, config).variants[0].overrides
        found = int(override.removeprefix("data.image_size="))
        assert found % patch == 0
        assert found > before
        assert size is None or found == size
    config = config_of("data.root=/x", "data.image_size=[224,112]", name="vit_s16")
    assert for_experiment(ladder, config).variants[0].overrides == ("data.image_size=[256,128]",)


def test_a_batch_is_scaled_from_the_experiments() -> None:
    ladder = LADDER.model_copy(update={"variants": (Variant(name="both", image_size_ratio=2, batch_ratio=1.5),)})
    config = config_of("data.root=/x", "data.global_batch_size=96", name="vit_s16")
    assert for_experiment(ladder, config).variants[0].overrides == ("data.image_size=448", "data.global_batch_size=144")
    config = config_of("data.root=/x", "data.global_batch_size=auto", name="vit_s16")
    with pytest.raises(UserError, match=r"^data.global_batch_size: auto cannot be scaled .* 'both'\); give a number$"):
        for_experiment(ladder, config)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[", "mine.yaml cannot be read"),
        ("[{name: b, overide: [x=1]}]", "variants[0].overide: unknown key"),
        ("[{name: a}]", "more than one variant is called a"),
        ("[{name: cats}, {name: bat, against: cat}]", "is against cat, which is no variant above it; did you mean"),
        ("[{name: b, against: b}]", "is against b, which is no variant above it"),
        # In trainings the value of `large` would stand.
        ("[{name: small, against: large}, {name: large}]", "is against large, which is no variant above it"),
    ],
)
def test_a_ladder_with_a_mistake(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"description: x\nbaseline: {{name: a}}\nvariants: {text}\n")
    with pytest.raises(UserError) as caught:
        read_ladder(str(file), [CONFIGS])
    assert line in caught.value.lines[0]
    with pytest.raises(UserError, match="did you mean modern"):
        read_ladder("moderm", [CONFIGS])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ladder": "modern"}, "cumulative"),
        ({"ladder": "apex"}, "crossed"),
        ({"ladder": "modern", "mode": "crossed"}, "crossed"),
        ({"switches": ("precision.amp_bf16",)}, "crossed"),
    ],
)
def test_a_ladder_may_bring_its_mode(given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        run, "run_ladder", lambda experiment, ladder, settings, *_, **__: asked.append(settings.mode) or 0
    )
    monkeypatch.setattr(this_command, "config_folders", lambda: [CONFIGS])
    monkeypatch.setattr(this_command, "same_command", lambda **_: ([], []))
    monkeypatch.setattr(measure, "variant", lambda overrides, *_, **__: config_of(*overrides))
    assert LedgerVerb(**given)(config_of()) == 0
    assert asked == [expected]
    with pytest.raises(UserError, match="switches: the experiment has them already"):
        LedgerVerb(switches=("precision.fp32",))(config_of())


@pytest.mark.parametrize(("runs", "refused"), [(32, ["model.init"]), (0, [])])
def test_variants_are_checked_as_what_is_trained(
    runs: int, refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is trained, they are timed: LAMB's steps take the same time whatever the head begins with."""
    lines: list[str] = []

    def instead(experiment: run.Experiment, *_: Any, **__: Any) -> int:
        try:
            assert experiment.compose(["optim=lamb"]).optim.name == "lamb"
        except UserError as error:
            lines.extend(error.lines)
        return 0

    monkeypatch.setattr(run, "run_ladder", instead)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ledger.py", "--config-name", "vit_digits", f"runs_at_most={runs}"])
    try:
        with pytest.raises(SystemExit) as stopped:
            launch.command_line(LedgerVerb)
    finally:
        GlobalHydra.instance().clear()
    assert stopped.value.code == 0
    assert [line.partition(":")[0] for line in lines] == refused
