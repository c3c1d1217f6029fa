"""`ledger.json`: the one record of a ledger, which is written and read; and what its timings say together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from pycls_fast.config.ladder import Ladder, LadderSettings
from pycls_fast.errors import refusing
from pycls_fast.ledger.report.effects import Effect, Interplay, Look, Together
from pycls_fast.ledger.report.statistics import Speedup, geometric_mean
from pycls_fast.reading import check, read_bytes
from pycls_fast.values import ImageSize, PositiveFloat

Status = Literal["measured", "cannot run", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class _Described(BaseModel):
    """Values that are shown; only those that have a field are required."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Commit(_Described):
    """The code's commit, and whether it was changed since."""

    commit: str
    changed: bool


class Machine(_Described):
    """The machine that measured, and the code on it: part of `train.environment.environment`."""

    processor: str | None
    cpu_count: int | None
    git: Commit | None
    memory_bytes: PositiveFloat | None = None


class Measured(_Described):
    """The network that was timed."""

    model: str
    parameters: int


class Timing(_Part):
    """A variant's timings, of all ranks together; memory per rank.

    `images_per_second` and `flops_per_second` are over all `rounds`, `step_seconds_*` over all steps. The quotient of
    two rates over the same rounds is the geometric mean of the rounds' quotients, which is the speed-up; medians over
    all steps would contradict it.
    """

    images_per_second: PositiveFloat
    step_seconds_p50: PositiveFloat
    step_seconds_p90: PositiveFloat
    images_per_step: int
    samples: int
    # None if parts of the network are frozen, which makes the backward pass smaller.
    flops_per_second: PositiveFloat | None
    share_of_matmul: float | None
    memory_peak_bytes: NonNegativeInt | None
    rounds: Annotated[list[PositiveFloat], Field(min_length=1)]
    # The machine's own speed in each round.
    matmul_flops_per_second: Annotated[list[PositiveFloat], Field(min_length=1)] | None
    image_size: ImageSize
    precision: str
    switches: dict[str, Any]
    speedup: Speedup | None = None
    speedup_before: Speedup | None = None


class Rounding(_Part):
    """Relative errors against float64 after `step` steps; "not finite" if they are not."""

    step: int
    logit_error: float | Literal["not finite"] | None
    gradient_error: float | Literal["not finite"] | None


class TrainedRun(_Part):
    """One crossed training: the variants that were on, and top-1 in percent of `count` images, or why it failed."""

    seed: int
    on: list[str]
    top1: float | None = None
    count: int | None = None
    seconds: float | None = None
    failed: str | None = None


class OverallFit(_Part):
    """What the fit of the first family says besides effects, in points of top-1: the deviation of a run within its
    pair, what it would be if images erred independently (None in the first ledgers), the quotient of their squares,
    and the smallest difference that all planned trainings decide with 90% chance."""

    deviation: float
    floor: float | None
    variance_ratio: float | None
    resolution: float
    together: Together | None
    interplay: Interplay | None


class Accuracy(_Part):
    """What crossed trainings say: also those of screening, and of designs with a variant that was then left out.

    `effects` have words if every training of a look has ended; `broken` makes trainings fail.
    """

    runs: list[TrainedRun]
    effects: list[Effect]
    looks: list[Look]
    broken: dict[str, str]
    fit: OverallFit | None


class VariantRecord(_Part):
    """What was measured of a variant; `before` is the one that it is one step away from."""

    name: str
    note: str
    overrides: list[str]
    ranks: Annotated[int, Field(gt=0)]
    tree: str | None
    git: Commit | None
    before: str | None
    status: Status
    reason: str | None
    needs: str | None
    timing: Timing | None
    numerics: list[Rounding] | None


class GradientTotals(_Described):
    """How many gradients have which exponent of 2, and the shares that 16 bits lose."""

    exponents: dict[Annotated[int, Field(ge=-2000, le=2000)], NonNegativeInt]
    below_subnormal: float
    below_subnormal_scaled: float
    updates_lost_float16: float
    updates_lost_bfloat16: float


class GradientCounts(_Part):
    """The first variant's gradients over all layers (`measure.numerics`, whose file also has each layer's)."""

    model_config = ConfigDict(extra="ignore")

    total: GradientTotals
    steps: int
    warmup_steps: int
    loss_scale: float


class Unfinished(_Part):
    """How many of how many measurements exist."""

    done: int
    of: int


class Record(_Part):
    """A ledger; its first variant is the one that all others are compared with."""

    kind: Literal["ledger"] = "ledger"
    config_name: str
    time: Annotated[float, Field(ge=0, lt=1e11)]
    wall_seconds: float | None
    command: str
    ladder: Ladder
    settings: LadderSettings
    base: list[str]
    model: Measured | None
    device: str | None
    versions: dict[str, str]
    code: list[str]
    environment: Machine
    gradients: GradientCounts | None
    unmeasured: dict[str, str]
    unfinished: Unfinished | None
    accuracy: Accuracy | None = None
    variants: Annotated[list[VariantRecord], Field(min_length=1)]

    @property
    def reference(self) -> VariantRecord:
        """The first variant."""
        return self.variants[0]

    @property
    def timed(self) -> list[tuple[VariantRecord, Timing]]:
        return [(variant, variant.timing) for variant in self.variants if variant.timing is not None]


def read_record(file: Path) -> Record:
    """The record of a `ledger.json`. A `UserError` if it cannot be read, or is none."""
    with refusing(f"{file}: cannot be read as a ledger.json", OSError, ValueError, use="give another"):
        return check(Record, read_bytes(file))


def compare_speed(variants: Sequence[VariantRecord]) -> None:
    """Add `speedup` and `speedup_before` to the timings; the first variant is the reference."""
    by_name = {variant.name: variant for variant in variants}
    for variant in variants:
        for key, other in (("speedup", variants[0].name), ("speedup_before", variant.before)):
            reference = by_name[other].timing if other in by_name else None
            if variant.timing is not None and reference is not None:
                # One that fails in a later round has fewer.
                pairs = zip(variant.timing.rounds, reference.rounds, strict=False)
                found = geometric_mean([rate / of_reference for rate, of_reference in pairs])
                variant.timing = variant.timing.model_copy(update={key: found})
