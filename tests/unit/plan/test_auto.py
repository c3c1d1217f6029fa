"""What is left to the number of images."""

from __future__ import annotations

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import World
from pycls_fast.plan.auto import resolve_auto
from tests.factories import config_of


def world(size: int = 1) -> World:
    return World(rank=0, size=size, device=torch.device("cpu"))


def finetune(*overrides: str, name: str = "finetune") -> RunConfig:
    return config_of("data.root=/nowhere", *overrides, name=name)


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "every"),
    [
        (3, 2, 50, 3),
        (48, 8, 27, 2),
        (255, 32, 23, 2),
        (256, 64, 40, 2),
        (2_000, 64, 10, 1),
        (4_000, 64, 10, 1),
        (50_000, 64, 10, 1),
        (1_281_167, 64, 10, 1),
    ],
)
def test_sizes_follow_the_number_of_images(images: int, batch: int, epochs: int, every: int) -> None:
    config = resolve_auto(finetune(), images, world())
    assert config.data.global_batch_size == batch
    assert config.schedule.epochs == epochs
    assert config.runtime.eval_every_epochs == every
    assert images // batch >= 1
    # A run resumes with what it began with: the numbers are the same the second time.
    assert resolve_auto(config, images, world()) == config


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 1), (8, 1), (2, 4)])
def test_the_batch_can_be_shared_out(ranks: int, steps: int) -> None:
    config = finetune(f"optim.accumulation_steps={steps}")
    for images in (ranks * steps, 48, 1_000, 100_000):
        batch = resolve_auto(config, images, world(ranks)).data.global_batch_size
        assert batch % (ranks * steps) == 0
        assert batch <= max(images, ranks * steps)
        assert batch // (ranks * steps) >= min(2, images // (ranks * steps))


def test_numbers_that_are_given_stay() -> None:
    config = finetune(
        "schedule.epochs=7", "schedule.warmup_epochs=0", "data.global_batch_size=13", "runtime.eval_every_epochs=4"
    )
    found = resolve_auto(config, 48, world())
    assert (found.schedule, found.data, found.runtime) == (config.schedule, config.data, config.runtime)


@pytest.mark.parametrize("name", ["finetune", "linear_probe"])
@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.1), (2, 0.2), (10, 1.0), (50, 2.0)])
def test_the_warm_up_follows_the_epochs(name: str, epochs: int, warmup: float) -> None:
    config = resolve_auto(finetune(name=name).with_values(schedule={"epochs": epochs}), 10_000, world())
    assert config.schedule.warmup_epochs == pytest.approx(warmup)
    rate = build.schedule(config, steps_per_epoch=100)
    # The last step's rate is far below the highest, which the warm-up reaches.
    assert rate(rate.curve_steps - 1) < 0.01 * rate.lr
    assert rate(rate.warmup_steps) == pytest.approx(rate.lr, rel=0.01)


def test_a_warm_up_longer_than_what_was_chosen() -> None:
    with pytest.raises(UserError, match=r"schedule.warmup_epochs: 30 is longer than the training of 10 epochs"):
        resolve_auto(finetune("schedule.warmup_epochs=30"), 50_000, world())
    resolve_auto(finetune("schedule.warmup_epochs=20"), 48, world())


@pytest.mark.parametrize(
    ("model", "decay"), [("vit_s16", 0.75), ("resnet18", None), ("timm model.name=convnext_atto", 0.75),
                         ("timm model.name=tf_efficientnet_lite0", None)],
)  # fmt: skip
def test_the_family_decides_on_layer_decay(model: str, decay: float | None) -> None:
    config = finetune(*f"model={model}".split())
    assert resolve_auto(config, 100, world()).optim.layer_decay == decay
    given = finetune(*f"model={model}".split(), "optim.layer_decay=null")
    assert resolve_auto(given, 100, world()).optim.layer_decay is None


@pytest.mark.parametrize(("images", "frozen"), [(19_999, "frozen"), (20_000, "train")])
def test_few_images_leave_the_statistics_alone(images: int, frozen: str) -> None:
    assert resolve_auto(finetune("model=resnet18"), images, world()).optim.batch_norm == frozen
    assert resolve_auto(finetune("optim.batch_norm=train"), images, world()).optim.batch_norm == "train"
