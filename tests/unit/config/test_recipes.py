"""Recipes against their sources: resolved configurations, and the reference library's own functions on their values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pycls_fast import build, published
from pycls_fast.config import RunConfig
from pycls_fast.data.policies import RandAugment, TimmRandAugment
from pycls_fast.network import Network
from pycls_fast.optim.choices import LAMB, AdamW
from pycls_fast.optim.groups import parameter_groups
from tests.factories import config_of

Facts = dict[str, Any]

# What is the same in a family. A fact that is not named in a source is that source's default.
_DEIT: Facts = {  # facebookresearch/deit, main.py's defaults; Touvron et al. 2021, Table 9
    "optimizer": "adamw", "lr": 1e-3, "batch": 1024, "decay": 0.05, "betas": (0.9, 0.999), "epochs": 300,
    "warmup": 5, "warmup_lr": 1e-6, "final_lr": 1e-5, "clip": None, "loss": "cross_entropy", "smoothing": 0.1,
    "policy": ("timm", 2, 9, 0.5, True), "erase": 0.25, "mixup": 0.8, "cutmix": 1.0, "repeats": 3, "drop_path": 0.1,
    "scale": (0.08, 1.0), "interpolation": "bicubic", "size": 224, "train_size": 224, "short_side": 256, "ema": None,
}  # fmt: skip
_DEIT3: Facts = _DEIT | {  # README_revenge.md; Touvron et al. 2022, Table 1 (crop ratio 1.0)
    "optimizer": "lamb", "lr": 3e-3, "batch": 2048, "epochs": 800, "clip": 1.0, "loss": "bce", "threshold": 0.0,
    "smoothing": 0.0, "policy": "three_augment", "color": 0.3, "erase": 0.0, "size": 192, "train_size": 192,
    "short_side": 192, "drop_path_rule": "constant",
}  # fmt: skip
_DEIT3_224: Facts = _DEIT | {  # README_revenge.md, finetuning at resolution 224x224
    "lr": 1e-5, "batch": 512, "decay": 0.1, "epochs": 20, "erase": 0.0, "repeats": 1, "short_side": 224,
    "drop_path_rule": "constant",
}  # fmt: skip
_PLAIN: Facts = {  # big_vision, vit_s16_i1k.py: wd 1e-4 is multiplied with the schedule, lr 1e-3 is not in it
    "optimizer": "adamw", "lr": 1e-3, "batch": 1024, "decay": 1e-4 / 1e-3, "betas": (0.9, 0.999), "epochs": 90,
    "warmup": 10_000 / (1_281_167 // 1024), "warmup_lr": 0.0, "final_lr": 0.0, "clip": 1.0, "loss": "cross_entropy",
    "smoothing": 0.0, "policy": ("timm", 2, 10, 0.0, False), "erase": 0.0, "mixup": 0.2, "cutmix": 0.0, "repeats": 1,
    "drop_path": 0.0, "scale": (0.05, 1.0), "interpolation": "bilinear", "size": 224, "train_size": 224,
    "short_side": 256, "ema": None, "mean": (0.5, 0.5, 0.5),
}  # fmt: skip
_EARLY: Facts = {  # pycls, branch vitconfigs, configs/vitconv_baselines/vit; core/net.py: alpha * batch / epochs
    "optimizer": "adamw", "lr": 1e-3, "batch": 2048, "decay": 0.24, "betas": (0.9, 0.999), "epochs": 400, "warmup": 5,
    "warmup_lr": 1e-4, "final_lr": 0.005 * 1e-3, "clip": None, "loss": "cross_entropy", "smoothing": 0.1,
    "policy": "auto_augment_v0", "erase": 0.0, "mixup": 0.8, "cutmix": 1.0, "repeats": 1, "drop_path": 0.0,
    "scale": (0.08, 1.0), "interpolation": "bilinear", "size": 224, "train_size": 224, "short_side": 256,
    "ema": (1e-5 * 2048 / 400 * 32, 32),
}  # fmt: skip
_MAE: Facts = _DEIT | {  # facebookresearch/mae, FINETUNE.md and main_finetune.py
    "lr": 5e-4 * 1024 / 256, "epochs": 100, "warmup_lr": 0.0, "final_lr": 1e-6, "repeats": 1, "layer_decay": 0.65,
}  # fmt: skip
_SCRATCH: Facts = _DEIT | {  # He et al. 2022, appendix A.2, supervised training of ViT-L/H from scratch
    "lr": 1e-4 * 4096 / 256, "batch": 4096, "decay": 0.3, "betas": (0.9, 0.95), "epochs": 200, "warmup": 20,
    "warmup_lr": 0.0, "final_lr": 0.0, "erase": 0.0, "repeats": 1, "drop_path": 0.2, "ema": (1 - 0.9999, 1),
}  # fmt: skip
_AUGREG: Facts = {  # vision_transformer, vit_jax/configs/common.py and augreg.py: 20,000 steps, 500 of warm-up
    "optimizer": "sgd", "lr": 0.03, "batch": 512, "decay": 0.0, "momentum": (0.9, False),
    "epochs": 20_000 / (1_281_167 // 512), "warmup": 500 / (1_281_167 // 512), "warmup_lr": 0.0, "final_lr": 0.0,
    "clip": 1.0, "loss": "cross_entropy", "smoothing": 0.0, "policy": None, "erase": 0.0, "mixup": 0.0, "cutmix": 0.0,
    "repeats": 1, "drop_path": 0.0, "scale": (0.05, 1.0), "interpolation": "bilinear", "size": 384, "train_size": 384,
    "eval_crop": "squash", "short_side": 384, "ema": None, "mean": (0.5, 0.5, 0.5),
}  # fmt: skip
_SGD: Facts = {  # PyCls' core/config.py: Nesterov, everything decays
    "optimizer": "sgd", "momentum": (0.9, True), "clip": None, "loss": "cross_entropy", "smoothing": 0.0,
    "policy": None, "erase": 0.0, "mixup": 0.0, "cutmix": 0.0, "repeats": 1, "drop_path": 0.0, "scale": (0.08, 1.0),
    "interpolation": "bilinear", "size": 224, "train_size": 224, "short_side": 256, "ema": None,
}  # fmt: skip
_PYCLS: Facts = _SGD | {  # PyCls, configs/dds_baselines; WARMUP_FACTOR 0.1
    "lr": 0.2, "batch": 256, "decay": 5e-5, "epochs": 100, "warmup": 5, "warmup_lr": 0.02, "final_lr": 0.0,
}  # fmt: skip
_REGNET: Facts = _PYCLS | {"lr": 0.4, "batch": 512, "warmup_lr": 0.04}
_RSB: Facts = _DEIT | {  # Wightman et al. 2021, Table 2; timm's hyperparameters: warmup_lr, min_lr, bce_target_thresh
    "optimizer": "lamb", "lr": 5e-3, "batch": 2048, "decay": 0.02, "warmup_lr": 1e-4, "final_lr": 1e-6, "clip": 1.0,
    "loss": "bce", "threshold": 0.2, "smoothing": 0.0, "policy": ("timm", 2, 7, 0.5, True), "erase": 0.0, "mixup": 0.1,
    "drop_path": 0.05, "short_side": math.floor(224 / 0.95),  # timm's create_transform cuts decimals off
}  # fmt: skip

FACTS: dict[str, Facts] = {
    "deit_ti16": _DEIT,
    "deit_s16": _DEIT,
    "deit_b16": _DEIT,
    "deit3_s16": _DEIT3 | {"lr": 4e-3, "drop_path": 0.05, "size": 224, "train_size": 224, "short_side": 224},
    "deit3_b16": _DEIT3 | {"drop_path": 0.2},
    "deit3_l16": _DEIT3 | {"drop_path": 0.45},
    # 160 px are 11 patches of 14 and 6 pixels that the source leaves out.
    "deit3_h14": _DEIT3 | {"drop_path": 0.6, "size": 154, "train_size": 154, "short_side": 154},
    "deit3_b16_224": _DEIT3_224 | {"drop_path": 0.2},
    "deit3_l16_224": _DEIT3_224 | {"drop_path": 0.45},
    "deit3_h14_224": _DEIT3_224 | {"drop_path": 0.55},
    "vit_s16_90ep": _PLAIN,
    "vit_s16_300ep": _PLAIN | {"epochs": 300},
    **{f"vit_{kind}_{size}gf": _EARLY for kind in "pc" for size in (1, 4, 18)},
    **{f"vit_{kind}_36gf": _EARLY | {"lr": 7e-4, "warmup_lr": 7e-5, "final_lr": 3.5e-6} for kind in "pc"},
    "vit_l16": _SCRATCH,
    "vit_h16": _SCRATCH,
    "mae_finetune_b16": _MAE,
    "mae_finetune_l16": _MAE | {"lr": 4e-3, "epochs": 50, "layer_decay": 0.75, "drop_path": 0.2},
    "mae_finetune_h14": _MAE | {"lr": 4e-3, "epochs": 50, "layer_decay": 0.75, "drop_path": 0.3},
    **{f"augreg_finetune_{size}16_384": _AUGREG for size in ("ti", "s", "b")},
    "augreg_finetune_l16_384": _AUGREG | {"lr": 0.01},  # README.md: the better rate is in the name of the tuned file
    # pytorch/vision, references/classification/README.md, vit_b_16; train.py: the average's adjustment
    "torchvision_vit_b16": _SGD | {
        "optimizer": "adamw", "lr": 3e-3, "batch": 64 * 64, "decay": 0.3, "betas": (0.9, 0.999), "momentum": None,
        "epochs": 300, "warmup": 30, "warmup_lr": 0.033 * 3e-3, "final_lr": 0.0, "clip": 1.0, "smoothing": 0.11,
        "policy": ("torchvision", 2, 9, 0.0, False), "mixup": 0.2, "cutmix": 1.0, "repeats": 3,
        "ema": (2e-5 * 4096 * 32 / 300, 32),
    },
    # the same README, ResNet, and the defaults of train.py
    "torchvision_resnet50_v1": _SGD | {
        "lr": 0.1, "batch": 256, "decay": 1e-4, "momentum": (0.9, False), "epochs": 90, "warmup": 0,
        "schedule": ("step", 30, 0.1),
    },
    # pytorch/vision#3995; pytorch.org/blog/how-to-train-state-of-the-art-models-using-torchvision-latest-primitives
    "torchvision_resnet50_v2": _SGD | {
        "lr": 0.5, "batch": 8 * 128, "decay": 2e-5, "momentum": (0.9, False), "epochs": 600, "warmup": 5,
        "warmup_lr": 0.005, "final_lr": 0.0, "smoothing": 0.1, "policy": "trivial_augment_wide", "erase": 0.1,
        "mixup": 0.2, "cutmix": 1.0, "repeats": 4, "train_size": 176, "short_side": 232,
        "ema": (2e-5 * 1024 * 32 / 600, 32),
    },
    "rsb_a1": _RSB | {"decay": 0.01, "smoothing": 0.1, "mixup": 0.2, "epochs": 600},
    "rsb_a2": _RSB,
    "rsb_a3": _RSB | {
        "lr": 8e-3, "epochs": 100, "repeats": 1, "drop_path": 0.0, "policy": ("timm", 2, 6, 0.5, True),
        "train_size": 160,
    },
    "resnet50": _PYCLS,
    "regnetx_4gf": _REGNET,
    "regnety_4gf": _REGNET,
    # libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml; its issue 4: 512 images a GPU
    "resnet50_16ep": _SGD | {
        "lr": 1.7, "batch": 8 * 512, "decay": 1e-4, "momentum": (0.9, False), "epochs": 16, "warmup": 2,
        "warmup_lr": 1.7e-4, "final_lr": 0.0, "schedule": ("linear",), "smoothing": 0.1, "size": 256,
        "train_size": 160, "short_side": 293,
    },
}  # fmt: skip


def load(name: str) -> RunConfig:
    return config_of("data.root=/nowhere", name=name)


def resolved(config: RunConfig) -> Facts:
    """What a configuration comes to, in the words of the facts."""
    augment, optim, schedule, lr = (
        config.augment, config.optim, config.schedule, config.optim.scaled(config.data.global_batch_size).lr,
    )  # fmt: skip
    policy: Any = None if augment.policy is None else augment.policy.name
    if isinstance(augment.policy, RandAugment):
        policy = ("torchvision", augment.policy.num_ops, augment.policy.magnitude, 0.0, False)
    elif isinstance(augment.policy, TimmRandAugment):
        rand = augment.policy
        policy = ("timm", rand.num_ops, rand.magnitude, rand.magnitude_std, rand.increasing)
    decay = optim.ema_decay
    sizes = dict(config.data.image_size_schedule)
    return {
        "optimizer": optim.name,
        "lr": lr,
        "batch": config.data.global_batch_size,
        "decay": optim.weight_decay,
        "betas": getattr(optim, "betas", None),
        "momentum": (optim.momentum, optim.nesterov) if optim.name == "sgd" else None,
        "layer_decay": optim.layer_decay,
        "epochs": schedule.epochs,
        "warmup": schedule.warmup_epochs,
        "warmup_lr": lr * schedule.warmup_start_factor,
        "final_lr": lr * schedule.final_factor,
        "schedule": (schedule.name, *schedule.own().values()),
        "clip": optim.clip_norm,
        "loss": config.loss.name,
        "threshold": config.loss.own().get("bce_threshold"),
        "smoothing": config.loss.label_smoothing,
        "policy": policy,
        "color": augment.color_jitter[0] if augment.color_jitter else None,
        "erase": augment.erase_probability,
        "mixup": augment.mixup_alpha,
        "cutmix": augment.cutmix_alpha,
        "repeats": augment.repeats,
        "drop_path": config.model.drop_path,
        "drop_path_rule": getattr(config.model, "drop_path_rule", "linear"),
        "scale": augment.scale,
        "interpolation": augment.interpolation,
        "size": config.data.image_size.height,
        "train_size": sizes.get(0, config.data.image_size).height,
        "eval_crop": augment.eval_crop,
        "short_side": round(config.data.image_size.height / augment.eval_crop_ratio),
        # The share of the new weights every so many steps.
        "ema": None if decay is None else (1 - decay**optim.ema_every_steps, optim.ema_every_steps),
        "ema_warmup": decay is not None and optim.ema_warmup,
        "mean": config.data.mean,
    }


@pytest.mark.parametrize("name", FACTS)
def test_a_recipe_is_its_source(name: str) -> None:
    found = resolved(load(name))
    schedule = ("cosine",)
    # What a family does not speak of is off, or ImageNet's.
    silent = dict.fromkeys(("momentum", "betas", "layer_decay", "threshold", "color", "ema"))
    silent |= {"ema_warmup": False, "drop_path_rule": "linear", "eval_crop": "center"}
    facts = silent | {"schedule": schedule, "mean": (0.485, 0.456, 0.406)} | FACTS[name]
    if found["optimizer"] == "sgd":
        facts["betas"] = None
    if facts["schedule"][0] == "step":
        facts |= {"warmup_lr": found["warmup_lr"], "final_lr": found["final_lr"]}
    assert found.keys() == facts.keys()
    for fact, value in facts.items():
        close = fact in ("lr", "warmup_lr", "final_lr", "decay", "warmup", "epochs", "ema") and value is not None
        # Whole epochs for the sources' steps; four digits for rates that are a factor of another.
        expected = pytest.approx(value, rel=0.01 if fact in ("epochs", "warmup") else 1e-4) if close else value
        assert found[fact] == expected, fact


def test_every_published_number_has_facts() -> None:
    told = {name for name, number in published.EXPERIMENTS.items() if number.top1 is not None}
    assert told - FACTS.keys() == set()


@pytest.mark.parametrize("name", ["resnet50", "vit_p_36gf"])
def test_the_rate_is_pycls(name: str) -> None:
    """core/optimizer.py: a cosine over all epochs, times a factor that grows during the warm-up."""
    facts = FACTS[name]
    ours = build.schedule(load(name), steps_per_epoch=1)
    for epoch in range(facts["epochs"]):
        least = facts["final_lr"] / facts["lr"]
        lr = facts["lr"] * ((1 - least) * 0.5 * (1 + math.cos(math.pi * epoch / facts["epochs"])) + least)
        if epoch < facts["warmup"]:
            lr *= 0.1 * (1 - epoch / facts["warmup"]) + epoch / facts["warmup"]
        # Within the warm-up the cosine has hardly begun.
        assert ours(epoch) == pytest.approx(lr, rel=5e-3 if epoch < facts["warmup"] else 1e-6), epoch


def _network(config: RunConfig, *, empty: bool = True) -> Network:
    return build.model(config, 1000, build.switches(config, torch.device("cpu")), empty=empty)


@pytest.mark.parametrize(
    ("name", "scale"), [("resnet50", 1.0), ("regnety_4gf", 1.0), ("torchvision_resnet50_v2", 1.0), ("rsb_a1", 0.0)]
)
def test_residual_branches_begin_as_in_the_source(name: str, scale: float) -> None:
    """PyCls' BN.ZERO_INIT_FINAL_GAMMA and torchvision's zero_init_residual are off, timm's zero_init_last is on."""
    _, block = _network(load(name), empty=False).units()[1]
    *_, last = (module for module in block.modules() if isinstance(module, nn.BatchNorm2d))
    assert torch.equal(last.weight, torch.full_like(last.weight, scale))


@pytest.mark.slow
def test_what_decays_elsewhere() -> None:
    """torchvision: all of it, or all but norms; FFCV: all but norms; pycls' ViTs: all but norms and biases.

    FFCV takes what has "bn" in its name for norms, so that those of the shortcuts decay there; here they do not.
    """
    kinds = {}
    for name in ("torchvision_resnet50_v1", "torchvision_resnet50_v2", "resnet50_16ep", "resnet50", "vit_p_1gf"):
        config = load(name)
        network = _network(config)
        undecayed = [group for group in parameter_groups(network, config.optim) if not group["weight_decay"]]
        plain = {id(parameter) for group in undecayed for parameter in group["params"]}
        kinds[name] = {key for key, parameter in network.named_parameters() if id(parameter) in plain}
        norms = {
            f"{owner}.{key}"
            for owner, module in network.named_modules()
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm)
            for key, _ in module.named_parameters(recurse=False)
        }
        biases = {key for key, _ in network.named_parameters() if key.endswith(".bias")}
        expected = {"torchvision_resnet50_v1": set(), "resnet50": set(), "vit_p_1gf": norms | biases}
        assert kinds[name] == expected.get(name, norms)
    config = load("torchvision_vit_b16")
    assert {group["weight_decay"] for group in parameter_groups(_network(config), config.optim)} == {0.3}


def test_adam_and_lamb_are_those_of_the_sources() -> None:
    lamb, adamw = load("rsb_a1").optim, load("deit_s16").optim
    assert isinstance(lamb, LAMB)
    assert isinstance(adamw, AdamW)
    # timm's Lamb has 1e-6, DeiT III's --opt-eps is 1e-8; apex's FusedLAMB and timm's clip at 1 by themselves.
    assert (lamb.eps, load("deit3_s16").optim.eps, adamw.eps) == (1e-6, 1e-8, 1e-8)  # type: ignore[union-attr]
