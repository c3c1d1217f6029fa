"""Rounding errors: nothing for float64's own twin, the size of the format for the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.ledger.measure import numerics
from pycls_fast.ledger.measure.numerics import errors, measure_numerics, random_head, relative_error
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.world import ALONE
from pycls_fast.train import assemble
from pycls_fast.train.assemble import make_step
from tests.factories import config_of, randomise

SMALL = (
    "model.width=32", "model.depth=2", "model.mlp_width=32", "data.global_batch_size=32", "runtime.threads=1",
    "data.num_workers=0",
)  # fmt: skip


def measured(tmp_path: Path, digits: Path, *overrides: str, name: str = "vit_digits") -> list[dict[str, float]]:
    size = SMALL if name == "vit_digits" else SMALL[3:]
    config = config_of(*size, f"data.root={digits}", *overrides, name=name)
    file = tmp_path / "numerics.json"
    assert measure_numerics(config, steps=3, output=str(file)) == 0
    errors: list[dict[str, float]] = json.loads(file.read_text())["errors"]
    assert [each["step"] for each in errors] == [0, 3]
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "low", "high"),
    [("fp32", 1e-8, 1e-5), ("amp_bf16", 1e-4, 5e-2), ("bf16_params", 1e-4, 5e-2), ("bf16", 1e-3, 5e-2)],
)
@pytest.mark.parametrize("name", ["vit_digits", "resnet_digits"])
def test_errors_are_of_the_formats_size(
    name: str, precision: str, low: float, high: float, tmp_path: Path, digits: Path
) -> None:
    for each in measured(tmp_path, digits, f"precision={precision}", name=name):
        assert low < each["gradient_error"] < high
        # Also before training, when the ViT's own head is all zeros.
        assert low / 10 < each["logit_error"] < high


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16_params", "bf16"])
def test_a_wrong_backward_pass_is_seen_before_training(
    precision: str, tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of zeros would hide it: no gradient reaches the blocks."""
    found = measured(tmp_path, digits, f"precision={precision}")[0]["gradient_error"]
    build_parts = assemble.build_parts

    def broken(*arguments: Any) -> Any:
        parts = build_parts(*arguments)
        (_, last) = parts.network.units()[-1]
        last.register_full_backward_hook(lambda module, inputs, outputs: tuple(gradient * 1.5 for gradient in inputs))
        return parts

    monkeypatch.setattr(assemble, "build_parts", broken)
    assert measured(tmp_path, digits, f"precision={precision}")[0]["gradient_error"] > max(10 * found, 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16_params"])
def test_only_a_head_of_zeros_is_replaced_and_only_for_the_measurement(precision: str, digits: Path) -> None:
    config = config_of(*SMALL, f"data.root={digits}", f"precision={precision}")
    switches = build.switches(config, ALONE.device)
    network = build.model(config, 10, switches)
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4)
    states = (network, step.weights)
    narrow, before = ({name: value.clone() for name, value in each.state_dict().items()} for each in states)
    with random_head(step, network):
        inside = step.weights.state_dict()
        changed = [name for name, value in inside.items() if not torch.equal(value, before[name])]
        assert changed == ["head.weight"]
        assert inside["head.weight"].std() == pytest.approx(0.02, rel=0.1)
        head_KD = network.get_parameter("head.weight")
        assert torch.equal(head_KD, inside["head.weight"].to(head_KD))
    for each, expected in zip(states, (narrow, before), strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())
    with torch.no_grad():
        network.get_parameter("head.weight")[0, 0] = 1.0
    with random_head(step, network):
        assert float(network.get_parameter("head.weight").detach().abs().sum()) == 1.0


@pytest.mark.slow
def test_what_is_compiled_is_measured_compiled(digits: Path) -> None:
    """The compiler's own rounding, and kernels that are in compiled code alone, belong to the setting."""
    ran = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            ran.append(torch.is_grad_enabled())
            # An error that would not go unseen.
            return tuple(value * 1.5 for value in graph(*values))

        return run

    config = config_of(*SMALL, f"data.root={digits}", "precision=fp32")
    switches = build.switches(config, ALONE.device)
    network, exact = (randomise(build.model(config, 10, switches)).float() for _ in range(2))
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4)
    probe = synthetic_batch(
        8, config.data.image_size, 10, erase_probability=0.0, seed=0, device=ALONE.device, host=None
    )
    assert errors(step, network, exact.double(), probe)["gradient_error"] < 1e-4
    network.compile(backend=backend)
    found = errors(step, network, exact, probe)
    assert ran == [True]
    assert found["logit_error"] == pytest.approx(0.5, abs=1e-3)
    assert found["gradient_error"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), [("vit_digits", "loss.class_weights=auto"), ("resnet_digits", "loss=bce")])
def test_float64_in_chunks_is_the_same(name: str, loss: str, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is smaller; BatchNorm has its stored statistics."""
    size = SMALL if name == "vit_digits" else SMALL[3:]
    config = config_of(*size, f"data.root={digits}", "precision=fp32", loss, name=name)
    switches = build.switches(config, ALONE.device)
    network, exact = (randomise(build.model(config, 10, switches)).float() for _ in range(2))
    counts = np.arange(1, 11)
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4, class_counts=counts)
    probe = synthetic_batch(10, config.data.image_size, 10, erase_probability=0.0, seed=0, device=ALONE.device)
    seen: list[int] = []
    exact.double().register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    found = []
    for chunk in (100, 4):
        monkeypatch.setattr(numerics, "CHUNK", chunk)
        found.append(errors(step, network, exact, probe))
    assert seen == [10, 4, 4, 2]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0]["gradient_error"] < 1e-4


def test_relative_error() -> None:
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert relative_error([torch.tensor([3.0, 0.3]), torch.tensor([4.4])], exact) == pytest.approx(0.1)
    assert relative_error(exact, exact) == 0
    assert relative_error(exact, [torch.zeros(2), torch.zeros(1)]) is None
    assert relative_error([torch.tensor([float("nan"), 0.0]), exact[1]], exact) == float("inf")
