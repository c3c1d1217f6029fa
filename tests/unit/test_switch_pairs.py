"""Pairs of switches: a sample of those that a CPU runs trains and agrees with the plain twin.

Pairs are drawn from all switches, of values that run alone and that no row of `config/conflicts.py` refuses together. A
new value is drawn as soon as it is there. Images are made, not read: decoders have tests of
their own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.models.choices import Model
from pycls_fast.parallel.world import ALONE
from pycls_fast.parallel.wrap import place_model
from pycls_fast.seeds import microbatch_seed
from pycls_fast.speed import SWITCHES, Speed
from pycls_fast.train.assemble import make_step
from pycls_fast.train.metrics import TrainMetrics
from tests.factories import assert_same_bits, config_of, nudge

Choice = tuple[str, str]
Pair = tuple[str, Choice, Choice]

CPU = torch.device("cpu")
# Pairs that are tried at least: in every run of the tests, and among the slow ones without and with a compiler.
SAMPLE, LARGER_SAMPLE, COMPILED_SAMPLE = 15, 60, 6
BASE = {
    "vit": (
        "vit_digits",
        ["model.width=16", "model.depth=3", "model.mlp_width=24", "model.heads=2", "model.patch_size=4"],
    ),
    "resnet": ("resnet_digits", ["model.depth=18"]),
    "timm": (
        "vit_digits",
        [
            "model=timm",
            "model.name=vit_tiny_patch16_224",
            "model.options={patch_size: 4, embed_dim: 16, depth: 3, num_heads: 2, mlp_ratio: 1.5}",
        ],
    ),
}
assert set(BASE) == Model.choices().keys() - {"given"}, "each kind of model needs a small experiment"
# Something is erased and mixed, or moving it between host and device would be tried on nothing.
COMMON = [
    "data.image_size=16", "data.global_batch_size=8", "augment.erase_probability=0.5", "augment.erase_value=noise",
    "augment.mixup_alpha=0.4", "model.drop_path=0.4", "optim.ema_decay=0.9", "optim.clip_norm=1.0",
    "schedule.warmup_epochs=0",
]  # fmt: skip
# What a value cannot be without, unless the pair says otherwise.
WITH: Mapping[Choice, Mapping[str, str]] = {
    (switch.name, value): dict(one.removeprefix("speed.").split("=") for one in needs.split())
    for switch in SWITCHES.values()
    for value, needs in switch.needs.items()
}
# In float32 they are the reference's, to the bit.
IN_16_BITS = {("attention", "products"), ("linear", "products"), ("gelu", "polynomial")}
NUMERICS = {switch.name: switch.numerics for switch in SWITCHES.values()}
# A compiler works for a while on these.
COMPILED = {"compile", "compile_mode", "optimizer_compile", "cross_entropy"}


def completed(chosen: Mapping[str, str]) -> dict[str, str]:
    """Speed with what they cannot be without."""
    needed = [WITH.get(choice, {}) for choice in chosen.items()]
    return {name: value for one in (*needed, chosen) for name, value in one.items()}


def overrides(*choices: Choice) -> list[str]:
    return [f"speed.{name}={value}" for name, value in completed(dict(choices)).items()]


def precision(chosen: Mapping[str, str]) -> str:
    return "amp_bf16" if IN_16_BITS & {*chosen.items()} else "fp32"


@cache
def composed(kind: str, *also: str) -> RunConfig:
    name, sizes = BASE[kind]
    return config_of(*sizes, *COMMON, *also, name=name)


def is_refused(kind: str, chosen: Mapping[str, str]) -> bool:
    """Whether a CPU's run with these switches is told a mistake instead of being begun.

    Hydra takes too long for every pair: the switches are put into a configuration that is there.
    """
    config = composed(kind, "speed.preset=reference", f"precision={precision(chosen)}")
    config = config.with_values(speed={str(name): value for name, value in completed(chosen).items()})
    try:
        build.switches(config, CPU)
    except UserError:
        return True
    return any(problems(config, Purpose()))


@cache
def pairs() -> list[Pair]:
    """Those of values that a CPU runs alone and together."""
    return [
        (kind, one, two)
        for kind in BASE
        for one, two in itertools.combinations(
            [
                (switch.name, value)
                for switch in SWITCHES.values()
                for value in switch.values[1:]
                if switch.concerns(Model.choices()[kind]) and not is_refused(kind, {switch.name: value})
            ],
            2,
        )
        if one[0] != two[0] and not is_refused(kind, dict([one, two]))
    ]


def compiles(*choices: Choice) -> bool:
    return bool(COMPILED & completed(dict(choices)).keys())


@cache
def sample(size: int, *, compiled: bool) -> list[Pair]:
    """Pairs that a CPU runs, the same in every run of the tests: each value and kind of model at least once, and so
    many at least."""
    found = [pair for pair in pairs() if compiles(*pair[1:]) == compiled]
    missing: set[object] = {choice for pair in found for choice in pair[1:] if compiles(choice) == compiled}
    missing |= set(BASE)
    random.Random(0).shuffle(found)
    drawn: list[Pair] = []
    # Those first that bring two values.
    for new in (2, 1):
        for pair in found:
            if len(missing & {*pair}) >= new:
                drawn.append(pair)
                missing -= {*pair}
    return drawn + [pair for pair in found if pair not in drawn][: max(0, size - len(drawn))]


class Trained(NamedTuple):
    """Losses, weights and their moving averages after a few steps, and the switches that were in force."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]
    switches: Speed

    def lag(self) -> float:
        """The distance of the averages from the weights."""
        floating = {key: value for key, value in self.averages.items() if value.is_floating_point()}
        return float(torch.stack([(value - self.weights[key]).norm() for key, value in floating.items()]).norm())


def train(config: RunConfig, *, steps: int = 2) -> Trained:
    """A few steps of the training step that a run makes."""
    switches = build.switches(config, CPU)
    network = build.model(config, 10, switches)
    nudge(network)
    network = place_model(network, ALONE, memory_format=switches.memory_format).train()
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4)
    metrics = TrainMetrics(CPU, read=switches.metrics)
    host, losses = build.prepare_on_host(config, switches), []
    for number in range(steps):
        batch = synthetic_batch(8, 16, 10, erase_probability=0.5, seed=number, device=CPU)
        seed = microbatch_seed(config.seed, step=number, position=0, rank=0)
        step(number, [batch if host is None else host(batch, seed)], metrics)
        losses.append(metrics.read(ALONE)["loss"])
    weights = {key: value.detach().clone() for key, value in step.weights.state_dict().items()}
    return Trained(losses, weights, step.ema.values, switches)


@cache
def twin(kind: str, level: str, *switches: str) -> Trained:
    return train(composed(kind, "speed.preset=reference", f"precision={level}", *switches))


def check(kind: str, found: Trained, plain: Trained, *, near: float, lag_near: float) -> None:
    there = [switch for switch in SWITCHES.values() if switch.concerns(Model.choices()[kind])]
    numerics = {
        switch.numerics
        for switch in there
        if getattr(found.switches, switch.name) != getattr(plain.switches, switch.name)
    }
    assert list(found.weights) == list(plain.weights)
    assert all(torch.isfinite(torch.tensor(found.losses)))
    if "training" in numerics:
        # Two such values: no other run agrees with it.
        return
    if numerics == {"identical"}:
        assert found.losses == plain.losses
        assert_same_bits(found.weights, plain.weights)
        assert_same_bits(found.averages, plain.averages)
        return
    assert found.losses == pytest.approx(plain.losses, rel=near)
    assert found.lag() == pytest.approx(plain.lag(), rel=lag_near)


def check_pair(kind: str, *choices: Choice) -> None:
    level = precision(dict(choices))
    found = train(composed(kind, "speed.preset=reference", f"precision={level}", *overrides(*choices)))
    # A value that changes what is learned: the first loss is still of the same function.
    assert found.losses[0] == pytest.approx(twin(kind, level).losses[0], rel=0.1)
    # It would hide the other's mistakes, so the twin has it too.
    learned = [choice for choice in choices if NUMERICS[choice[0]] == "training"]
    plain = twin(kind, level, *overrides(*learned)) if len(learned) == 1 else twin(kind, level)
    if level == "fp32" and not learned:
        check(kind, found, plain, near=1e-5, lag_near=1e-3)
    else:
        check(kind, found, plain, near=1e-3, lag_near=1e-2)


# The pairs are drawn when a test asks: every collection would take seconds longer.
@pytest.mark.parametrize("size", [SAMPLE, pytest.param(LARGER_SAMPLE, marks=pytest.mark.slow)])
def test_pairs_agree_with_the_reference(size: int) -> None:
    for kind, one, two in sample(size, compiled=False):
        check_pair(kind, one, two)


@pytest.mark.slow
@pytest.mark.skipif(not build.device.has_compiler("cpu"), reason="needs a C++ compiler")
# dynamo asks inputs for a gradient that only leaves have; it is torch's own call.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_pairs_agree_with_the_reference() -> None:
    for kind, one, two in sample(COMPILED_SAMPLE, compiled=True):
        # After some recompilations of the same code it would be run uncompiled.
        torch._dynamo.reset()
        check_pair(kind, one, two)


@pytest.mark.parametrize("kind", BASE)
def test_the_fast_preset_agrees_with_the_reference(kind: str) -> None:
    found = train(composed(kind, "precision=fp32", "speed.preset=fast"))
    check(kind, found, twin(kind, "fp32"), near=1e-5, lag_near=1e-3)


def test_every_value_that_a_cpu_runs_is_in_a_pair() -> None:
    for size, compiled in ((SAMPLE, False), (COMPILED_SAMPLE, True)):
        drawn = sample(size, compiled=compiled)
        assert {kind for kind, _, _ in drawn} == set(BASE)
        there = {choice for _, *pair in pairs() for choice in pair if compiles(choice) == compiled}
        assert {choice for _, *pair in drawn for choice in pair if compiles(choice) == compiled} == there
