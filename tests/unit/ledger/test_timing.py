"""The clock, and what is stepped when: with a clock and with steps whose length is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.measure import device, stages, timing, workloads
from pycls_fast.ledger.measure.variant import (
    Session,
    TimedVariant,
    TurnLength,
    part_record,
    speed_comparison,
    turn_length,
)
from pycls_fast.ledger.measure.workloads import LoaderPart, Part, PartName, StepRange, Turn, slowest, synthetic_batch
from pycls_fast.parallel.world import ALONE, World
from tests.factories import config_of

CPU = torch.device("cpu")
SMALL = ["data.source=synthetic", "data.image_size=8", "data.global_batch_size=8", "data.num_workers=0"]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves when it is told to."""
    made = SimpleNamespace(now=100.0, perf_counter=lambda: made.now)
    for module in (device, workloads):
        monkeypatch.setattr(module, "time", made)
    return made


def test_slowest_rank_sets_the_time() -> None:
    turns = [Turn((1.0, 5.0), 6.0, 0.5), Turn((2.0, 3.0), 5.0, 0.75)]

    class Two(World):
        def gather(self, value: Any) -> list[Any]:
            return turns

    assert slowest(turns[0], Two(0, 2, CPU)) == Turn((2.0, 5.0), 6.0, 0.75)


class Recorded(Part):
    """A part that only writes down that it was stepped."""

    images_per_step = 1

    def __init__(self, label: str, log: list[str]) -> None:
        self.label, self.log = label, log

    def warm_up(self, steps: int) -> None:
        self.log.append(f"warm {self.label} {steps}")

    def turn(self, steps: int) -> Turn:
        self.log.append(f"{self.label} {steps}")
        return Turn((1.0,) * steps, float(steps))


def recorded(label: str, log: list[str]) -> TimedVariant:
    """A variant that is not built."""
    variant = TimedVariant.__new__(TimedVariant)
    variant.name, variant.config, variant.switches = label, label, {}
    variant.world, variant.memory = ALONE, device.DeviceMemory(CPU)
    variant.parts, variant.lengths, variant.turns = {"train": Recorded(label, log)}, {}, {}
    return variant


def test_variants_take_turns_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(build, "set_backend", lambda config, device, chosen: log.append(f"backend {config}"))
    made = [recorded(label, log) for label in ("a", "b", "c")]
    one, other = (SimpleNamespace(measure=partial(log.append, f"peak {name}")) for name in ("one", "other"))
    for variant, peak in zip(made, (one, other, other), strict=True):
        monkeypatch.setattr(variant, "matmul", peak)
    timing._measure(made, "train", 3, TurnLength(2, 3))
    done = list(zip(log[::2], log[1::2], strict=True))
    assert [entry for _, entry in done] == [
        *("warm a 3", "warm b 3", "warm c 3"),
        *("peak one", "peak other", "a 2", "b 2", "c 2"),
        *("peak one", "peak other", "c 2", "b 2", "a 2"),
        *("peak one", "peak other", "a 2", "b 2", "c 2"),
    ]
    # All under the process-wide settings, such as TF32, of its own variant; a peak under one that it is of.
    owners = {"peak one": "a", "peak other": "c"}
    assert all(before == f"backend {owners.get(entry) or entry.split()[-2]}" for before, entry in done)
    assert all(len(variant.turns["train"]) == 3 for variant in made)


class Slow(Part):
    """A part with steps of known length: the first ones, then all others."""

    images_per_step = 1

    def __init__(self, *first: float, rest: float) -> None:
        self.first, self.rest = list(first), rest
        self.turns: list[int] = []

    def turn(self, steps: int) -> Turn:
        self.turns.append(steps)
        seconds = tuple(self.first.pop(0) if self.first else self.rest for _ in range(steps))
        return Turn(seconds, sum(seconds))


class Fours(Slow):
    """Has whole bursts of steps, as a loader."""

    def turn(self, steps: int) -> Turn:
        return super().turn(-(-steps // 4) * 4)


def test_a_turn_lasts_as_long_as_asked() -> None:
    """As many steps as the settled pace needs, not that of the first one."""
    quick = Slow(0.25, rest=0.125)
    assert turn_length(quick, ALONE, steps=10, seconds=2.0) == 16
    # One step, three as slow as it, then what is left of the second that warms up.
    assert quick.turns == [1, 3, 3]
    slow = Slow(rest=4.0)
    assert turn_length(slow, ALONE, steps=10, seconds=2.0) == 10
    assert slow.turns == [1]
    assert turn_length(Fours(rest=0.25), ALONE, steps=1, seconds=2.0) == 8
    untouched = Slow(rest=1.0)
    assert turn_length(untouched, ALONE, steps=10, seconds=0.0) == 10
    assert untouched.turns == []


@pytest.fixture
def loader() -> Callable[..., LoaderPart]:
    def make(order: StepRange | None = None, trainer: Any = None) -> LoaderPart:
        config = config_of(*SMALL)
        source = build.sources(config, ALONE)["train"]
        return LoaderPart(config, source, build.switches(config, CPU), ALONE, order or StepRange(), trainer)

    return make


def test_waiting_for_data_is_told_from_training(
    loader: Callable[..., LoaderPart], time: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = workloads.to_device

    def slow(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in original(*arguments, **options):
            time.now += 0.5
            yield batch

    monkeypatch.setattr(workloads, "to_device", slow)

    def train(batches: Iterable[Any]) -> None:
        for _ in batches:
            time.now += 1.5

    part = loader(trainer=train)
    part.warm_up(1)
    turn = part.turn(3)
    assert (turn.waited, turn.total) == (1.5, 6.0)


def test_no_image_is_read_twice(loader: Callable[..., LoaderPart], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = workloads.to_device

    def watched(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in original(*arguments, **options):
            seen.extend(batch.indices_B.tolist())
            yield batch

    monkeypatch.setattr(workloads, "to_device", watched)
    order = StepRange()
    for part in (loader(order=order), loader(order=order)):
        part.warm_up(1)
        part.turn(2)
        part.turn(2)
    assert len(seen) == 2 * 2 * 3 * 8
    assert len(set(seen)) == len(seen)


def test_synthetic_batch_is_random_and_erases_as_often_as_asked() -> None:
    batch = synthetic_batch(512, 8, 3, erase_probability=0.25, seed=1, device=CPU)
    assert batch.images_BHWC.shape == (512, 8, 8, 3)
    assert batch.images_BHWC.dtype == torch.uint8
    assert batch.images_BHWC.float().mean().item() == pytest.approx(127.5, abs=3)
    assert set(batch.labels_B.tolist()) == {0, 1, 2}
    erased_B = batch.erase_B4[:, 2] > 0
    assert erased_B.float().mean().item() == pytest.approx(0.25, abs=0.08)
    assert (batch.erase_B4[:, :2] + batch.erase_B4[:, 2:]).max().item() <= 8
    assert synthetic_batch(4, 8, 3, erase_probability=0.0, seed=1, device=CPU).erase_B4 is None


def test_matmul_is_the_median_over_the_run(time: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine gets slower; the first product of each time warms up.
    lengths = iter([9.0, 1.0, 1.0, 1.0, 9.0, 2.0, 2.0, 2.0, 9.0, 4.0, 4.0, 4.0])

    def product(*arguments: Any, **options: Any) -> None:
        time.now += next(lengths)

    monkeypatch.setattr(torch, "mm", product)
    peak = device.MatmulPeak(torch.float32, ALONE, size=10)
    for _ in range(3):
        peak.measure()
    assert peak.record()["seconds_p50"] == 2.0
    assert peak.record()["samples"] == 9


def test_a_turn_of_the_loader_begins_and_ends_while_the_workers_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["data.num_workers=8", "data.prefetch_factor=3", "optim.accumulation_steps=2"]
    config = config_of(*SMALL[:-1], *settings)
    batch = synthetic_batch(4, 8, 10, erase_probability=0.0, seed=0, device=CPU)
    made, taken = [], []

    def train_loader(*_: Any, start_step: int, steps: int) -> Iterator[Any]:
        made.append((steps - start_step) * 2)
        for number in range(made[0]):
            taken.append(number)
            yield batch

    monkeypatch.setattr(build, "train_loader", train_loader)
    source: Any = None
    part = LoaderPart(config, source, build.switches(config, CPU), ALONE, StepRange())
    part.warm_up(1)
    turn = part.turn(1)
    ahead = 8 * 3
    timed = 2 * len(turn.seconds)
    assert timed % 8 == 0
    assert timed >= ahead
    assert len(taken) - timed > ahead
    assert made[0] - len(taken) >= ahead


def test_without_data_there_are_as_many_classes_as_the_model_is_given() -> None:
    overrides = ["data=auto", "data.root=null", "model.num_classes=5", "precision=fp32"]
    config = load_config("vit_digits", overrides, needs_data=False)
    assert TimedVariant("x", config, Session((), ALONE)).resolved.outputs == 5


def test_workers_beyond_the_cores_only_read() -> None:
    samples = {"read": [3.0], "decode": [0.75], "augment": [0.125], "collate": [0.125], "copy": [0.0]}
    found = [stages._summary(samples, workers, cores=2, ranks=1) for workers in (2, 8, 16)]
    assert [summary["images_per_second_expected"] for summary in found] == [0.5, 2.0, 2.0]
    assert [summary["limit"] for summary in found] == ["read", "read", "decode"]


# Two turns of three steps, one of them with a hiccup.
TURNS = [
    Turn((1.0, 2.0, 3.0), 6.0, waited=1.5),
    Turn((4.0, 5.0, 21.0), 30.0, waited=7.5),
]


def record(name: PartName, turns: list[Turn], images_per_step: int = 70, *, frozen: bool = False) -> dict[str, Any]:
    return part_record(
        name, turns, images_per_step=images_per_step, forward_flops_per_image=1000, matmul_flops_per_second=1e6,
        memory_peak_bytes=123, frozen=frozen,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["train", "inference"])
def test_steps_that_compute_are_samples(name: PartName) -> None:
    found = record(name, TURNS)
    assert found["step_seconds_p50"] == 3.5
    assert found["images_per_second"] == 20.0
    assert found["step_seconds_mean"] == 6.0
    assert found["samples"] == 6
    assert found["turn_seconds"] == [2.0, 10.0]
    assert found["step_seconds_each"] == [[1.0, 2.0, 3.0], [4.0, 5.0, 21.0]]
    assert "data_wait_fraction" not in found


@pytest.mark.parametrize("name", ["loader", "both"])
def test_steps_that_wait_for_bursts_count_by_turns(name: PartName) -> None:
    # Four workers whose batches arrive together: three waits of nothing, then a long one.
    bursts = [
        Turn((0.0, 0.0, 0.0, 8.0), 8.0),
        Turn((0.0, 0.0, 0.0, 12.0), 12.0),
    ]
    found = record(name, bursts, images_per_step=10)
    assert found["step_seconds_p50"] == 2.5
    assert found["images_per_second"] == 4.0
    assert found["samples"] == 2


def test_training_is_three_forward_passes() -> None:
    train, inference = record("train", TURNS), record("inference", TURNS)
    assert train["flops_per_second"] == 3 * 1000 * 20.0
    assert train["share_of_matmul"] == pytest.approx(0.06)
    assert inference["flops_per_second"] == 1000 * 20.0
    assert inference["share_of_matmul"] == pytest.approx(0.02)
    assert "flops_per_second" not in record("loader", TURNS)


def test_comparison_pairs_turns_and_counts_images_not_steps() -> None:
    # Half the batch in a quarter and in a fifth of the time.
    small = [Turn((0.5, 0.5), 1.0), Turn((2.0, 2.0), 4.0)]
    reference = {"name": "a", "train": record("train", [Turn((2.0, 2.0), 4.0), Turn((10.0, 10.0), 20.0)], 64)}
    variant = {"name": "b", "train": {**record("train", small, 32), "memory_peak_bytes": 246}}
    found = speed_comparison("train", reference, variant)
    assert found["speedup"]["rounds"] == 2
    assert found["speedup"]["ratio"] == pytest.approx(5**0.5)
    assert (found["variant"], found["reference"]) == ("b", "a")
    assert found["speedup"]["low"] < 2
    assert found["memory_ratio"] == 2.0
