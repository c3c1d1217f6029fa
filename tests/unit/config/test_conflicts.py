"""Every row of the table of conflicts refuses, and each way out that it names composes and passes."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml

from pycls_fast import build
from pycls_fast.config import Purpose, RunConfig, conflicts, load_config
from pycls_fast.config.compose import Composed, check, compose
from pycls_fast.config.conflicts import CONFLICTS, Condition, Conflict, problems
from pycls_fast.config.keys import CONFIGS
from pycls_fast.errors import UserError
from pycls_fast.models.choices import Model, ResNetModel
from pycls_fast.speed import SWITCHES

# A value for each condition that excludes some.
OTHER = {
    "data.image_size_schedule": "[[2,32]]",
    "data.label_separator": "; data.source=manifest loss=bce",
    "data.sampling": "balanced",
    "data.shard_cache_gib": "1.0 data.source=tar",
    "data.val": "val.tar data.source=tar",
    "distill.teacher": "some.safetensors",
    "loss.bce_threshold": "0.2 loss=bce",
    "loss.class_weights": "auto",
    "model.drop_path": "0.1",
    "model.experts": "4",
    "model.groups": "2",
    "model.width_per_group": "32",
    "optim.lora_rank": "2",
    "optim.trainable": "[head]",
    "parallel.shard_degree": "2",
    "parallel.replicate_degree": "2",
    "parallel.compression": "bf16",
    "parallel.tensor_degree": "2 parallel=fsdp",
    "parallel.expert_degree": "2 model=vit_moe_digits parallel=fsdp",
    "parallel.pipeline_degree": "2 parallel=ddp optim.accumulation_steps=2",
}
MODELS = {"model.experts=0|null": "vit_digits", "model.kind!=vit": "resnet50"}
# Settings that make a fact true.
EXAMPLES = {
    conflicts.FOREIGN: "model=timm model.name=vit_tiny_patch16_224",
    conflicts.DRAWS_ON_DEVICE: "model=timm model.name=vit_tiny_patch16_224 model.drop_path=0.1",
    conflicts.NO_FILES: "data.source=tar",
    conflicts.MICROBATCHES: "optim.accumulation_steps=2",
    conflicts.SHARDED: "parallel=fsdp",
    conflicts.KEEPS_WEIGHTS: "parallel=ddp",
    conflicts.RESHARDS: "parallel=fsdp",
    conflicts.FLATTENED: "parallel=fairscale_fsdp",
    conflicts.ONE_OWNER: "parallel=fairscale_sharded_ddp",
    conflicts.NOT_DDP: "parallel=fsdp",
    conflicts.FREEZES_NOTHING: "parallel=fairscale_fsdp",
    conflicts.NO_PARTS: "parallel=ddp",
    conflicts.IN_PARTS: "parallel=fsdp",
    conflicts.NO_STAGES: "parallel=fairscale_sharded_ddp",
    conflicts.NO_GROUPS: "parallel=fsdp",
    conflicts.UNSCALED: "precision=amp_bf16",
    conflicts.HALF_WEIGHTS: "precision=bf16_params",
    conflicts.WHOLE_HALF: "precision=bf16_params parallel=ddp",
    conflicts.NO_MASTERS: "precision=bf16",
    conflicts.WIDE_ON_CUDA: "precision=fp32",
    conflicts.FLATTENED_HALF: "parallel=fairscale_fsdp precision=bf16_params",
    conflicts.NOT_ELEMENTWISE: "optim=lamb",
    conflicts.KEEPS_STATE: "optim=adamw8bit",
    conflicts.COMPILES_ITSELF: "optim=adamw8bit",
    conflicts.RUNS_PARTS_AGAIN: "speed.recompute=full parallel.tensor_degree=2 parallel=fsdp",
    conflicts.NOT_SHARDABLE: "optim=muon",
    conflicts.NOT_CAPTURABLE: "speed.optimizer=foreach",
    conflicts.TRUST_RATIO: "optim=lamb optim.weight_decay=0.1",
    conflicts.FROM_ZEROS: "optim=lamb optim.weight_decay=0.1",
    conflicts.ERASED_BY_WORKERS: "speed.erase_on=cpu augment.erase_probability=0.5",
    conflicts.ERASED_ON_DEVICE: "speed.erase_on=device augment.erase_probability=0.5",
    conflicts.MIXED_BY_WORKERS: "speed.mix_on=cpu augment.mixup_alpha=0.2",
    conflicts.SOFTMAX: "loss=cross_entropy",
}


@cache
def composed(name: str, *overrides: str) -> Composed:
    return compose(name, overrides, [CONFIGS])


def checked(name: str, overrides: list[str], purpose: Purpose) -> RunConfig:
    """Keys are set in what Hydra composed of the groups: it takes longer than all the rest."""
    keys = [override for override in overrides if "." in override.partition("=")[0]]
    found = composed(name, *(override for override in overrides if override not in keys))
    values: Any = deepcopy(found.values)
    for override in keys:
        path, _, text = override.partition("=")
        section, key = path.split(".")
        values.setdefault(section, {})[key] = yaml.safe_load(text)
    return check(replace(found, values=values, overrides=(*found.overrides, *keys)), purpose)


EXPERIMENTS = {
    "vit": ["vit_digits"],
    "resnet": ["resnet_digits"],
    "timm": ["vit_digits", "model=timm", "model.name=vit_tiny_patch16_224"],
    "given": ["vit_digits", "model=given", "model.module=Mine"],
}
CONV = "model.stem=conv model.stem_widths=[8,16] model.stem_strides=[2,2] model.patch_size=4"
CUDA = torch.device("cuda")


def example(condition: Condition) -> str:
    """Settings that meet it."""
    if not condition.text:
        assert condition in EXAMPLES, f"a new fact of {condition.key}: add settings that make it true to EXAMPLES"
        return EXAMPLES[condition]
    if condition.text in MODELS:
        return f"model={MODELS[condition.text]}"
    key, _, values = condition.text.partition("=")
    if (name := key.removesuffix("!")) != key:
        assert name in OTHER, f"a new condition {condition.text}: add another value of {name} to OTHER"
        return f"{name}={OTHER[name]}"
    value = values.partition("|")[0]
    if key == "model.kind":
        return ""
    if condition.text == "model.stem=conv":
        return CONV
    # A group brings what it needs; fairscale's and others' names are those of their files.
    return f"precision={value}" if key == "precision.name" else f"{key}={value}"


def kind_of(conflict: Conflict) -> str:
    text = f"{conflict.a.text} {conflict.b.text}"
    named = [kind for kind in EXPERIMENTS if f"model.kind={kind}" in text]
    if "model.depth" in text or ("image_size_schedule" in text and not named) or "speed.convolution" in text:
        return "resnet"
    return named[0] if named else "vit"


def told(conflict: Conflict, *also: str) -> tuple[str, ...]:
    """The lines that somebody who types both settings gets."""
    name, *model = EXPERIMENTS[kind_of(conflict)]
    needs = [SWITCHES["cuda_graphs"].needs["on"]] if "cuda_graphs" in str(conflict) else []
    given = [*needs, example(conflict.a), example(conflict.b), *also]
    weights = ["weights=some.safetensors"] if "trainable" in str(conflict) else []
    overrides = [*model, *weights, *(one for text in given for one in text.split())]
    # The last one of a key counts.
    typed = {override.partition("=")[0]: override for override in overrides}
    purpose = Purpose(trains=True, scores_sets=True)
    try:
        build.switches(checked(name, ["speed=reference", *typed.values()], purpose), CUDA)
    except UserError as error:
        return error.lines
    return ()


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda row: "-".join(map(example, (row.a, row.b))))
def test_a_row_refuses_and_each_way_out_passes(conflict: Conflict) -> None:
    def of_this_row(*also: str) -> list[str]:
        line = re.compile(rf"{re.escape(conflict.a.key)}: .* conflicts with {re.escape(conflict.b.key)}=")
        return [one for one in told(conflict, *also) if line.match(one) and conflict.why in one]

    (line,) = of_this_row()
    assert f"; use {conflict.use}" in line
    for way_out in conflict.use.split(" or "):
        assert of_this_row(way_out) == [], way_out


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_switch_by_hand_that_the_model_has_nothing_of(kind: str) -> None:
    name, *overrides = EXPERIMENTS[kind]
    config = load_config(name, ["speed=reference", *overrides])
    for switch in SWITCHES.values():
        for value in switch.values:
            told = dict(problems(config.with_values(speed={switch.name: value}), Purpose()))
            line = told.get(f"speed.{switch.name}", "")
            assert (" is for model.kind=" in line) == (
                not switch.concerns(Model.choices()[kind]) and value != switch.reference
            )


def test_a_model_of_ones_own_has_the_switches_that_it_names() -> None:
    class Own(ResNetModel):
        switches = ("layout",)

    config = load_config("resnet_digits", ["speed=reference"]).with_values(speed={"layout": "batch_second"})
    assert "speed.layout" in dict(problems(config, Purpose()))
    own = config.model_copy(update={"model": Own.model_construct(**dict(config.model))})
    assert "speed.layout" not in dict(problems(own, Purpose()))


@pytest.mark.parametrize(
    ("experiment", "overrides", "key"),
    [
        ("vit_digits", ["model.positions=sincos2d", "model.width=6", "model.heads=2"], "model.width"),
        ("vit_digits", ["model.stem=conv"], "model.stem_strides"),
        ("vit_digits", ["model.stem=conv", "model.stem_widths=[8]", "model.stem_strides=[3]"], "model.stem_strides"),
        ("vit_digits", ["model=timm", "model.name=vit_tiny_patch16_224", "+model.options.pretrained=true"],
         "model.options: pretrained"),
        ("vit_digits", ["model.num_classes=1"], "model.num_classes"),
        ("vit_digits", ["model.depth=1000000"], "model.depth"),
        ("vit_digits", ["data.global_batch_size=31", "optim.accumulation_steps=2"], "data.global_batch_size"),
        ("vit_digits", ["data.global_batch_size=1", "augment.mixup_alpha=0.2"], "data.global_batch_size"),
        ("resnet_digits", ["model.stem=imagenet", "data.image_size=24"], "data.image_size"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit(experiment: str, overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}: "):
        load_config(experiment, overrides)


@pytest.mark.parametrize(
    ("overrides", "purpose", "key"),
    [
        (["data.source=folder", "data.root=null"], Purpose(), "data.root"),
        (["optim.trainable=[head]"], Purpose(trains=True), "weights"),
        ([], Purpose(scores=True), "weights"),
        (["data.eval_set=v2", "data.eval_root=there"], Purpose(), "data.eval_set"),
    ],
)
def test_what_a_purpose_needs(overrides: list[str], purpose: Purpose, key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key}: "):
        checked("vit_digits", overrides, purpose)
    checked("vit_digits", overrides, Purpose(needs_data=False, trains=True, scores_sets=True))
