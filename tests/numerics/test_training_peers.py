"""Whole training steps, as recipes configure them, against a plain loop of timm's parts: float64, random weights.

timm's are the network, the optimizer with its groups, the schedule, the loss, clipping and the moving average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.parallel.world import ALONE
from pycls_fast.train.assemble import make_step
from pycls_fast.train.metrics import TrainMetrics
from tests.factories import Convert, config_of, in_our_names, randomise

CLASSES, BATCH, EPOCHS, STEPS_PER_EPOCH, STEPS = 7, 8, 4, 2, 5
COMMON = (
    "precision=fp32",
    "speed=reference",
    "data=synthetic",
    f"data.global_batch_size={BATCH}",
    f"model.num_classes={CLASSES}",
    "model.drop_path=0",
    f"schedule.epochs={EPOCHS}",
    "schedule.warmup_epochs=1",
    # Steps large enough for an error in any part to show.
    "optim.lr_batch_size=null",
    "optim.clip_norm=0.7",
    "optim.ema_decay=0.9",
    "optim.ema_warmup=false",
)
VIT = ("data.image_size=32", "model.width=48", "model.depth=3", "model.heads=3", "model.mlp_width=192")
MAE = ("model.classifier=pooled", "model.class_token=true")


class SplitQkv(nn.Module):
    """timm's `qkv` as three layers: LAMB and Adafactor see whole tensors, and ours has three."""

    def __init__(self, qkv: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(qkv.in_features, qkv.out_features // 3) for _ in range(3))

    def forward(self, features_BND: Tensor) -> Tensor:
        return torch.cat([part(features_BND) for part in self.parts], dim=-1)


def from_split_vit(state: Any) -> dict[str, Tensor]:
    joined = {name: tensor for name, tensor in state.items() if ".parts." not in name}
    for name in state:
        if ".parts.0." in name:
            parts = [state[name.replace("parts.0.", f"parts.{part}.")] for part in range(3)]
            joined[name.replace(".parts.0", "")] = torch.cat(parts)
    return in_our_names(joined)


def vit(*, split: bool = False, **kwargs: Any) -> nn.Module:
    sizes = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": CLASSES}
    model: Any = timm.create_model("vit_tiny_patch16_224", **sizes, **kwargs)
    if split:
        for block in model.blocks:
            block.attn.qkv = SplitQkv(block.attn.qkv)
    return randomise(model)


@dataclass(frozen=True)
class Case:
    """A recipe shrunk by overrides, and timm's name and own arguments of its optimizer."""

    experiment: str
    overrides: Sequence[str]
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    # Layer decay, and two microbatches to a step.
    "mae": Case(
        "mae_finetune_b16", (*VIT, *MAE, "optim.lr=1e-2", "optim.accumulation_steps=2"), "adamw",
        model={"global_pool": "avg", "class_token": True},
    ),
    "deit3": Case(
        "deit3_s16", (*VIT, "model.layer_scale=0.1", "optim.lr=1e-2"), "lamb",
        {"max_grad_norm": None, "eps": 1e-8}, {"split": True, "init_values": 0.1, "no_embed_class": True},
    ),
    "rsb": Case("rsb_a2", ("model=resnet18", "data.image_size=32", "optim.lr=1e-2"), "lamb", {"max_grad_norm": None}),
    "lion": Case("vit_s16", (*VIT, "optim=lion", "optim.lr=1e-3", "optim.weight_decay=0.3"), "lion"),
    "adafactor": Case(
        "vit_s16", (*VIT, "optim=adafactor", "optim.lr=1e-3", "optim.momentum_dtype=float32"), "adafactorbv",
        {"momentum_dtype": torch.float32, "min_dim_size_to_factor": 32}, {"split": True},
    ),
    "sgd": Case("vit_s16", (*VIT, "optim=sgd", "optim.lr=1e-1", "optim.weight_decay=1e-2"), "sgd"),
}  # fmt: skip


def mixed_batches(config: RunConfig) -> list[Batch]:
    """The microbatches of one step, mixed as by mixup."""
    parts, size = config.optim.microbatches, config.data.image_size
    count, found = BATCH // parts, []
    for _ in range(parts):
        images, labels = torch.randn(count, 3, *size, dtype=torch.float64), torch.randint(CLASSES, (count,))
        lam = float(torch.rand(()))
        mixed = lam * images + (1 - lam) * images.roll(1, 0)
        found.append(Batch(mixed, labels, torch.arange(count), None, lam=lam))
    return found


def timm_loss(config: RunConfig, logits_BK: Tensor, batch: Batch) -> Tensor:
    assert batch.lam is not None
    one_BK, other_BK = (one_hot(labels_B, CLASSES).double() for labels_B in (batch.labels_B, batch.labels_B.roll(1, 0)))
    target_BK = batch.lam * one_BK + (1 - batch.lam) * other_BK
    # In float64; timm's own smoothing, in float32, is compared in `tests/unit/test_losses.py`.
    target_BK = (1 - config.loss.label_smoothing) * target_BK + config.loss.label_smoothing / CLASSES
    if config.loss.name == "bce":
        return BinaryCrossEntropy(target_threshold=config.loss.bce_threshold)(logits_BK, target_BK)
    return SoftTargetCrossEntropy()(logits_BK, target_BK)


def timm_parts(case: Case, config: RunConfig, model: nn.Module) -> tuple[Any, Any]:
    """timm's optimizer and schedule for the configuration."""
    settings, curve = config.optim, config.schedule
    optimizer = create_optimizer_v2(
        model, case.optimizer, settings.lr, settings.weight_decay, layer_decay=settings.layer_decay,
        filter_bias_and_bn=not settings.decay_norms, **case.options,
    )  # fmt: skip
    after_warmup = curve.curve_from == "warmup_end"
    schedule, _ = create_scheduler_v2(
        optimizer, num_epochs=EPOCHS - after_warmup, warmup_epochs=1, warmup_prefix=after_warmup,
        warmup_lr=curve.warmup_start_factor * settings.lr, min_lr=curve.final_factor * settings.lr,
        step_on_epochs=False, updates_per_epoch=STEPS_PER_EPOCH,
    )  # fmt: skip
    return optimizer, schedule


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "rsb" else []) for name in CASES]
)
def test_steps_are_those_of_timms_loop(name: str) -> None:
    case = CASES[name]
    config = config_of(*COMMON, *case.overrides, "needs_weights=false", name=case.experiment)
    is_vit = config.model.kind == "vit"
    theirs = vit(**case.model) if is_vit else randomise(timm.create_model("resnet18", num_classes=CLASSES))
    convert: Convert = from_split_vit if case.model.get("split") else in_our_names
    switches = build.switches(config, ALONE.device)
    ours = build.model(config, CLASSES, switches).double()
    start = {key: tensor.clone() for key, tensor in convert(theirs.state_dict()).items()}
    ours.load_state_dict(start)
    step = make_step(config, ours, ALONE, switches, steps_per_epoch=STEPS_PER_EPOCH)
    step.prepare = lambda batch, seed=None: batch.images_BHWC  # type: ignore[assignment]
    optimizer, schedule = timm_parts(case, config, theirs)
    average, metrics = ModelEmaV3(theirs, decay=0.9), TrainMetrics(ALONE.device)
    torch.manual_seed(1)
    for number in range(STEPS):
        batches = mixed_batches(config)
        with torch.random.fork_rng(devices=[]):
            step(number, batches, metrics)
        schedule.step_update(number)
        optimizer.zero_grad()
        loss = torch.stack([timm_loss(config, theirs(batch.images_BHWC), batch) for batch in batches]).mean()
        loss.backward()
        dispatch_clip_grad(theirs.parameters(), 0.7)
        optimizer.step()
        average.update(theirs)
        assert metrics.read(ALONE)["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert step.ema is not None
    expected, expected_average = convert(theirs.state_dict()), convert(average.module.state_dict())
    for key, value in ours.state_dict().items():
        moved = (expected[key] - start[key]).double().norm()
        # The keys' bias has no gradient but rounding, which Adam's and Lion's steps make as large as any other.
        if not key.endswith("key.bias"):
            assert moved > 0, key
            assert (value - expected[key]).double().norm() < 1e-9 * moved, key
            assert (step.ema.values[key] - expected_average[key]).double().norm() < 1e-9 * moved, key
