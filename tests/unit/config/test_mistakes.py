"""Every kind of bad configuration gets its own clear line: the key, what is wrong, where it was set, the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pycls_fast.config import Purpose, RunConfig, load_config
from pycls_fast.config.compose import check, compose, notes
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import USUAL_KEYS, known_keys
from pycls_fast.errors import UserError
from tests.factories import load_run_config

HERE = "(the command line)"

# (overrides of vit_digits, the line, or its beginning if it ends in "...")
ONE_MISTAKE = [
    # Keys that do not exist, at every depth; by their usual names, in another order, of another group or kind.
    (["sed=1"], f"sed: unknown key; did you mean seed? {HERE}"),
    (["optim.lrr=1"], f"optim.lrr: unknown key; did you mean optim.lr? {HERE}"),
    (["++optim.lrr=1"], f"optim.lrr: unknown key; did you mean optim.lr? {HERE}"),
    (
        ["augment.policy={name: rand_augment, num_opps: 1}"],
        f"augment.policy.num_opps: unknown key; did you mean augment.policy.num_ops? {HERE}",
    ),
    (["modle=vit_s16"], f"modle: unknown key; did you mean model? {HERE}"),
    (["schedule.lr=1"], f"schedule.lr: unknown key; did you mean optim.lr? {HERE}"),
    (["bs=4"], f"bs: unknown key; did you mean data.global_batch_size? {HERE}"),
    (["data.size_image=8"], f"data.size_image: unknown key; did you mean data.image_size? {HERE}"),
    (["loss.zzz=1"], "loss.zzz: unknown key; loss has name, label_smoothing, ..."),
    (["speed={atention: reference}"], f"speed.atention: unknown key; did you mean speed.attention? {HERE}"),
    (
        ["model.shortcut=pool"],
        f"model.shortcut: unknown key for model.kind=vit; it belongs to model.kind=resnet {HERE}",
    ),
    (["optim=sgd", "optim.betas=[0.9,0.95]"], "optim.betas: unknown key for optim.name=sgd; it belongs to optim..."),
    # Files that do not exist.
    (["model=vit_s17"], "model=vit_s17: no such option; did you mean vit_s16?"),
    (["precision=bf16_amp"], "precision=bf16_amp: no such option; did you mean amp_bf16?"),
    (["schedule=zzz"], f'schedule.name: must be one of cosine, linear, step, constant; got "zzz" {HERE}'),
    (["optim=3"], "optim=3: no such option; there is ..."),
    (["optim=null"], "optim=null: no such option; there is ..."),
    # Types.
    (["optim.lr=fast"], f'optim.lr: must be a number; got "fast" {HERE}'),
    (["optim.lr=[1"], f'optim.lr: must be a number; got "[1" {HERE}'),
    (["optim.lr=null"], f"optim.lr: must be a number; got null {HERE}"),
    (["optim.lr='3'"], f'optim.lr: must be a number; got "3" {HERE}'),
    (["optim.lr.x=3"], f'optim.lr: must be a number; got {{"x": 3}} {HERE}'),
    (["schedule.epochs=1.5"], f"schedule.epochs: must be auto or a whole number greater than 0; got 1.5 {HERE}"),
    (["schedule.max_steps=1.5"], f"schedule.max_steps: must be a whole number; got 1.5 {HERE}"),
    (["runtime.deterministic=1"], f"runtime.deterministic: must be true or false; got 1 {HERE}"),
    (
        ["data.root=3"],
        f"data.root: must be text; got 3; quotes within quotes make it text: 'data.root=\"3\"' {HERE}",
    ),
    (["augment.scale=0.3"], f"augment.scale: must be a list; got 0.3 {HERE}"),
    (["augment.scale=[0.1]"], f"augment.scale: must be a list of 2 values; got [0.1] {HERE}"),
    (["data.mean=[0.5,0.5,0.5,1]"], f"data.mean: must be a list of 3 values; got [0.5, 0.5, 0.5, 1] {HERE}"),
    (["data.std=[0.5,a,0.5]"], f'data.std[1]: must be a number; got "a" {HERE}'),
    (["augment.policy=3"], f"augment.policy: must be a group of keys; got 3 {HERE}"),
    # Ranges.
    (["optim.lr=-1"], f"optim.lr: must be greater than 0; got -1 {HERE}"),
    (["optim.lr=inf"], f"optim.lr: must be a finite number; got inf {HERE}"),
    (["seed=-1"], f"seed: must be at least 0; got -1 {HERE}"),
    (["augment.hflip=1.5"], f"augment.hflip: must be at most 1; got 1.5 {HERE}"),
    (["optim.betas=[0.9,1.5]"], f"optim.betas[1]: must be less than 1; got 1.5 {HERE}"),
    (["data.num_workers=100000000000000000000"], "data.num_workers: must be less than 2147483648; got 1000..."),
    # Choices.
    (["runtime.device=gpu"], f'runtime.device: must be one of auto, cpu, cuda; got "gpu"; did you mean cuda? {HERE}'),
    (["model.kind=vitt"], 'model.kind: must be one of vit, resnet, timm; got "vitt"; did you mean vit? ...'),
    # Things that cannot go together, wherever they were set.
    (["data.image_size=30"], f"data.image_size: 30 is not divisible by model.patch_size=4; use 28 or 32 {HERE}"),
    (["model.heads=5"], "model.width: 64 is not divisible by model.heads=5; use 60 or 65 (model=vit_digits)"),
    (["schedule.epochs=3"], "schedule.warmup_epochs: 5 is longer than ... (configs/vit_digits.yaml)"),
    (["data=folder"], "data.root: not set; give ... (data=folder or the command line)"),
    # Interpolations.
    (["optim.lr=${optim.lrr}"], f"optim.lr: Interpolation key 'optim.lrr' not found {HERE}"),
    (
        ["data.root=${oc.env:PYCLS_FAST_NO_SUCH}"],
        f"data.root: Environment variable 'PYCLS_FAST_NO_SUCH' not found {HERE}",
    ),
    (["optim.lr=???"], f"optim.lr: left open as ???; set it with optim.lr=VALUE {HERE}"),
    # What cannot be read.
    (["optim.lr"], "cannot read 'optim.lr' on the command line; write key=value, quoting lists and spaces"),
    (["=3"], "cannot read '=3' on the command line; write key=value, quoting lists and spaces"),
    (["vit_s16"], "cannot read 'vit_s16' on the command line; did you mean --config-name vit_s16?"),
    (["optim.betas=0.9,0.95"], "Ambiguous value for argument 'optim.betas=0.9,0.95' 1. To use it as a list, ..."),
    (["data.root=/caf\udce9"], "a value cannot be read (...); paths must be valid UTF-8"),
    # Additions and deletions.
    (["+optim.lr=1"], "Could not append to config. An item is already at 'optim.lr'. ..."),
    (["~optim"], "optim.name: missing; choose one with optim=NAME, --help lists them (deleted on the command line)"),
    (["~optim.lr"], "optim.lr: missing; set it with optim.lr=VALUE (deleted on the command line)"),
    (["~nope"], "Could not delete from config. 'nope' does not exist."),
    (["config_name=mine"], "config_name: the name of the experiment's file; choose it with --config-name ..."),
    # The last of two values counts.
    (["optim.lr=1", "optim.lr=-2"], f"optim.lr: must be greater than 0; got -2 {HERE}"),
]


@pytest.mark.parametrize(("overrides", "line"), ONE_MISTAKE, ids=[" ".join(case[0]) for case in ONE_MISTAKE])
def test_a_mistake_gets_its_line(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", overrides)
    (found,) = caught.value.lines
    beginning, dots, end = line.partition("...")
    assert found.startswith(beginning)
    assert found.endswith(end) if dots else found == line


def test_a_value_of_a_file_that_a_choice_has_no_use_for_names_the_file() -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_l16", ["data.root=x", "optim=sgd"])
    (line,) = caught.value.lines
    assert line.startswith("optim.betas: unknown key for optim.name=sgd; it belongs to optim.name=adamw, ")
    assert line.endswith("; leave it out with ~optim.betas (configs/vit_l16.yaml)")
    assert load_config("vit_l16", ["data.root=x", "optim=sgd", "~optim.betas"]).optim.name == "sgd"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("vit_digit", "--config-name vit_digit: no such experiment; did you mean vit_digits?"),
        ("configs/vit_digits.yaml", "--config-name configs/vit_digits: no such experiment; did you mean vit_digits?"),
    ],
)
def test_an_experiment_that_does_not_exist(name: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(name)
    assert caught.value.lines == (line,)


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["precision=amp_bf16", "precision.loss_scale=1024"], True),
        (["precision=fp16", "precision.loss_scale=1024"], False),
        (["precision=fp32", "precision.fp8_emulate=true"], True),
        (["optim.ema_every_steps=2"], True),
        (["optim.ema_every_steps=2", "optim.ema_decay=0.9"], False),
        (["optim.ema_decay=null"], False),
    ],
)
def test_typed_keys_that_nothing_reads_are_noted(overrides: list[str], noted: bool) -> None:
    composed = compose("vit_digits", overrides, [CONFIGS])
    found = list(notes(check(composed, Purpose()), composed))
    assert [" has no effect with " in line for line in found] == [True] * noted


def test_usual_names_stand_for_keys_that_exist() -> None:
    assert set(USUAL_KEYS.values()) <= known_keys(RunConfig)
    assert not set(USUAL_KEYS) & {key.rpartition(".")[2] for key in known_keys(RunConfig)}


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["optim.lrr=1", "seed=-1", "data.image_size=big", "speed.clip=x", "zz=1"])
    keys = [line.partition(":")[0] for line in caught.value.lines]
    assert keys == ["seed", "data.image_size", "optim.lrr", "speed.clip", "zz"]
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["data.image_size=9", "model.heads=3", "schedule.epochs=1"])
    assert len(caught.value.lines) == 3


def test_a_group_takes_several_of_its_keys_at_once(tmp_path: Path) -> None:
    keys = "speed={attention: reference, layout: batch_second}"
    config = load_config("vit_digits", ["speed=fast", keys])
    assert (config.speed.preset, config.speed.attention, config.speed.layout) == ("fast", "reference", "batch_second")
    values = {**load_config("vit_digits").model_dump(mode="json"), "config_name": "vit_digits"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert load_run_config(tmp_path, [keys]).speed.attention == "reference"


@pytest.mark.parametrize(
    "value",
    ["/photos (2024)", "/data/size=224", "a#b", "train-{000000..000146}.tar", "it's", 'a"b(', "50%", r"/a\b (1)"],
)
def test_what_hydra_cannot_read_is_a_text(value: str) -> None:
    config = load_config("vit_digits", [f"data.train={value}", "data.root=x", "data.source=tar"])
    assert config.data.train == value


def test_the_name_of_an_experiment_may_end_in_yaml() -> None:
    assert load_config("vit_digits.yaml") == load_config("vit_digits")
