"""Everything in `configs/` composes and builds; options without files, and `speed=meta2022`, over several groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

from pycls_fast import build, published
from pycls_fast.config import RunConfig, Section, load_config
from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import known_keys, section_keys
from pycls_fast.config.run import PRESETS
from pycls_fast.errors import UserError
from pycls_fast.models.choices import ViTModel
from pycls_fast.models.complexity import complexity
from pycls_fast.optim.owned_weights import OwnedWeights
from pycls_fast.parallel.world import ALONE
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.speed import Speed, resolve
from tests.factories import load_run_config

EXPERIMENTS = sorted({file.stem for file in CONFIGS.glob("*.yaml")} - {"base"})
# Those that the README shows; the others are built by the slow tests.
SHOWN = ("vit_digits", "vit_h16", "resnet50", "finetune", "linear_probe")

# DeiT begins as timm does, DeiT III as its own models_v2.py, which is the same; every other ViT as google-research's.
AS_DEIT = {f"{kind}_{size}16" for kind in ("deit", "vit") for size in ("ti", "s", "b")} | {
    f"deit3_{size}" for size in ("s16", "b16", "l16", "h14", "b16_224", "l16_224", "h14_224")
}


def load(name: str, *overrides: str) -> RunConfig:
    """An experiment; what is read from a folder gets one."""
    root = [] if "digits" in name else ["data.root=/nowhere"]
    return load_config(name, [*root, *overrides])


IMAGES = {"cifar10": 50_000, "digits": 1_437, "ledger_quick": 1_437, "linear_probe": 10_000}
"""Of experiments whose names have this in them; of the others those of ImageNet."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else [pytest.mark.slow]) for name in EXPERIMENTS]
)
def test_an_experiment_builds(name: str) -> None:
    images = next((images for part, images in IMAGES.items() if part in name), published.IMAGENET_TRAINING_IMAGES)
    config = resolve_auto(load(name), images, ALONE)
    assert config.config_name == name
    header = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").partition("defaults:")[0]
    wrong = {key for key, _ in problems(config, Purpose(trains=True))}
    assert wrong == ({"weights"} if "weights=" in header else set())
    assert getattr(config.model, "init", "jax") == ("trunc_normal" if name in AS_DEIT else "jax")
    switches = resolve(config.speed, "cuda")
    with torch.device("meta"):
        model = build.model(config, 1000, switches, empty=True)
        counted = complexity(model, image_size=config.data.image_size)
        build.optimizer(config, model, switches)
        average = build.ema(config, OwnedWeights(model), switches)
    assert all(parameter.is_meta for parameter in model.parameters())
    if name in published.EXPERIMENTS:
        known = published.EXPERIMENTS[name]
        # Some papers cut decimals off, some count norms in (a thousandth).
        as_published = (known.size, known.size) == config.data.image_size
        if as_published:
            assert 0.999 * known.gmacs - 0.06 <= counted.forward_flops / 2e9 < 1.005 * known.gmacs + 0.1
        assert counted.parameters / 1e6 == pytest.approx(
            known.parameters, abs=0.11 + (0 if as_published else 0.0005 * known.parameters)
        )
    build.loss(config, build.switches(config, torch.device("cpu")), torch.device("cpu"), 1000)
    build.mixer(config)
    if average is not None:
        # The average's warm-up is over at the end of training, and the initial weights are forgotten.
        steps = config.schedule.epochs * (images // config.data.global_batch_size)
        last = steps - steps % average.every - 1
        assert average.share(last) == 1 - average.decay**average.every
        assert average.decay**steps < 0.002
    schedule = build.schedule(config, steps_per_epoch=100)
    assert schedule.curve_steps == 100 * config.schedule.epochs
    highest = max(map(schedule, range(schedule.curve_steps)))
    assert highest == pytest.approx(config.optim.scaled(config.data.global_batch_size).lr, rel=0.005)
    assert schedule(schedule.warmup_steps) == pytest.approx(highest, rel=0.005)
    assert 0 <= schedule(0) <= highest
    assert (schedule(0) < highest) == (config.schedule.warmup_epochs > 0)


@pytest.mark.slow
def test_every_option_can_be_chosen() -> None:
    found = {(file.parent.name, file.stem) for file in CONFIGS.glob("*/*.yaml") if file.parent.name != "ladders"}
    found |= {(group, name) for group in PRESETS for name in PRESETS[group]}
    for group, name in sorted(found):
        # A ViT at 224, so that nothing but the option is in question; images of its own size for the small models.
        base = name if name in ("vit_digits", "resnet_digits") else "vit_ti16"
        also = ["parallel=single"] if group == "speed" else ["model.name=resnet18"] if name == "timm" else []
        assert getattr(load(base, f"{group}={name}", *also), group) is not None, name


def sections(schema: type[Section]) -> set[type[Section]]:
    found = {schema}
    for inner in section_keys(schema).values():
        for section in inner:
            found |= sections(section)
    return found


def test_the_default_of_every_key_is_valid() -> None:
    """pydantic does not check defaults by itself."""
    for section in sections(RunConfig):
        defaults = {
            name: field.get_default(call_default_factory=True)
            for name, field in section.model_fields.items()
            if not field.is_required()
        }
        plain = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in defaults.items()}
        # Strict mode takes a tuple for a tuple, so this is what JSON would give.
        try:
            section.model_validate(plain)
        except ValidationError as error:
            wrong = [e for e in error.errors() if e["type"] != "missing"]
            assert wrong == []


def test_every_key_is_read_by_the_code() -> None:
    """A key that no line reads would be accepted and do nothing."""
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (CONFIGS.parent / "pycls_fast").rglob("*.py")
        if file.name != "speed.py" and file.parts[-2:] != ("config", "run.py")
    )
    unread = {
        key
        for key in known_keys(RunConfig)
        if not re.search(rf"\.{key.rpartition('.')[2]}\b(?!\()", code)
        and key.rpartition(".")[2] not in ("scale", "ratio")
        # All at once, by `Choice.own`.
        and not key.startswith(("augment.policy.", "model.", "data.synthetic_", "data.hub_config"))
        and key.removeprefix("speed.") not in ViTModel.switches
    }
    assert unread == set()


# Of models whose experiments have no published number: millions of parameters with 1,000 classes, billions of
# multiply-adds at 224 px. torchvision's documentation; timm's model cards; H/14: Zhai et al., Scaling Vision
# Transformers, 2022, Table 2; G/14 with timm's class token: timm, benchmark-infer-amp-nchw-pt240-cu124-rtx4090.csv.
SIZES = {
    "vit_h14": (632.0, 167.3),
    "deit3_h14": (632.1, 167.3),
    "vit_g14 model.classifier=token": (1012.6, 267.18),
    "resnet34": (21.8, 3.66),
    "resnet101": (44.5, 7.8),
    "resnet152": (60.2, 11.51),
    "resnet200": (64.7, 15.07),
    "resnext50_32x4d": (25.0, 4.2),
    "resnext101_32x4d": (44.2, 8.0),
    "resnext101_32x8d": (88.8, 16.4),
    "resnext101_64x4d": (83.5, 15.5),
    "wide_resnet50_2": (68.9, 11.4),
    "wide_resnet101_2": (126.9, 22.8),
    "resnet50d": (25.6, 4.3),
    "resnet101d": (44.6, 8.1),
    "resnet152d": (60.2, 11.8),
    "efficientnet_b0": (5.3, 0.4),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", SIZES)
def test_models_have_their_published_sizes_and_operations(model: str) -> None:
    config = load("vit_ti16", *f"model={model}".split())
    counted = complexity(build.model(config, 1000, Speed(), empty=True), image_size=224)
    parameters, billions = SIZES[model]
    assert counted.parameters / 1e6 == pytest.approx(parameters, abs=0.11)
    # Some sources cut decimals off, some count norms (a thousandth).
    assert 0.999 * billions - 0.06 <= counted.forward_flops / 2e9 < billions + 0.1


def test_sizes_that_are_not_square() -> None:
    schedule = "data.image_size_schedule=[[0,[8,64]],[2,16]]"
    data = load_config("resnet_digits", ["data.image_size=[32,24]", schedule]).data
    assert data.training_image_sizes == {0: (8, 64), 2: (16, 16)}
    # The memory plan's: 512 pixels, though 16 is larger than 8.
    assert data.largest_image_size == (8, 64)
    written = data.model_dump(mode="json")
    assert (written["image_size"], written["image_size_schedule"]) == ([32, 24], [[0, [8, 64]], [2, 16]])
    with pytest.raises(UserError, match=r"^augment.quarter_turns: it turns images, which are not square; use"):
        load_config("resnet_digits", ["data.image_size=[32,24]", "augment.quarter_turns=true"])


def test_timms_models_are_models() -> None:
    config = load_config("vit_s16", ["data.root=/nowhere", "model=convnext_atto"])
    assert config.model.kind == "timm"
    assert config.model.name == "convnext_atto"
    with pytest.raises(UserError, match=r"convnext_ato"):
        load_config("vit_s16", ["data.root=/nowhere", "model=convnext_ato"])


HERE = ("data=synthetic", "speed=meta2022", "parallel=single")


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_wins_over_it(order: int) -> None:
    overrides = ["precision=amp_bf16", "model.classifier=token", "speed.layout=batch_first", "optim.lr=0.1"]
    config = load_config("vit_h16", [*HERE, *overrides][::order])
    assert (config.precision.name, config.model.classifier, config.speed.layout) == ("amp_bf16", "token", "batch_first")  # type: ignore[union-attr]
    assert build.switches(config, torch.device("cpu")).optimizer == "foreach"
    assert load_config("vit_h16", [*HERE, "precision.name=fp32"]).precision.name == "fp32"


def test_a_resnet_is_told_where_the_classifier_was_set() -> None:
    with pytest.raises(UserError) as caught:
        load_config("resnet50", HERE)
    (line,) = caught.value.lines
    assert line.startswith("model.classifier: unknown key for model=resnet; it belongs to model=vit; leave it")
    assert line.endswith("(configs/speed/meta2022.yaml)")
    assert load_config("resnet50", [*HERE, "~model.classifier"]).precision.name == "amp_fp16"


def test_a_saved_run_can_take_it(tmp_path: Path) -> None:
    saved = load_config("vit_b16", ["data=synthetic"]).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    config = load_run_config(tmp_path, ["speed=meta2022", "parallel=single"])
    assert (config.speed.preset, config.precision.name, config.parallel.name) == ("meta2022", "amp_fp16", "single")
    assert config.model.classifier == "pooled"  # type: ignore[union-attr]
    assert load_run_config(tmp_path, ["speed=meta2022", "parallel=single", "precision=fp32"]).precision.name == "fp32"
