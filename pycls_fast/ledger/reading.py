"""Reading a `ledger.json`, also one of an earlier version: what is missing is None, what is damaged is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pycls_fast.errors import UserError
from pycls_fast.ledger.rates import with_rates

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    """What the report reads, with the value of what a file lacks; everything else is kept as it is."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _Ladder(_Part):
    description: str = ""
    source: str = ""


class _Settings(_Part):
    mode: str = "unknown mode"
    seeds: int = 0
    rounds: int = 0
    numerics_steps: int | None = None
    jobs: int | None = None
    margin: Number | None = None


class _Git(_Part):
    commit: str
    changed: bool = False


class _Environment(_Part):
    processor: str | None = None
    cpu_count: int | None = None
    memory_bytes: int | None = None
    git: _Git | None = None


class _Model(_Part):
    model: str | None = None
    parameters: int | None = None
    image_size: int | None = None
    data: str | None = None
    global_batch_size: int | None = None


class _Speedup(_Part):
    ratio: Rate
    low: Rate | None = None
    high: Rate | None = None
    rounds: int = 0

    @model_validator(mode="after")
    def _has_two_ends_or_none(self) -> Self:
        if self.low is None or self.high is None:
            self.low = self.high = None
        return self


class _Timing(_Part):
    images_per_second: Rate
    rounds: list[Rate] = []
    paired_rounds: list[int] = []
    matmul_flops_per_second: list[Rate] | None = None
    step_seconds_p50: Number | None = None
    step_seconds_p90: Number | None = None
    flops_per_second: Number | None = None
    share_of_matmul: Number | None = None
    memory_peak_bytes: Number | None = None
    image_size: int | None = None
    speedup: _Speedup | None = None
    speedup_before: _Speedup | None = None

    @model_validator(mode="after")
    def _has_rounds(self) -> Self:
        if not self.rounds:
            self.rounds, self.matmul_flops_per_second = [self.images_per_second], None
        if self.matmul_flops_per_second is not None and len(self.matmul_flops_per_second) != len(self.rounds):
            raise ValueError(f"{len(self.rounds)} rounds and {len(self.matmul_flops_per_second)} matrix products")
        return self


class _Errors(_Part):
    step: int | None = None
    logit_error: float | str | None = None
    gradient_error: float | str | None = None


class _Mean(_Part):
    mean: Number
    half: Number | None = None


class _Curve(_Part):
    epoch: list[Number] = []
    loss: list[Number] = []

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if len(self.epoch) != len(self.loss):
            raise ValueError(f"{len(self.epoch)} epochs and {len(self.loss)} losses")
        return self


class _Run(_Part):
    seed: int | None = None
    top1: Number | None = None
    top5: Number | None = None
    count: int | None = None
    curve: _Curve = _Curve()


class _Verdict(_Part):
    finding: str = ""
    text: str = ""
    difference: Number | None = None
    low: Number | None = None
    high: Number | None = None


class _Images(_Part):
    seed: int | None = None
    difference: Number
    only_first: int | None = None
    only_second: int | None = None
    p_value: Number | None = None


class _Comparison(_Part):
    verdict: _Verdict = _Verdict()
    images: list[_Images] = []


class _Training(_Part):
    reason: str | None = None
    runs: list[_Run] = []
    top1: _Mean | None = None
    top5: _Mean | None = None
    against_reference: _Comparison | None = None
    against_before: _Comparison | None = None


class _Arm(_Part):
    name: str
    note: str = ""
    overrides: list[str] = []
    ranks: Annotated[int, Field(gt=0)] = 1
    before: str | None = None
    status: str = "measured"
    reason: str | None = None
    needs: str | None = None
    timing: _Timing | None = None
    numerics: list[_Errors] | None = None
    training: _Training | None = None


class _Counts(_Part):
    exponents: dict[int, int]
    below_subnormal: Number
    below_subnormal_scaled: Number
    updates_lost_float16: Number
    updates_lost_bfloat16: Number


class _Gradients(_Part):
    total: _Counts
    loss_scale: Number


class _Progress(_Part):
    done: int
    of: int


class _Record(_Part):
    config_name: str = "unknown experiment"
    time: Number | None = None
    wall_seconds: Number | None = None
    command: str = ""
    ladder: _Ladder = _Ladder()
    settings: _Settings = _Settings()
    rule: str = ""
    reference: str = ""
    base: list[str] = []
    model: _Model | None = None
    device: str | None = None
    versions: dict[str, Any] = {}
    code: list[str] = []
    environment: _Environment = _Environment()
    gradients: _Gradients | None = None
    unmeasured: dict[str, str] = {}
    unfinished: _Progress | None = None
    arms: Annotated[list[_Arm], Field(min_length=1)]


def read_ledger(file: Path) -> dict[str, Any]:
    """The record of a `ledger.json`, completed.

    Raises:
        UserError: it cannot be read, is not a ledger's record, or has a value that cannot be right.
    """
    return _read(file, completed)


def read_measured(file: Path) -> dict[str, Any]:
    """The record of a `ledger.json` with None or empty for what is missing, and all rates as they were written.

    Raises:
        UserError: as `read_ledger`.
    """
    return _read(file, _filled)


def _read(file: Path, fill: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give the path of a ledger.json") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); give the path of a ledger.json") from error
    if not isinstance(record, dict) or record.get("kind") != "ledger":
        raise UserError(f"{file}: not a ledger.json; give one that tools/ledger.py wrote")
    try:
        return fill(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg']}; the file is damaged, give another one") from error


def completed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a record with everything that the report reads: None or empty if it is missing.

    Raises:
        ValidationError: of pydantic, for values of wrong types.
    """
    whole = _filled(record)
    first, *others = whole["arms"]
    whole["reference"], first["before"] = first["name"], None
    for arm in others:
        arm["before"] = arm["before"] or first["name"]
    for arm in whole["arms"]:
        if arm["timing"] is not None:
            timing = arm["timing"]
            count = len(timing["rounds"])
            timing["paired_rounds"] = [i for i in timing["paired_rounds"] if 0 <= i < count]
            arm["timing"] = with_rates(timing, arm["ranks"])
    return whole


def _filled(record: Mapping[str, Any]) -> dict[str, Any]:
    whole = _Record.model_validate(record).model_dump()
    whole["reference"] = whole["reference"] or whole["arms"][0]["name"]
    return whole
