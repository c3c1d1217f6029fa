"""What ends a run early: numbers that are not finite, which modules they come from, what is not saved for them."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.optim.owned_weights import OwnedWeights
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.plan.memory_plan import MemoryPlan
from pycls_fast.train.divergence import DivergenceCheck
from pycls_fast.train.out_of_memory import enough_to_train
from pycls_fast.train.watchdog import Watchdog
from tests.factories import config_of

NAN = float("nan")
ALL, SOME, NONE = (2.0, 10, 10), (2.0, 9, 10), (2.0, 0, 10)
CONSTANT = ("precision=amp_fp16", "precision.loss_scale=1024")


def made(tmp_path: Path, *overrides: str, saved_step: int | None = None, network: nn.Module | None = None) -> Any:
    """A check of a run with these settings."""
    scaled = "precision=amp_fp16" in overrides
    scaler: Any = SimpleNamespace(is_enabled=lambda: scaled, get_scale=lambda: 1024.0)
    precision = config_of(*list(overrides)).precision

    def saved_weights() -> list[Tensor]:
        return [*network.parameters(), *OwnedWeights(network).live().values()]

    step, folder = SimpleNamespace(scaler=scaler, watchdog=None), SimpleNamespace(checkpoints=tmp_path)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(precision=precision), step=step, saved_weights=saved_weights,
        world=ALONE, folder=folder, saved_step=saved_step,
    )  # fmt: skip
    return DivergenceCheck(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "intervals", "ends", "key"),
    [
        # A constant scale may be too high.
        (CONSTANT, [ALL, ALL], 2, "precision.loss_scale"),
        (CONSTANT, [(2.0, 19, 19), (2.0, 1, 1)], 2, "precision.loss_scale"),
        (CONSTANT, [(NAN, 20, 20)], 1, "precision.loss_scale"),
        (CONSTANT, [NONE, ALL, NONE, ALL, NONE, ALL, ALL], 7, "precision.loss_scale"),
        # Now and then a step is skipped in any run.
        (CONSTANT, [(2.0, 19, 19), NONE, (2.0, 19, 19)], None, ""),
        (CONSTANT, [ALL, SOME, ALL, SOME], None, ""),
        (CONSTANT, [SOME] * 10, None, ""),
        # A dynamic one falls until it fits, or to its floor.
        (("precision=amp_fp16",), [ALL] * 10, None, ""),
        (("precision=amp_fp16", "precision.loss_scale_floor=2048"), [NONE], 1, "precision.loss_scale_floor"),
        (("precision=fp32",), [NONE, (NAN, 0, 10)], 2, "optim.lr"),
        (("precision=fp32",), [NONE, (2.0, 1, 10)], 2, "optim.lr"),
        (("precision=amp_bf16",), [NONE] * 10, None, ""),
    ],
)
def test_the_interval_that_ends_a_run(
    overrides: tuple[str, ...], intervals: list[tuple[float, int, int]], ends: int | None, key: str, tmp_path: Path
) -> None:
    check = made(tmp_path, *overrides)
    for number, (loss, skipped, steps) in enumerate(intervals, start=1):
        if number == ends:
            with pytest.raises(UserError) as caught:
                check.check(10 * number, loss, skipped, steps)
            assert caught.value.lines[0].startswith(f"{key}: ")
        else:
            check.check(10 * number, loss, skipped, steps)


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [("0.weight", torch.float16, float("-inf")), ("0.weight", torch.float32, NAN),
     ("1.running_var", torch.bfloat16, float("inf"))],
)  # fmt: skip
def test_weights_that_are_not_finite_are_not_saved(name: str, value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"step_{step:09d}").mkdir()
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(dtype)
    check = made(tmp_path, "precision=amp_fp16", saved_step=10, network=network)
    check.check_weights(12)
    with torch.no_grad():
        network.state_dict()[name][1] = value
    with pytest.raises(UserError) as caught:
        check.check_weights(12)
    first, second, *_ = caught.value.lines
    assert first.startswith("optim.lr: weights or batch norm's statistics are not finite after step 12")
    assert second == f"resume: if step 10 has diverged, too, go back with resume={tmp_path / 'step_000000005'}"


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = VisionTransformer(image_size=8, patch_size=4, width=16, depth=3, heads=2, mlp_width=24, num_classes=5)
    nn.init.normal_(model.head.weight)
    return model


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(depth=18, num_classes=5, stem="small", zero_init_last_gamma=False)


def run(model: nn.Module, watchdog: Watchdog) -> None:
    loss = F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([1, 2]))
    loss.backward()
    watchdog.check(6, loss)


@pytest.mark.parametrize(
    ("build", "name", "kind", "scaled"),
    [
        (vit, "blocks.1.mlp.fc2", "Linear", True),
        (vit, "stem.projection", "Conv2d", False),
        (vit, "head", "Linear", False),
        (resnet, "stages.1.0.norm1", "BatchNorm2d", True),
    ],
)
def test_forward(build: Any, name: str, kind: str, scaled: bool) -> None:
    model = build()
    watchdog = Watchdog(model, scaled=scaled)
    run(model, watchdog)
    assert watchdog.last is None
    with torch.no_grad():
        model.get_submodule(name).bias[0] = NAN
    message = f"in the forward pass of step 7 is in the output of {name} ({kind}); lower optim.lr"
    with pytest.raises(UserError, match=re.escape(message)):
        run(model, watchdog)


@pytest.mark.parametrize(("build", "scaled"), [(vit, True), (vit, False), (resnet, False)])
def test_backward(build: Any, scaled: bool) -> None:
    """The gradient is spoilt between two blocks: the one in front is the first that it reaches."""
    model = build()
    (before, _), (_, after) = model.units()[:2]

    def spoil(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        x = inputs[0].clone()
        x.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        return x

    after.register_forward_pre_hook(spoil)
    watchdog = Watchdog(model, scaled=scaled)
    place = f"in the backward pass of step 7 is in the gradient that reaches the output of {before} ("
    with nullcontext() if scaled else pytest.raises(UserError, match=re.escape(place)):
        run(model, watchdog)
    assert not scaled or place in watchdog.last


BATCH = ("data.global_batch_size=64", "optim.accumulation_steps=1", "precision=fp32")


def out_of_memory(world: World, *overrides: str) -> str:
    """What is said of a step that did not fit."""
    config = config_of(*BATCH, *overrides)
    with pytest.raises(UserError) as caught, enough_to_train(config, world, 10):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    return str(caught.value)


def test_the_way_out_of_too_little_memory_is_the_plans() -> None:
    plan = MemoryPlan(config_of(*BATCH), ALONE, 10)
    needed = plan.peak(16) / 0.92
    assert plan.peak(8) > plan.peak(16)
    memory = f"runtime.device_memory={needed / 1e6 + 0.01}MB"
    assert "use optim.accumulation_steps=16 " in out_of_memory(ALONE, memory)
    # The plan was wrong.
    assert "use optim.accumulation_steps=2 " in out_of_memory(ALONE, "runtime.device_memory=80GB")
    memory = f"runtime.device_memory={0.9 * plan.peak(64) / 1e6}MB"
    assert "it fits with parallel=fsdp on " in out_of_memory(ALONE, memory)
    # Two stages do not take turns with 25.
    stages = ("parallel.pipeline_degree=2", "data.global_batch_size=100", "optim.accumulation_steps=20")
    two = World(0, 2, torch.device("cpu"), pipeline=2)
    assert "use optim.accumulation_steps=50 " in out_of_memory(two, *stages)


def test_one_image_is_too_few_for_batch_norm() -> None:
    config = config_of()
    with pytest.raises(UserError, match="at least 2 images"), enough_to_train(config, ALONE, 10):
        nn.BatchNorm2d(2)(torch.zeros(1, 2, 1, 1))
