"""What formats lose: rounding errors, nothing for float64 itself; counts of gradients on values whose fate is known.

And short trainings, which begin and end as any training; so do timings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure import numerics as module
from pycls_fast.ledger.measure.numerics import (
    LayerCounts,
    Watch,
    count_gradients,
    errors,
    measure_numerics,
    random_head,
)
from pycls_fast.ledger.measure.timing import time_variants
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.world import ALONE
from pycls_fast.train import assemble
from pycls_fast.train.assemble import make_step
from pycls_fast.train.tasks.lr_range import lr_range_test
from tests.factories import config_of, randomise, step_of
from tests.integration.runs import TINY

SMALL = (
    "model.width=32", "model.depth=2", "model.mlp_width=32", "data.global_batch_size=32", "runtime.threads=1",
    "data.num_workers=0",
)  # fmt: skip


def measured(tmp_path: Path, digits: Path, *overrides: str, name: str = "vit_digits") -> list[dict[str, float]]:
    size = SMALL if name == "vit_digits" else SMALL[3:]
    config = config_of(*size, f"data.root={digits}", f"run_dir={tmp_path}", *overrides, name=name)
    assert measure_numerics(config, steps=3, output=None) == 0
    file = max(tmp_path.glob("numerics-*.json"))
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
    step = step_of(config)
    network: Any = step.network
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
    train: Any = SimpleNamespace(class_counts=lambda: np.arange(1, 11), label_sets=None)
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4, train=train)
    probe = synthetic_batch(10, config.data.image_size, 10, erase_probability=0.0, seed=0, device=ALONE.device)
    seen: list[int] = []
    exact.double().register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    found = []
    for chunk in (100, 4):
        monkeypatch.setattr(module, "CHUNK", chunk)
        found.append(errors(step, network, exact, probe))
    assert seen == [10, 4, 4, 2]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0]["gradient_error"] < 1e-4


def test_images_with_several_labels(digits: Path) -> None:
    """Each label is a set of classes, and there are more sets than classes."""
    config = config_of(*SMALL, f"data.root={digits}", "precision=fp32", "loss=bce")
    switches = build.switches(config, ALONE.device)
    network, exact = (randomise(build.model(config, 10, switches)).float() for _ in range(2))
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4)
    step.sets_LK = torch.rand(40, 10).round()
    probe = synthetic_batch(8, config.data.image_size, 40, erase_probability=0.0, seed=0, device=ALONE.device)
    assert int(probe.labels_B.max()) >= 10
    found = errors(step, network, exact.double(), probe)
    assert 0 < found["gradient_error"] < 1e-4


CPU = torch.device("cpu")


def counted(*values: float, scale: float = 1024.0) -> dict[str, object]:
    counts = LayerCounts(scale, CPU)
    for value in values:
        counts.add_gradient(torch.tensor([value]))
    return counts.record()


def test_gradients_around_float16s_limits() -> None:
    """2^-24 is its smallest number, 2^-25 rounds to even: to zero."""
    record = counted(0.0, 2.0**-24, -(2.0**-25), 2.0**-34, 2.0**-36, 2.0**6)
    assert (record["gradients"], record["zero"]) == (6, 1)
    assert record["exponents"] == {"-36": 1, "-34": 1, "-25": 1, "-24": 1, "6": 1}
    assert record["below_subnormal"] == pytest.approx(3 / 5)
    # Times 2^10.
    assert record["below_subnormal_scaled"] == pytest.approx(1 / 5)
    # The histogram's ends.
    assert counted(2.0**-100, 1.9 * 2.0**-60, 3.0 * 2.0**30, 1.5)["exponents"] == {"-60": 2, "0": 1, "16": 1}


def test_updates_around_half_a_unit_in_the_last_place() -> None:
    """Between 1 and 2 float16 numbers are 2^-10 apart and bfloat16 numbers 2^-7."""
    counts = LayerCounts(1.0, CPU)
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    counts.add_update(before, before + torch.tensor([0.0, 2.0**-12, 1.5 * 2.0**-11, 1.5 * 2.0**-8, 0.1]))
    record = counts.record()
    assert record["updates"] == 4
    assert record["updates_lost_float16"] == 1 / 4
    assert record["updates_lost_bfloat16"] == 2 / 4


def test_layers_and_their_sum() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = Watch(network, 1.0)
    before = network[0].weight.detach().clone()
    for _ in range(2):
        with watch.around(optimizer):
            network(torch.randn(5, 4)).sum().backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1e-30)
            optimizer.step()
            optimizer.zero_grad()
    total, layers = watch.records()
    assert {name: layer["gradients"] for name, layer in layers.items()} == {"0": 2 * 15, "1": 2 * 8}
    assert total["gradients"] == 2 * (15 + 8)
    # Counted before they were clipped to nothing, and only inside.
    assert total["below_subnormal"] == 0
    assert total["updates"] == 0
    assert torch.equal(network[0].weight, before)
    network(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    assert watch.records()[0]["gradients"] == 46


def test_a_short_training(tmp_path: Path, digits: Path) -> None:
    output = tmp_path / "g.json"
    overrides = [*TINY, f"data.root={digits}", "data.num_workers=0"]
    config = config_of(*overrides)
    assert count_gradients(config, steps=2, warmup_steps=2, loss_scale=4096, output=str(output)) == 0
    record = json.loads(output.read_text())
    parameters = record["parameters"]
    assert record["total"]["gradients"] == 2 * parameters
    assert sum(layer["gradients"] for layer in record["layers"].values()) == 2 * parameters
    assert record["total"]["below_subnormal_scaled"] < record["total"]["below_subnormal"] < 0.5
    assert 0 < record["total"]["updates_lost_float16"] < record["total"]["updates_lost_bfloat16"] < 1
    assert sum(record["total"]["exponents"].values()) == 2 * parameters - record["total"]["zero"]
    with pytest.raises(UserError, match=r"^precision: fp16_master rounds gradients before they are counted; use"):
        count_gradients(
            load_config("vit_digits", [*overrides, "precision=fp16_master"]),
            steps=1, warmup_steps=0, loss_scale=1, output=str(output),
        )  # fmt: skip


Measure = Callable[[RunConfig, Path], int]


def gradients(config: RunConfig, folder: Path) -> int:
    return count_gradients(config, steps=1, warmup_steps=0, loss_scale=1.0, output=str(folder / "g.json"))


def numerics(config: RunConfig, folder: Path) -> int:
    return measure_numerics(config, steps=1, output=str(folder / "n.json"))


def learning_rate(config: RunConfig, folder: Path) -> int:
    return lr_range_test(config, steps=2, lr_min=1e-4, lr_max=1e-3, output=str(folder))


def configured(digits: Path, *overrides: str) -> RunConfig:
    return config_of(*TINY, f"data.root={digits}", "data.num_workers=0", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [gradients, numerics, learning_rate])
def test_damaged_images_are_named(
    measure: Measure, tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(digits, tmp_path / "images")
    bad = [str(file) for file in sorted(root.rglob("*.png"))[::3]]
    for name in bad:
        Path(name).write_bytes(b"no picture")
    assert measure(configured(root), tmp_path) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    named = [line.removeprefix("warning: ").partition(": ")[0] for line in found]
    assert named
    assert len(set(named)) == len(named)
    assert set(named) <= set(bad)
    assert all(line.endswith("; left out") for line in found)
    with pytest.raises(UserError, match=r"^data\.max_damaged: \d+ images cannot be read, more than 0:"):
        measure(configured(root, "data.max_damaged=0"), tmp_path)


def test_operations_of_a_frozen_network_are_left_out(tmp_path: Path, digits: Path) -> None:
    """Three forward passes would be more than it computes."""
    variants = [("all", configured(digits)), ("head", configured(digits, "optim.trainable=[head]"))]
    file = tmp_path / "t.json"
    status = time_variants(variants, mode="model", steps=1, warmup_steps=0, repeats=1, matmul_size=16, output=str(file))
    assert status == 0
    whole, frozen = json.loads(file.read_text())["variants"]
    assert {"flops_per_second", "share_of_matmul"} <= set(whole["train"])
    assert not {"flops_per_second", "share_of_matmul"} & set(frozen["train"])
    assert "flops_per_second" in frozen["inference"]
