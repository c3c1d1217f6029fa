"""Every kind of bad configuration gets its own clear line: the key, what is wrong, where it was set, the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pycls_fast.config import Purpose, RunConfig, load_config, suggestions
from pycls_fast.config.compose import check, compose
from pycls_fast.config.in_vain import in_vain
from pycls_fast.config.locations import CONFIGS
from pycls_fast.errors import UserError
from tests.factories import load_run_config

HERE = "(the command line)"


def text(key: str) -> str:
    """The hint for a number that is text."""
    way = f"'{key}=\"${{oc.decode:${{oc.env:NAME}}}}\"'"
    return f"that is text: leave quotes out; for a variable of the shell {way} {HERE}"


ROOT = "not set; give the folder that holds train/ and val/ (or one folder per class) as data.root=PATH"

# (overrides of vit_digits, the line)
ONE_MISTAKE = [
    # Keys that do not exist, at every depth.
    (["sed=1"], f"sed: unknown key; did you mean seed? {HERE}"),
    (["optim.lrr=1"], f"optim.lrr: unknown key; did you mean optim.lr? {HERE}"),
    (
        ["augment.rand_augment.num_opps=1"],
        f"augment.rand_augment.num_opps: unknown key; did you mean augment.rand_augment.num_ops? {HERE}",
    ),
    (["modle=vit_s16"], f"modle: unknown key; did you mean model? {HERE}"),
    (["Optim.lr=1"], f"Optim: unknown key; did you mean optim? {HERE}"),
    (["optim/lr=1"], f"optim/lr: unknown key; did you mean optim.lr? {HERE}"),
    (["drop_path=0.1"], f"drop_path: unknown key; did you mean model.drop_path? {HERE}"),
    (["schedule.lr=1"], f"schedule.lr: unknown key; did you mean optim.lr? {HERE}"),
    (
        ["loss.zzz=1"],
        "loss.zzz: unknown key; loss has name, label_smoothing, bce_reduction, bce_threshold, class_weights " + HERE,
    ),
    (["+optim.lrr=1"], f"optim.lrr: unknown key; did you mean optim.lr? {HERE}"),
    (["++optim.lrr=1"], f"optim.lrr: unknown key; did you mean optim.lr? {HERE}"),
    (["hydra.foo=1"], "hydra.foo: unknown key; Hydra has no such setting"),
    # By their usual names, or in another order.
    (["data.batch_size=4"], f"data.batch_size: unknown key; did you mean data.global_batch_size? {HERE}"),
    (["batch_size=4"], f"batch_size: unknown key; did you mean data.global_batch_size? {HERE}"),
    (["optim.learning_rate=1"], f"optim.learning_rate: unknown key; did you mean optim.lr? {HERE}"),
    (["data.size_image=8"], f"data.size_image: unknown key; did you mean data.image_size? {HERE}"),
    (
        ["runtime.device=gpu"],
        f'runtime.device: must be one of auto, cpu, cuda; got "gpu"; did you mean cuda? {HERE}',
    ),
    (["precision=bf16_amp"], "precision=bf16_amp: no such file in configs/precision; did you mean amp_bf16?"),
    (["augment=augment_auto"], "augment=augment_auto: no such file in configs/augment; did you mean auto_augment?"),
    # Keys of another kind.
    (
        ["model.shortcut=pool"],
        f"model.shortcut: unknown key for model.kind=vit; it belongs to model.kind=resnet {HERE}",
    ),
    (
        ["optim=sgd", "optim.betas=[0.9,0.95]"],
        "optim.betas: unknown key for optim.name=sgd; it belongs to optim.name=adamw, lamb, lion, muon or adamw8bit "
        f"{HERE}",
    ),
    (
        ["optim.momentum=0.5"],
        f"optim.momentum: unknown key for optim.name=adamw; it belongs to optim.name=sgd, adafactor or muon {HERE}",
    ),
    # Files that do not exist.
    (["model=vit_s17"], "model=vit_s17: no such file in configs/model; did you mean vit_s16?"),
    (
        ["optim=adam"],
        "optim.name: must be one of adamw, sgd, lamb, lion, adafactor, muon, adamw8bit; got adam; did you mean adamw? "
        "(the command line)",
    ),
    (["schedule=zzz"], "schedule=zzz: no such file in configs/schedule; there is constant, cosine, linear, step"),
    (["optim=3"], "optim=3: a group takes the name of a file in configs/optim/"),
    (["model=nan"], "model=nan: a group takes the name of a file in configs/model/"),
    (["augment=true"], "augment=true: a group takes the name of a file in configs/augment/"),
    (["data.std={red: 1}"], "data.std: must be a list; got {red: 1}"),
    (["augment=deit", "augment.rand_augment=[1]"], "augment.rand_augment: must be a group of keys; got [1]"),
    (["optim=null"], "optim=null: a group takes the name of a file in configs/optim/"),
    (["model=[vit_s16,vit_b16]"], "model=[vit_s16,vit_b16]: a group takes the name of a file in configs/model/"),
    # Types.
    (["optim.lr=fast"], f'optim.lr: must be a number; got "fast" {HERE}'),
    (["optim.lr=null"], f"optim.lr: must be a number; got null {HERE}"),
    (["optim.lr=true"], f"optim.lr: must be a number; got true {HERE}"),
    (["optim.lr.x=3"], f'optim.lr: must be a number; got {{"x": 3}} {HERE}'),
    (["schedule.epochs=1.5"], f"schedule.epochs: must be auto or a whole number greater than 0; got 1.5 {HERE}"),
    (
        ["schedule.epochs='3'"],
        'schedule.epochs: must be auto or a whole number greater than 0; got "3"; ' + text("schedule.epochs"),
    ),
    (["schedule.max_steps=1.5"], f"schedule.max_steps: must be a whole number; got 1.5 {HERE}"),
    (["runtime.tensorboard=yes"], f'runtime.tensorboard: must be true or false; got "yes" {HERE}'),
    (["runtime.tensorboard=1"], f"runtime.tensorboard: must be true or false; got 1 {HERE}"),
    (
        ["data.root=3"],
        f"data.root: must be text; got 3; quotes within quotes make it text: 'data.root=\"3\"' {HERE}",
    ),
    (["data.root="], f'data.root: must not be empty; got "" {HERE}'),
    (["augment.scale=0.3"], f"augment.scale: must be a list; got 0.3 {HERE}"),
    (["augment.scale=[0.1]"], f"augment.scale: must be a list of 2 values; got [0.1] {HERE}"),
    (["augment.scale=[0.1,0.2,0.3]"], f"augment.scale: must be a list of 2 values; got [0.1, 0.2, 0.3] {HERE}"),
    (["data.mean=[0.5]"], f"data.mean: must be a list of 3 values; got [0.5] {HERE}"),
    (["data.std=[0.5,a,0.5]"], f'data.std[1]: must be a number; got "a" {HERE}'),
    (["augment.auto_augment=imagenet"], f"augment.auto_augment: unknown key; did you mean augment.policy? {HERE}"),
    (["augment.trivial_augment=true"], f"augment.trivial_augment: unknown key; did you mean augment.policy? {HERE}"),
    (
        ["augment.policy=rand_augment", "augment.rand_augment.probability=0.5"],
        f"augment.rand_augment.probability: only timm's has it; use augment.rand_augment.library=timm {HERE}",
    ),
    (
        ["augment.policy=rand_augment", "augment.rand_augment={library: timm, magnitude: 11}"],
        f"augment.rand_augment.magnitude: timm's goes up to 10; got 11 {HERE}",
    ),
    (["augment.rand_augment=3"], f"augment.rand_augment: must be a group of keys; got 3 {HERE}"),
    # Ranges.
    (["optim.lr=-1"], f"optim.lr: must be greater than 0; got -1 {HERE}"),
    (["++optim.lr=-1"], f"optim.lr: must be greater than 0; got -1 {HERE}"),
    (["optim.lr=nan"], f"optim.lr: must be a finite number; got nan {HERE}"),
    (["optim.lr=.nan"], f'optim.lr: must be a number; got ".nan" {HERE}'),
    (["optim.lr=inf"], f"optim.lr: must be a finite number; got inf {HERE}"),
    (["data.mean=[0,nan,0]"], f"data.mean[1]: must be a finite number; got nan {HERE}"),
    (
        ["data.mean=[123.675,0,0]"],
        "data.mean[0]: must be at most 1; got 123.675; pixels are on the scale 0 to 1: divided by 255 it is 0.485 "
        + HERE,
    ),
    (["data.mean=[0,-0.1,0]"], f"data.mean[1]: must be at least 0; got -0.1 {HERE}"),
    (
        ["data.std=[0.2,0.2,57.375]"],
        "data.std[2]: must be at most 1; got 57.375; pixels are on the scale 0 to 1: divided by 255 it is 0.225 "
        + HERE,
    ),
    (["precision.loss_scale_growth=inf"], f"precision.loss_scale_growth: must be a finite number; got inf {HERE}"),
    (["seed=-1"], f"seed: must be at least 0; got -1 {HERE}"),
    (["seed=99999999999"], f"seed: must be less than 2147483648; got 99999999999 {HERE}"),
    (["augment.hflip=1.5"], f"augment.hflip: must be at most 1; got 1.5 {HERE}"),
    (["optim.betas=[0.9,1.5]"], f"optim.betas[1]: must be less than 1.0; got 1.5 {HERE}"),
    (["model.depth=0"], f"model.depth: must be greater than 0; got 0 {HERE}"),
    *(
        ([f"{key}={10**20}"], f"{key}: must be less than 2147483648; got {10**20} {HERE}")
        for key in ("model.num_classes", "data.num_workers", "data.global_batch_size")
    ),
    # The loader would fill its queues without end.
    (["data.prefetch_factor=1000000"], f"data.prefetch_factor: must be at most 1024; got 1000000 {HERE}"),
    (["runtime.threads=100000"], f"runtime.threads: must be at most 1024; got 100000 {HERE}"),
    # The whole image would be resized to millions of pixels.
    (["augment.eval_crop_ratio=1e-5"], f"augment.eval_crop_ratio: must be at least 0.1; got 1e-05 {HERE}"),
    # Choices.
    (
        ["speed.attention=sdap"],
        "speed.attention: must be one of reference, sdpa, sdpa_math, sdpa_flash, sdpa_efficient, sdpa_cudnn, products; "
        f'got "sdap"; did you mean sdpa? {HERE}',
    ),
    (["schedule.name=poly"], f'schedule.name: must be one of cosine, linear, step, constant; got "poly" {HERE}'),
    (["model.kind=vitt"], f"model.kind: must be one of vit, resnet, timm; got vitt; did you mean vit? {HERE}"),
    # Things that cannot go together.
    (["data=folder"], f"data.root: {ROOT} (configs/data/folder.yaml or the command line)"),
    (["data.source=folder", "data.root=null"], f"data.root: {ROOT} {HERE}"),
    (
        ["data.image_size=30"],
        f"data.image_size: 30 is not divisible by model.patch_size=4; use 28 or 32 {HERE}",
    ),
    (
        ["model.heads=5"],
        "model.width: 64 is not divisible by model.heads=5; use 60 or 65 (configs/model/vit_digits.yaml)",
    ),
    (
        ["model.width=62", "model.heads=31", "model.positions=sincos2d"],
        f"model.width: 62 is not divisible by 4, which model.positions=sincos2d needs; use 60 or 64 {HERE}",
    ),
    (
        ["optim.accumulation_steps=3"],
        "data.global_batch_size: 64 is not divisible by optim.accumulation_steps=3; use 63 or 66 "
        "(configs/data/digits.yaml)",
    ),
    (
        ["schedule.epochs=3"],
        "schedule.warmup_epochs: 5 is longer than the training of schedule.epochs=3; use schedule.warmup_epochs=3 "
        "or less (configs/vit_digits.yaml)",
    ),
    (
        ["schedule.name=step"],
        "schedule.step_epochs: not set; give the epochs between two steps (30, say) "
        "(configs/schedule/cosine.yaml or the command line)",
    ),
    (
        ["schedule.step_epochs=3"],
        f"schedule.step_epochs: is for schedule=step; use schedule.step_epochs=null with schedule=cosine {HERE}",
    ),
    (
        ["schedule.step_factor=0.2"],
        f"schedule.step_factor: is for schedule=step; use schedule.step_factor=0.1 with schedule=cosine {HERE}",
    ),
    (
        ["schedule=constant", "schedule.final_factor=0.1"],
        "schedule.final_factor: is for schedule=cosine and linear; use schedule.final_factor=0 with schedule=constant "
        + HERE,
    ),
    (
        ["schedule=step", "schedule.step_epochs=30", "schedule.final_factor=0.1"],
        "schedule.final_factor: is for schedule=cosine and linear; use schedule.final_factor=0 with schedule=step "
        + HERE,
    ),
    (
        ["parallel.prefetch_units=2"],
        "parallel.prefetch_units: is for parallel=fsdp and hsdp; use parallel.prefetch_units=1 with parallel=auto "
        + HERE,
    ),
    (
        ["parallel=fairscale_fsdp", "parallel.prefetch_units=0"],
        "parallel.prefetch_units: is for parallel=fsdp and hsdp; use parallel.prefetch_units=1 with "
        f"parallel=fairscale_fsdp {HERE}",
    ),
    (
        ["parallel.powersgd_rank=2"],
        "parallel.powersgd_rank: is for parallel.compression=powersgd; use parallel.powersgd_rank=1 with "
        f"parallel.compression=none {HERE}",
    ),
    (
        ["parallel=ddp", "parallel.compression=bf16", "parallel.powersgd_start_step=9"],
        "parallel.powersgd_start_step: is for parallel.compression=powersgd; use parallel.powersgd_start_step=1000 "
        f"with parallel.compression=bf16 {HERE}",
    ),
    (
        ["loss=bce", "loss.bce_threshold=0.2", "loss.class_weights=balanced"],
        "loss.class_weights: weights the shares of a mixed image, which loss.bce_threshold rounds; use one of the two "
        + HERE,
    ),
    (
        ["data.sampling=square_root", "loss.class_weights=balanced"],
        "loss.class_weights: data.sampling=square_root already shows rare classes more often; use one of the two "
        + HERE,
    ),
    (
        ["loss.bce_threshold=0.2"],
        f"loss.bce_threshold: is for loss=bce; use loss.bce_threshold=null with loss=cross_entropy {HERE}",
    ),
    (
        ["augment.scale=[0.5,0.1]"],
        f"augment.scale: the first value must not be larger than the second; got [0.5, 0.1] {HERE}",
    ),
    (["augment.scale=[0.5,1.1]"], f"augment.scale: an area cannot be larger than the image's (1.0); got 1.1 {HERE}"),
    (
        ["data.global_batch_size=1", "augment.mixup_alpha=0.2"],
        "augment.mixup_alpha: mixing needs at least 2 images in a microbatch; data.global_batch_size=1 with "
        "optim.accumulation_steps=1 leaves 1; use data.global_batch_size=2, or augment.mix_probability=0 " + HERE,
    ),
    (
        ["data.global_batch_size=4", "optim.accumulation_steps=4", "augment.cutmix_alpha=1"],
        "augment.cutmix_alpha: mixing needs at least 2 images in a microbatch; data.global_batch_size=4 with "
        "optim.accumulation_steps=4 leaves 1; use data.global_batch_size=8, or augment.mix_probability=0 " + HERE,
    ),
    (
        ["model=resnet18", "data.image_size=32", "model.width_per_group=32"],
        "model.width_per_group: depth 18 has no bottleneck blocks to group or widen; use model.depth=50, or "
        f"model.width_per_group=64 {HERE}",
    ),
    (
        ["precision=amp_fp16", "precision.loss_scale_floor=1e6"],
        f"precision.loss_scale_floor: must not be larger than precision.loss_scale_start=65536; got 1e+06 {HERE}",
    ),
    (["data.fold=1"], f"data.fold: chooses one of data.folds, which is not set; give data.folds=5, say {HERE}"),
    (
        ["data.folds=3", "data.fold=3"],
        f"data.fold: must be less than data.folds=3, counted from 0; got 3 {HERE}",
    ),
    (
        ["data=synthetic", "data.folds=3"],
        f"data.folds: data.source=synthetic has a validation split; use data.folds=null {HERE}",
    ),
    (["model.num_classes=1"], f"model.num_classes: classification needs at least 2 classes; got 1 {HERE}"),
    # Options of timm's models that would decide again what a key decides.
    *(
        (
            ["model=timm", "model.name=resnet18", f"model.options={{{name}: {value}}}"],
            f"model.options.{name}: {instead}; leave it out (~model.options.{name}) {HERE}",
        )
        for name, value, instead in (
            ("num_classes", 5, "the classes of the data, or model.num_classes, decide it"),
            ("in_chans", 1, "images are read as RGB, so it is 3"),
            ("drop_path_rate", 0.1, "model.drop_path sets it"),
            ("pretrained", "true", "weights=timm:NAME brings weights"),
            ("checkpoint_path", "x.pth", "weights=FILE brings weights"),
            ("features_only", "true", "models here end in a classification head"),
        )
    ),
    (
        ["optim=sgd", "optim.nesterov=true", "optim.momentum=0", "~optim.betas"],
        "~optim.betas: there is no optim.betas to delete",
    ),
    # Interpolations.
    (["optim.lr=${optim.lrr}"], f"optim.lr: Interpolation key 'optim.lrr' not found {HERE}"),
    (["optim.lr=${optim.lr}"], f"optim.lr: Recursive interpolation detected {HERE}"),
    (
        ["data.root=${oc.env:PYCLS_FAST_NO_SUCH}"],
        f"data.root: Environment variable 'PYCLS_FAST_NO_SUCH' not found {HERE}",
    ),
    (["seed=${oc.env:PYCLS_FAST_SEVEN}"], 'seed: must be a whole number; got "7"; ' + text("seed")),
    (["optim.lr=${oc.env:PYCLS_FAST_SEVEN}"], 'optim.lr: must be a number; got "7"; ' + text("optim.lr")),
    (
        ["precision.loss_scale='7'"],
        'precision.loss_scale: must be dynamic or a number greater than 0; got "7"; ' + text("precision.loss_scale"),
    ),
    (["speed={atention: reference}"], f"speed.atention: unknown key; did you mean speed.attention? {HERE}"),
    (["optim.lr=???"], f"optim.lr: left open as ???; set it with optim.lr=VALUE {HERE}"),
    # What cannot be read.
    (["optim.lr"], "cannot read 'optim.lr' on the command line; write key=value, quoting lists and spaces"),
    (["optim.lr=[1"], "cannot read 'optim.lr=[1' on the command line; write key=value, quoting lists and spaces"),
    (["=3"], "cannot read '=3' on the command line; write key=value, quoting lists and spaces"),
    ([""], "cannot read '' on the command line; write key=value, quoting lists and spaces"),
    (["optim..lr=1"], "cannot read 'optim..lr=1' on the command line; write key=value, quoting lists and spaces"),
    (["vit_s16"], "cannot read 'vit_s16' on the command line; did you mean --config-name vit_s16?"),
    (
        ["optim.betas=0.9,0.95"],
        "optim.betas=0.9,0.95: several values; write a list as optim.betas=[0.9,0.95], or add --multirun to run one "
        "after another",
    ),
    (
        ["data.root=/photos/Hello, World"],
        "data.root=/photos/Hello, World: several values; write a path with commas as "
        "'data.root=\"/photos/Hello, World\"', or add --multirun for several runs",
    ),
    # Additions and deletions.
    (["+optim.lr=1"], "optim.lr: is set already; write optim.lr=VALUE, without the +"),
    (
        ["+model=vit_s16"],
        "model: chosen twice; write model=NAME without a +, or 'override model: NAME' in a file's defaults",
    ),
    (["++model=vit_s16"], "++model=vit_s16: write model=vit_s16; a ++ is for values"),
    (["~model"], "model: missing; choose one of configs/model/ with model=NAME (deleted on the command line)"),
    (["~optim"], "optim.name: missing; choose one of configs/optim/ with optim=NAME (deleted on the command line)"),
    (["~optim.lr"], "optim.lr: missing; set it with optim.lr=VALUE (deleted on the command line)"),
    (["~nope"], "~nope: there is no nope to delete"),
    # The name of the experiment is its file's.
    (
        ["config_name=mine"],
        f"config_name: the name of the experiment's file; choose it with --config-name {HERE}",
    ),
    # The last of two values counts.
    (["optim.lr=1", "optim.lr=-2"], f"optim.lr: must be greater than 0; got -2 {HERE}"),
]


@pytest.mark.parametrize(
    ("overrides", "line"), ONE_MISTAKE, ids=[" ".join(case[0]) or "nothing" for case in ONE_MISTAKE]
)
def test_a_mistake_gets_its_line(overrides: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCLS_FAST_SEVEN", "7")
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", overrides)
    assert caught.value.lines == (line,)


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("vit_digit", [], "--config-name vit_digit: no such experiment; did you mean vit_digits?"),
        (
            "configs/vit_digits.yaml",
            [],
            "--config-name configs/vit_digits.yaml: no such experiment; did you mean vit_digits?",
        ),
        (
            "resnet_digits",
            ["model.depth=20"],
            f"model.depth: must be one of 18, 26, 34, 50, 101, 152, 200; got 20 {HERE}",
        ),
        (
            "resnet_digits",
            ["model.depth='50'"],
            'model.depth: must be one of 18, 26, 34, 50, 101, 152, 200; got "50"; ' + text("model.depth"),
        ),
        (
            "resnet_digits",
            ["optim.momentum=0"],
            "optim.nesterov: needs optim.momentum larger than 0; use optim.nesterov=false; got true "
            "(configs/optim/sgd.yaml)",
        ),
        (
            "resnet50",
            ["data.root=x", "data.image_size=16"],
            f"data.image_size: 16 is too small for model.stem=imagenet (32 at least); use model.stem=small {HERE}",
        ),
        ("vit_ti16", [], f"data.root: {ROOT} (configs/data/imagenet.yaml or the command line)"),
        (
            # A key of the file itself that the chosen group has no use for.
            "vit_l16",
            ["data.root=x", "optim=sgd"],
            "optim.betas: unknown key for optim.name=sgd; it belongs to optim.name=adamw, lamb, lion, muon or "
            "adamw8bit; leave it out with ~optim.betas (configs/vit_l16.yaml)",
        ),
    ],
)
def test_a_mistake_in_another_experiment(name: str, overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(name, overrides)
    assert caught.value.lines == (line,)


def test_the_way_out_that_a_line_names_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCLS_FAST_SEVEN", "7")
    assert load_config("vit_digits", ['seed="${oc.decode:${oc.env:PYCLS_FAST_SEVEN}}"']).seed == 7
    assert load_config("vit_l16", ["data.root=x", "optim=sgd", "~optim.betas"]).optim.name == "sgd"
    assert load_config("vit_digits", ['data.root="3"']).data.root == "3"
    assert load_config("vit_digits", ["optim.betas=[0.9,0.95]"]).optim.model_dump()["betas"] == (0.9, 0.95)
    # Settings of what is off do not matter.
    load_config("vit_digits", ["augment.rand_augment.probability=0.5"])
    load_config("vit_digits", ["augment.mix_mode=pair", "data.global_batch_size=15"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision=amp_bf16", "precision.loss_scale=1024"], "precision.loss_scale=1024.0 has no effect with "
         "precision=amp_bf16: it is for amp_fp16, fp16_master, fp16"),
        (["precision=fp32", "precision.fp8_emulate=true"],
         "precision.fp8_emulate=true has no effect with precision=fp32: it is for fp8"),
        (["loss=cross_entropy", "loss.bce_reduction=sum"],
         "loss.bce_reduction=sum has no effect with loss=cross_entropy: it is for bce"),
        (["optim.ema_every_steps=2"], "optim.ema_every_steps=2 has no effect with optim.ema_decay=null"),
        (["optim.layer_decay_groups=12"], "optim.layer_decay_groups=12 has no effect with optim.layer_decay=null"),
        (["augment.rand_augment.num_ops=2"],
         "augment.rand_augment has no effect with augment.policy=null: it is for augment.policy=rand_augment"),
        (["augment.policy=three_augment", "augment.rand_augment={magnitude: 3}"],
         "augment.rand_augment has no effect with augment.policy=three_augment: it is for augment.policy=rand_augment"),
        (["augment.policy=rand_augment", "augment.rand_augment.magnitude=3"], None),
        # Defaults, and what has an effect.
        (["precision=fp32", "precision.loss_scale=dynamic", "precision.fp8_skip=[head,pooling]"], None),
        (["precision=fp16", "precision.loss_scale=1024", "optim.ema_decay=0.9", "optim.ema_warmup=false"], None),
        (["loss=bce", "loss.bce_reduction=sum", "precision=fp8", "precision.fp8_emulate=true"], None),
    ],
)  # fmt: skip
def test_settings_of_what_is_switched_off_are_noted(overrides: list[str], expected: str | None) -> None:
    composed = compose("vit_digits", overrides, [CONFIGS])
    assert list(in_vain(check(composed, Purpose()), composed)) == ([] if expected is None else [expected])


def test_settings_of_files_are_not_noted() -> None:
    """The command line may switch off what they are for."""
    composed = compose("vit_l16", ["data.root=x", "optim.ema_decay=null"], [CONFIGS])
    assert list(in_vain(check(composed, Purpose()), composed)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "ways"),
    [
        # Set by the experiment's or the model's file, not by who typed the command.
        ("torchvision_resnet50_v1", ["schedule=cosine"], "schedule.step_epochs=null"),
        ("vit_s16", ["schedule=constant"], "schedule.final_factor=0"),
        ("rsb_a1", ["loss=cross_entropy"], "loss.bce_threshold=null"),
        ("rsb_a3", ["model=vit_s16"], "data.image_size_schedule=[]"),
        ("vit_c_1gf", ["model.stem=patch"], "model.stem_widths=[] model.stem_strides=[]"),
        ("vit_s16", ["data.val=x", "data.train=x", "data.source=folder"], "data.train=null"),
        ("resnet18", ["optim.trainable=head", "parallel.sync_batchnorm=true"], "parallel.sync_batchnorm=false"),
        ("vit_s16", ["parallel.sync_batchnorm=true"], "parallel.sync_batchnorm=false"),
        ("vit_s16", ["parallel=ddp", "parallel.shard_degree=2"], "parallel.shard_degree=null"),
        ("vit_s16", ["parallel=ddp", "parallel.reshard_after_forward=false"], "parallel.reshard_after_forward=true"),
        ("vit_s16", ["data.global_batch_size=1"], "augment.mix_probability=0"),
    ],
)
def test_what_a_file_has_set_can_be_undone_as_the_line_says(name: str, overrides: list[str], ways: str) -> None:
    (line,) = [line for line in mistakes(name, overrides) if ways in line]
    assert line not in mistakes(name, [*overrides, *ways.split()])


def mistakes(name: str, overrides: list[str]) -> tuple[str, ...]:
    try:
        load_config(name, ["data.root=x", *overrides])
    except UserError as error:
        return error.lines
    return ()


def test_usual_names_stand_for_keys_that_exist() -> None:
    assert set(suggestions.USUAL_KEYS.values()) <= suggestions.known_keys(RunConfig)
    assert not set(suggestions.USUAL_KEYS) & {key.rpartition(".")[2] for key in suggestions.known_keys(RunConfig)}


def test_an_experiment_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(UserError, match=r"^--config-name zzz: no such experiment; there is .*finetune, .*vit_ti16$"):
        load_config("zzz")


def test_a_path_that_is_no_utf_8() -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["data.root=/caf\udce9", "optim.trainable=[head,'\udce9']"])
    rest = "is not valid UTF-8; rename it, or link to it and give the link (the command line)"
    assert set(caught.value.lines) == {f"data.root: /caf\udce9 {rest}", f"optim.trainable[1]: \udce9 {rest}"}


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config(
            "vit_digits",
            ["optim.lrr=1", "seed=-1", "data.image_size=big", "augment.scale=[1,2,3]", "speed.clip=x", "zz=1"],
        )
    lines = caught.value.lines
    assert [line.partition(":")[0] for line in lines[:5]] == [
        "seed",
        "data.image_size",
        "augment.scale",
        "optim.lrr",
        "speed.clip",
    ]
    assert lines[5].startswith("zz: unknown key; the run has config_name, seed, ")
    assert len(lines) == 6


def test_all_impossible_combinations_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["data.image_size=9", "model.heads=3", "schedule.epochs=1"])
    assert [line.partition(":")[0] for line in caught.value.lines] == [
        "data.image_size",
        "model.width",
        "schedule.warmup_epochs",
    ]


def test_a_group_takes_several_of_its_keys_at_once(tmp_path: Path) -> None:
    keys = "speed={attention: reference, layout: batch_second}"
    config = load_config("vit_digits", ["speed=fast", keys])
    assert (config.speed.preset, config.speed.attention, config.speed.layout) == ("fast", "reference", "batch_second")
    assert (
        config.speed.chosen().keys()
        == load_config("vit_digits", ["speed.attention=reference", "speed.layout=batch_second"]).speed.chosen().keys()
    )
    values = {**load_config("vit_digits").model_dump(mode="json"), "config_name": "vit_digits"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert load_run_config(tmp_path, [keys]).speed.attention == "reference"


def test_the_last_of_two_values_counts() -> None:
    config = load_config("vit_digits", ["optim.lr=1", "optim.lr=2", "model=vit_s16", "model=vit_ti16"])
    assert (config.optim.lr, config.model.model_dump()["width"]) == (2, 192)


def test_the_name_of_an_experiment_may_end_in_yaml() -> None:
    assert load_config("vit_digits.yaml") == load_config("vit_digits")
    assert load_config("vit_digits").config_name == "vit_digits"
