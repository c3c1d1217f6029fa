"""What a ledger reads of the files in its folder, most of which its processes have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pycls_fast.errors import refusing
from pycls_fast.ledger.ladder.plan import Crossing
from pycls_fast.ledger.report.record import Rounding
from pycls_fast.reading import Model, Saved, check, read_json
from pycls_fast.values import ImageSize


class KeptPlan(BaseModel):
    """Whose folder it is: the digests of the code that measured, and what is known of the variants as factors."""

    model_config = ConfigDict(extra="allow")

    code: list[str]
    crossing: Crossing | None
    experiment: dict[str, Any] = {}


class Took(Saved):
    """Seconds worked in all starts."""

    seconds: NonNegativeFloat


class Failed(Saved):
    """Why a training ended without a result."""

    reason: str


class _Scores(Saved):
    top1: NonNegativeFloat
    count: PositiveInt


class Ended(Saved):
    """A training's result."""

    final: _Scores
    wall_seconds: NonNegativeFloat


class Rounded(Saved):
    """A variant's rounding errors, and the digest of its weights."""

    errors: list[Rounding]
    weights: str | None = None


class Headline(Saved):
    """A timing of any part: the median of its steps."""

    step_seconds_p50: PositiveFloat


class TimedSteps(Headline):
    """Training steps; rates in images/s."""

    images_per_second: PositiveFloat
    images_per_step: PositiveInt
    step_seconds_each: list[list[PositiveFloat]]
    flops_per_second: PositiveFloat | None = None
    share_of_matmul: NonNegativeFloat | None = None


class _Matmul(Saved):
    flops_per_second: PositiveFloat


class Timed(Saved):
    """A timing of training steps, and what was timed."""

    train: TimedSteps
    memory_peak_bytes: NonNegativeInt | None
    matmul: _Matmul | None = None
    model: str
    parameters: NonNegativeInt
    train_forward_flops_per_image: NonNegativeInt
    train_image_size: ImageSize
    precision: str
    switches: dict[str, Any]
    device: str
    steps_per_run: NonNegativeInt
    evaluated_images: NonNegativeInt
    evaluated_images_per_run: NonNegativeInt


def read_measurement(file: Path, kind: type[Model]) -> Model:
    """What a file says.

    Raises:
        UserError: it is damaged, for example by a power failure.
    """
    with refusing(f"output: {file} is damaged", OSError, ValueError, use="remove it, and it is measured again"):
        return check(kind, read_json(file))
