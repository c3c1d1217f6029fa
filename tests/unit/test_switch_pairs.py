"""Pairs of switches: for a sample of pairs of values, training runs and agrees with the plain twin, or is refused.

Nothing here knows a switch by name but for the slow ones: what the catalogue has is drawn from.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.parts import synthetic_batch
from pycls_fast.parallel import ALONE, prepare_model
from pycls_fast.speed import CATALOGUE, Switch, SwitchName
from pycls_fast.train.building import make_step
from pycls_fast.train.metrics import TrainMetrics

CPU = torch.device("cpu")
# Pairs that are tried, without and with a compiler in them.
SAMPLE, SLOW_SAMPLE = 15, 4
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
COMMON = [
    "speed.preset=reference",
    "data.image_size=16",
    "data.global_batch_size=8",
    "model.drop_path=0.4",
    "optim.ema_decay=0.9",
    "optim.clip_norm=1.0",
    "schedule.warmup_epochs=0",
]
# What a value needs to have something to do, unless the pair says otherwise.
WITH = {(SwitchName.CONVOLUTION, "products"): {SwitchName.MEMORY_FORMAT: "channels_last"}}
# A compiler works for minutes on these.
SLOW = {SwitchName.COMPILE, SwitchName.COMPILE_MODE, SwitchName.OPTIMIZER_COMPILE, SwitchName.CROSS_ENTROPY}

Pair = tuple[str, tuple[SwitchName, str], tuple[SwitchName, str]]


def pairs(*, slow: bool) -> list[Pair]:
    """A sample, the same in every run, of all pairs of values that are not the reference's."""

    def values(switch: Switch) -> list[tuple[SwitchName, str]]:
        return [(switch.name, value) for value in switch.values[1:]]

    found: list[Pair] = []
    for one, two in itertools.combinations(CATALOGUE, 2):
        if slow != bool({one.name, two.name} & SLOW):
            continue
        for kind in sorted(set(one.applies_to) & set(two.applies_to)):
            found += [(kind, a, b) for a, b in itertools.product(values(one), values(two))]
    random.Random(0).shuffle(found)
    if slow:
        # This one does nothing without the other.
        needed = {SwitchName.GELU, SwitchName.COMPILE}
        return sorted(found, key=lambda pair: {name for name, _ in pair[1:]} != needed)[:SLOW_SAMPLE]
    # Every value at least once, those first that bring two new ones.
    drawn: list[Pair] = []
    seen: set[tuple[SwitchName, str]] = set()
    for new in (2, 1):
        for pair in found:
            if len({*pair[1:]} - seen) >= new:
                drawn.append(pair)
                seen |= {*pair[1:]}
    for kind in BASE:
        # Of each kind of model a few, whatever the values were drawn with.
        missing = max(0, 3 - sum(pair[0] == kind for pair in drawn))
        drawn += [pair for pair in found if pair[0] == kind and pair not in drawn][:missing]
    return drawn + [pair for pair in found if pair not in drawn][: max(0, SAMPLE - len(drawn))]


def train(kind: str, switches: dict[SwitchName, str], *, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after a few steps of the training step that a run makes."""
    name, sizes = BASE[kind]
    for choice in list(switches.items()):
        switches = {**WITH.get(choice, {}), **switches}
    config = load_config(name, [*sizes, *COMMON, *(f"speed.{switch}={value}" for switch, value in switches.items())])
    chosen = build.switches(config, CPU)
    network = build.model(config, 10, chosen)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in network.parameters():
            # The same for every layout; no tensor at a value that hides a mistake.
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    network = prepare_model(network, ALONE, memory_format=chosen[SwitchName.MEMORY_FORMAT]).train()
    step = make_step(config, network, ALONE, chosen, steps_per_epoch=4)
    metrics = TrainMetrics(CPU, read=chosen[SwitchName.METRICS])
    host = build.prepare_on_host(config, chosen)
    losses = []
    for position in range(steps):
        batch = synthetic_batch(8, 16, 10, erase_probability=0.0, seed=position, device=CPU, host=host)
        step(position, [batch], metrics)
        losses.append(metrics.read(ALONE)["loss"])
    return losses, {key: value.detach().clone() for key, value in network.state_dict().items()}


@cache
def reference(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(kind, {})


def check(kind: str, chosen: dict[SwitchName, str]) -> None:
    refused: UserError | None = None
    try:
        losses, weights = train(kind, chosen)
    except UserError as error:
        refused = error
    if refused is not None:
        assert all(":" in line and "use " in line for line in refused.lines), refused.lines
        return
    expected, plain = reference(kind)
    numerics = {switch.numerics for switch in CATALOGUE if switch.name in chosen}
    assert list(weights) == list(plain)
    assert all(torch.isfinite(torch.tensor(losses)))
    if "training" in numerics:
        # It changes what is learned: the first loss is still of the same function.
        assert losses[0] == pytest.approx(expected[0], rel=0.1)
        return
    if numerics == {"identical"}:
        assert losses == expected
        assert all(torch.equal(weights[key], plain[key]) for key in plain)
        return
    assert losses == pytest.approx(expected, rel=1e-5)


def describe(value: Any) -> str:
    return f"{value[0]}={value[1]}" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("kind", "one", "two"), pairs(slow=False), ids=describe)
def test_a_pair_agrees_with_the_reference_or_is_refused(
    kind: str, one: tuple[SwitchName, str], two: tuple[SwitchName, str]
) -> None:
    check(kind, dict([one, two]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("kind", "one", "two"), pairs(slow=True), ids=describe)
def test_a_compiled_pair_agrees_with_the_reference_or_is_refused(
    kind: str, one: tuple[SwitchName, str], two: tuple[SwitchName, str]
) -> None:
    check(kind, dict([one, two]))


def test_the_fast_preset_agrees_with_the_reference() -> None:
    for kind in BASE:
        there = [switch for switch in CATALOGUE if kind in switch.applies_to]
        check(kind, {switch.name: switch.fast["cpu"] for switch in there if switch.fast["cpu"] != switch.reference})


def test_the_sample_has_both_models_and_every_value() -> None:
    drawn = pairs(slow=False)
    assert {kind for kind, _, _ in drawn} == set(BASE)
    everything = {(s.name, value) for s in CATALOGUE if s.name not in SLOW for value in s.values[1:]}
    assert {choice for _, *pair in drawn for choice in pair} == everything
