"""Ladders: ordered lists of changes to an experiment, in `configs/ladders/NAME.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pycls_fast.choice import Section
from pycls_fast.config.compose import validate, with_long_key
from pycls_fast.config.keys import as_typed
from pycls_fast.config.run import LADDERS, RunConfig
from pycls_fast.errors import UserError, did_you_mean, one_of, refusing
from pycls_fast.files import user_path
from pycls_fast.models.choices import ViTModel
from pycls_fast.reading import read_yaml
from pycls_fast.speed import SWITCHES
from pycls_fast.values import AUTO, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Size, Text

# So that a key has one name.
Overrides = Annotated[tuple[Text, ...], AfterValidator(lambda given: tuple(map(with_long_key, given)))]
Mode = Literal["crossed", "cumulative"]


class Variant(Section):
    """One setting to be measured. In a ladder's file: a change to the baseline, as overrides of a command line.

    `ranks` is the number of processes of this variant, of those against it and, in a cumulative ladder, of those after
    it. `needs` names the only device on which it runs at a useful speed. `image_size_ratio` scales the image, in whole
    patches, and `batch_ratio` the global batch. `against` names the variant above that this one is a change of, if that
    is not the baseline: the two are compared, and selecting this one also selects the other. `tree` is the folder of
    another checkout (a git worktree, say) whose code this variant runs.

    In the plan of a ladder (`ledger.ladder.plan`): `overrides` are all that are appended to the experiment's, `ranks`
    is set, and `against` is the variant that this one is one step away from; None for the first.
    """

    name: Text
    overrides: Overrides = ()
    ranks: PositiveInt | None = None
    needs: Literal["cuda"] | None = None
    image_size_ratio: PositiveFloat | None = None
    batch_ratio: PositiveFloat | None = None
    against: Text | None = None
    tree: Text | None = None
    note: str = ""


class Ladder(Section):
    """A baseline and the changes to it, in order.

    `mode` is that of its timings without `mode=`. `variants: switches` in a file stands for every value of every switch
    (`of_switches`).
    """

    description: Text
    source: str = ""
    mode: Mode = "crossed"
    baseline: Variant
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_has_its_name(self) -> Self:
        above: list[str] = []
        for variant in self.variants:
            if variant.name in (self.baseline.name, *above):
                raise ValueError(f"more than one variant is called {variant.name}")
            # In this order a change replaces values of what it is a change of.
            if variant.against is not None and variant.against not in above:
                near = did_you_mean(variant.against, above)
                raise ValueError(f"'{variant.name}' is against {variant.against}, which is no variant above it{near}")
            above.append(variant.name)
        return self


class Repeats(Section):
    """How often each variant of a ladder is measured."""

    runs_at_most: NonNegativeInt | None = None
    """The most trainings of the variants that are combined, and of each one that is compared by itself; null: 64, with
    more than 8 variants 96 and more; 0: none."""
    margin: PositiveFloat = 0.25
    """The loss of top-1 that does not matter, in points."""
    strict: bool = False
    """Whether at most 5% of ladders, not of variants, may call a variant free that costs the margin."""
    first_seed: NonNegativeInt = 0
    """The seed of the first training."""
    rounds: PositiveInt = 3
    """Timings of each variant, in turns."""
    seconds: NonNegativeFloat = 2.0
    """The shortest timing; its warm-up lasts at least half of it."""
    numerics_steps: PositiveInt | None = 20
    """Compare logits and gradients with float64 before training and after this many steps; null: do not."""
    jobs: PositiveInt = 1
    """Training runs at a time; on CUDA each has its own GPUs."""
    ranks: PositiveInt = 1
    """Processes of each timing and training, unless the ladder says how many."""
    gradients: bool = True
    """Count the first variant's gradients against float16's limits."""
    steps: PositiveInt = 10
    """The least number of steps in a timing."""
    warmup_steps: NonNegativeInt = 5
    """The least number of steps before it."""


class LadderSettings(Repeats):
    """What a ladder measures."""

    mode: Mode = "crossed"
    """What is timed: each variant alone, or on top of those before it."""

    @property
    def trains(self) -> bool:
        return self.runs_at_most != 0


def read_ladder(name: str, folders: Sequence[Path]) -> Ladder:
    """Read a ladder by its name in `configs/ladders/`, or by the path of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        file = user_path(name)
    else:
        there = {file.stem: file for folder in reversed(folders) for file in sorted((folder / LADDERS).glob("*.yaml"))}
        one_of("ladder", name, sorted(there), more=", or the path of a YAML file")
        file = there[name]
    with refusing(f"ladder: {file} cannot be read", OSError, ValueError):
        values = read_yaml(file)
    if isinstance(values, dict) and values.get("variants") == "switches":
        values["variants"] = [variant.model_dump() for variant in of_switches()]
    return validate(Ladder, values, lambda key: f"the ladder {file}")


def ladder_of(switches: Sequence[str]) -> Ladder:
    """A ladder on top of an experiment as it is, from which the variants of these switches will be selected: overrides
    (`optim.lr=0.1`), values of groups (`precision.amp_bf16`), or names of switches (`compile`), of which each value is
    a variant."""
    named = {text for name in SWITCHES for text in (name, f"speed.{name}")}
    own = []
    for switch in dict.fromkeys(switches):
        if switch not in named and ("=" in switch or "." in switch):
            override = switch if "=" in switch else "=".join(switch.split(".", 1))
            own.append(Variant(name=switch, overrides=(override,)))
    return Ladder(
        description=f"what {', '.join(switches)} would change",
        baseline=Variant(name="as it is"),
        variants=(*own, *of_switches()),
    )


def of_switches() -> Iterator[Variant]:
    """Every value of every switch, alone on top of the plain twins; one that needs other settings is compared with a
    variant of only those."""
    every = [
        (switch, value, (f"speed.{switch.name}={value}", *switch.needs.get(value, "").split()))
        for switch in SWITCHES.values()
        for value in switch.values[1:]
    ]
    # What is needed by others comes before them.
    found = sorted(every, key=lambda each: len(each[2]))
    names = {frozenset(overrides): f"{switch.name} {value}" for switch, value, overrides in found}
    for switch, value, overrides in found:
        needed = overrides[1:]
        needs: Literal["cuda"] | None = "cuda" if switch.device.get(value) == "cuda" else None
        if needed and frozenset(needed) not in names:
            # No other variant has just these settings.
            names[frozenset(needed)] = f"{switch.name} {switch.reference}"
            note = f"with the settings that {value} needs"
            yield Variant(name=names[frozenset(needed)], overrides=needed, needs=needs, note=note)
        yield Variant(
            name=f"{switch.name} {value}",
            overrides=overrides,
            needs=needs,
            against=names[frozenset(needed)] if needed else None,
            note=switch.note.get(value, ""),
        )


def for_experiment(ladder: Ladder, config: RunConfig) -> Ladder:
    """The ladder with sizes of images, in whole patches of the experiment's model, and of batches for ratios."""
    patch = config.model.patch_size if isinstance(config.model, ViTModel) else 1

    def sized(variant: Variant) -> Variant:
        overrides = list(variant.overrides)
        if variant.image_size_ratio is not None:
            sides = (round(s * variant.image_size_ratio / patch) * patch for s in config.data.image_size)
            overrides.append(f"data.image_size={as_typed(Size(*sides).typed)}")
        if variant.batch_ratio is not None:
            if config.data.global_batch_size == AUTO:
                raise UserError(
                    f"data.global_batch_size: auto cannot be scaled (batch_ratio of '{variant.name}'); give a number"
                )
            overrides.append(f"data.global_batch_size={round(config.data.global_batch_size * variant.batch_ratio)}")
        return variant.model_copy(update={"overrides": tuple(overrides)})

    variants = tuple(map(sized, ladder.variants))
    return ladder.model_copy(update={"baseline": sized(ladder.baseline), "variants": variants})
