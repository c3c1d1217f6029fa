"""Recomputing activations changes no bit of what is learned, and keeps less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small import MODELS, batch, distance, gradients, held, saving, train, vit
from torch.utils.flop_counter import FlopCounterMode

from pycls_fast.models.complexity import complexity
from pycls_fast.parallel.memory import Recomputed

FULL: dict[str, Any] = {"recompute": "full"}
EVERY_SECOND: dict[str, Any] = {"recompute": "full", "recompute_every": 2}
SELECTIVE: dict[str, Any] = {"recompute": "selective"}
ALL_WAYS = pytest.mark.parametrize("way", [FULL, EVERY_SECOND, SELECTIVE], ids=["full", "every 2", "selective"])


@pytest.mark.slow
@ALL_WAYS
@pytest.mark.parametrize(("kind", "amp"), [("vit", False), ("resnet", True)], ids=["float32", "autocast"])
def test_twenty_steps_are_the_same_to_the_bit(kind: str, amp: bool, way: dict[str, Any]) -> None:
    """Drop-path at 0.4; BatchNorm's statistics and its count of batches are in the state."""
    steps = 20 if kind == "vit" else 2
    expected = train(MODELS[kind](), steps, amp=amp)
    found = train(saving(MODELS[kind](), **way), steps, amp=amp)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_with_either_attention_and_skipped_samples(attention: str) -> None:
    for arguments in ({"attention": attention}, {"attention": attention, "drop_path_compute": "skip"}):
        expected = gradients(vit(**arguments))
        for way in (FULL, SELECTIVE):
            found = gradients(saving(vit(**arguments), **way))
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_second_run_must_draw_what_the_first_drew() -> None:
    """The premise of the tests above: drop-path at 0.4 does matter, and so does BatchNorm's count."""
    assert distance(gradients(vit(), seed=7), gradients(vit(), seed=8)) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_what_is_held_between_the_passes(attention: str, amp: bool) -> None:
    sizes = {"width": 64, "mlp_width": 256, "attention": attention}
    off = held(vit(**sizes), amp=amp)
    assert held(saving(vit(**sizes), **FULL), amp=amp) <= 0.3 * off
    assert held(saving(vit(**sizes), **SELECTIVE), amp=amp) <= 0.6 * off
    assert 0.3 * off < held(saving(vit(**sizes), **EVERY_SECOND), amp=amp) <= 0.7 * off


def test_every_kth_unit_from_the_first_on() -> None:
    model = saving(vit(depth=5), recompute="full", recompute_every=2)
    assert [isinstance(block.forward, Recomputed) for block in model.blocks] == [True, False, True, False, True]


def test_selective_repeats_attention_and_its_projection_alone() -> None:
    counts = {}
    for name, way in {"off": {}, "full": FULL, "selective": SELECTIVE}.items():
        model = saving(vit(depth=3), **way)
        with FlopCounterMode(display=False) as counter:
            gradients(model)
        counts[name] = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = {name: sum(n for op, n in ops.items() if "addmm" in op) for name, ops in counts.items()}
    attention = {name: sum(n for op, n in ops.items() if "bmm" in op) for name, ops in counts.items()}
    projections = 3 * 2 * 8 * 17 * 32 * 32
    assert products["off"] + projections == products["selective"] < products["full"]
    assert attention["off"] < attention["selective"] == attention["full"]


def test_a_copy_calls_the_copy_and_names_stay() -> None:
    model = saving(vit(), **FULL)
    assert list(model.state_dict()) == list(vit().state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert gradients(model)["logits"].abs().max() > 0
    assert gradients(twin)["logits"].abs().max() == 0
    assert complexity(model, image_size=16) == complexity(vit(), image_size=16)


def test_evaluation_without_gradients_is_not_touched() -> None:
    model = saving(vit(), **FULL).eval()
    images_BCHW, _ = batch()
    with torch.no_grad():
        assert torch.equal(model(images_BCHW), vit().eval()(images_BCHW))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_under_compilation(kind: str) -> None:
    expected = gradients(MODELS[kind](drop_path=0.0))
    for way in (FULL, SELECTIVE):
        model = saving(MODELS[kind](drop_path=0.0), **way)
        for _, unit in model.units():
            unit.compile(backend="aot_eager")
        found = gradients(model)
        assert distance(found, expected) < 1e-5
        for name, value in MODELS[kind]().named_buffers():
            if name.endswith("num_batches_tracked"):
                assert model.get_buffer(name) == value + 1
