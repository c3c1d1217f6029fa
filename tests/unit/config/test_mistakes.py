"""Every kind of bad configuration gets its own clear line: the key, what is wrong, where it was set, the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast.config import Purpose, RunConfig, load_config
from pycls_fast.config.compose import check, compose, default_experiment, notes
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import USUAL_KEYS, known_keys
from pycls_fast.errors import UserError
from tests.unit.conftest import Tool

HERE = "(the command line)"

# (overrides of vit_digits, the line, or its beginning if it ends in "...")
ONE_MISTAKE = [
    # Keys that do not exist, at every depth; by their usual names, in another order, of another group or kind.
    ("epoch=3", f"epoch: unknown key; did you mean epochs? {HERE}"),
    ("augment.policy={name: rand_augment, num_opps: 1}",
     f"augment.policy.num_opps: unknown key; did you mean augment.policy.num_ops? {HERE}"),
    ("classifir=map", f"classifir: unknown key; did you mean model.classifier? {HERE}"),
    ("schedule.lr=1", f"schedule.lr: unknown key; did you mean optim.lr? {HERE}"),
    ("optim.clip=1", f"optim.clip: unknown key; did you mean optim.clip_norm? {HERE}"),
    ("mixup=0.2", f"mixup: unknown key; did you mean augment.mixup_alpha? {HERE}"),
    # By the names that timm, torchvision and Lightning have, by their words if these are rare enough here.
    ("reprob=0.2", f"reprob: unknown key; did you mean augment.erase_probability? {HERE}"),
    ("optimizer=adamw", f"optimizer: unknown key; did you mean optim? {HERE}"),
    ("opt_betas=[0.9,0.95]", f"opt_betas: unknown key; did you mean optim.betas? {HERE}"),
    ("model_ema_decay=0.9", f"model_ema_decay: unknown key; did you mean optim.ema_decay? {HERE}"),
    ("grad_accum_steps=2", f"grad_accum_steps: unknown key; did you mean optim.accumulation_steps? {HERE}"),
    ("gradient_checkpointing=true", f"gradient_checkpointing: unknown key; did you mean speed.recompute? {HERE}"),
    ("cooldown_epochs=10", "cooldown_epochs: unknown key; the run has ..."),
    ("loss.zzz=1", "loss.zzz: unknown key; loss has name, label_smoothing, ..."),
    ("model.shortcut=pool", f"model.shortcut: unknown key for model=vit; it belongs to model=resnet {HERE}"),
    # Files and choices that do not exist.
    ("model=vit_s17", "model=vit_s17: no such option; did you mean vit_s16?"),
    ("precision=bf16-mixed", "precision=bf16-mixed: no such option; did you mean amp_bf16?"),
    ("optim=null", "optim=null: no such option; there is ..."),
    ("runtime.device=gpu", f'runtime.device: must be one of auto, cpu, cuda; got "gpu"; did you mean cuda? {HERE}'),
    ("model.kind=vitt", 'model.kind: must be one of vit, resnet, timm, given; got "vitt"; did you mean vit? ...'),
    # Types and ranges.
    ("optim.lr=fast", f'optim.lr: must be a valid number; got "fast" {HERE}'),
    *(
        (f"precision.loss_scale={value}", "precision.loss_scale: must be dynamic or a number greater than 0; got ...")
        for value in ("dynamicc", "0", "true")
    ),
    ("data.root=3", "data.root: must be a valid string; got 3; quotes within quotes make it text: ..."),
    ("augment.scale=[0.1]", f"augment.scale[1]: field required; got [0.1] {HERE}"),
    ("optim.betas=0.9", f"optim.betas: must be a list in brackets, [A,B]; got 0.9 {HERE}"),
    ("optim.betas=[0.9,1.5]", f"optim.betas[1]: must be less than 1; got 1.5 {HERE}"),
    ("data.image_size=[48,0]", f"data.image_size: must be a whole number greater than 0, or ...; got [48, 0] {HERE}"),
    ("data.num_workers=100000000000000000000", "data.num_workers: must be less than 2147483648; got 1000..."),
    (f"schedule.warmup_epochs={400 * '9'}", "schedule.warmup_epochs: must be auto or a number of at least 0; got 9..."),
    (f"runtime.device_memory={400 * '9'}GB", "runtime.device_memory: must be an amount of memory such as 24GB or ..."),
    # Things that cannot go together, wherever they were set; switches, too, if they were set by hand.
    ("data.image_size=[16,30]", f"data.image_size: 30 is not divisible by model.patch_size=4; use 28 or 32 {HERE}"),
    ("model.heads=5", "model.width: 64 is not divisible by model.heads=5; use 60 or 65 (model=vit_digits or ..."),
    # Told at once, however large it is.
    ("parallel={name: fsdp, tensor_degree: 2147483646}", "parallel.tensor_degree: 2147483646 does not divide ..."),
    ("parallel={pipeline_degree: 4, pipeline_schedule: zbv}",
     f"parallel.pipeline_degree: 4 ranks with 2 of ... model.depth=4; use parallel.pipeline_degree=2 {HERE}"),
    ("schedule.epochs=3", "schedule.warmup_epochs: 5 is longer than ... (configs/vit_digits.yaml)"),
    ("data=insects", "data.source: there is no folder insects here; data=PATH takes its path, or a source, which must "
     f'be one of auto, ...; got "insects"; one of your own needs imports=[MODULE] {HERE}'),
    ("loss.name=focal", f'loss.name: must be one of ...; got "focal"; one of your own needs imports=[MODULE] {HERE}'),
    ("data=folder", "data.root: not set; give ... (data=folder or the command line)"),
    ("speed={compile: off, gelu: polynomial}", f"speed.gelu: polynomial conflicts with speed.compile=off: ... {HERE}"),
    ("speed.convolution=products", f"speed.convolution: products is for model.kind=resnet ... {HERE}"),
    # Interpolations.
    ("optim.lr=${optim.lrr}", f"optim.lr: Interpolation key 'optim.lrr' not found {HERE}"),
    ("optim.lr=???", f"optim.lr: left open as ???; set it with optim.lr=VALUE {HERE}"),
    # What cannot be read.
    ("optim.lr", "cannot read 'optim.lr' on the command line; write key=value, quoting lists and spaces"),
    ("vit_s16", "cannot read 'vit_s16' on the command line; did you mean --config-name vit_s16?"),
    ("tests", "cannot read 'tests' on the command line; did you mean data=tests?"),
    ("optim.betas=0.9,0.95", "Ambiguous value for argument 'optim.betas=0.9,0.95' 1. To use it as a list, ..."),
    ("data.root=/caf\udce9", "a value cannot be read (...); paths must be valid UTF-8"),
    # Additions and deletions.
    ("~optim", "optim.name: missing; set it with optim.name=VALUE (deleted on the command line)"),
    ("config_name=mine", "config_name: the name of the experiment's file; choose it with --config-name ..."),
]  # fmt: skip


@pytest.mark.parametrize(("override", "line"), ONE_MISTAKE)
def test_a_mistake_gets_its_line(override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", [override])
    (found,) = caught.value.lines
    beginning, dots, end = line.partition("...")
    assert found.startswith(beginning)
    assert found.endswith(end) if dots else found == line


def test_an_amount_of_memory_is_saved_to_the_byte() -> None:
    config = load_config("vit_digits", ["runtime.device_memory=1TiB"])
    saved = config.model_dump(mode="json")["runtime"]["device_memory"]
    assert load_config("vit_digits", [f"runtime.device_memory={saved}"]).runtime.device_memory == 2**40


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim: {lrr: 3}", "optim.lrr: unknown key; did you mean optim.lr? ({file})"),
        ("optim: {eps: '???'}", "optim.eps: left open as ???; set it with optim.eps=VALUE ({file})"),
        ("optim: {lr: 3\nseed: 2", "{file}: line 3 is not valid YAML: expected ',' or '}}', but got ':'"),
        ("run_dir: caf\xe9", "a configuration file is not written in UTF-8 "),
        ("defaults: [vit_digitz]", "vit_digitz: no such file in configs/; did you mean vit_digits? (the defaults of m"),
        ("defaults: [finetune, _self_]\nmodel: null", "model: must be an object; got null ({file})"),
        ("defaults: [mine, _self_]", "the defaults of a configuration file lead back to it; give it a name that none"),
        ("3 # defaults", "Invalid loaded object type: int"),
    ],
)
def test_a_mistake_in_an_own_experiment_names_the_file(tool: Tool, tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "own" / "mine.yaml"
    file.parent.mkdir()
    defaults = "" if "defaults" in text else "defaults: [vit_digits, _self_]\n"
    file.write_text(f"{defaults}{text}\n", encoding="latin-1")
    status, lines, calls = tool("--config-dir", str(file.parent), "--config-name", "mine")
    assert (status, len(lines), calls) == (2, 1, [])
    assert lines[0].startswith(f"error: {line.format(file=file)}")


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        (["precision=amp_bf16", "precision.loss_scale=1024"], True),
        (["precision=fp16", "precision.loss_scale=1024"], False),
        (["precision=auto", "precision.loss_scale=1024"], False),
        (["optim.ema_every_steps=2"], True),
        (["optim.ema_every_steps=2", "optim.ema_decay=0.9"], False),
        (["~augment"], False),
    ],
)
def test_typed_keys_that_nothing_reads_are_noted(overrides: list[str], noted: bool) -> None:
    composed = compose("vit_digits", overrides, [CONFIGS])
    found = list(notes(check(composed, Purpose()), composed))
    assert [" has no effect with " in line for line in found] == [True] * noted


@pytest.mark.parametrize(
    ("experiment", "override", "mine"),
    [
        ("resnet50", "model=convnext_tiny", "model.zero_init_last_gamma=true"),
        ("vit_h16", "model=resnet18", "model.classifier=pooled"),
        ("rsb_a1", "optim=sgd", "optim.eps=1e-3"),
        ("rsb_a1", "loss=cross_entropy", "loss.bce_threshold=0.1"),
    ],
)
def test_another_choice_needs_no_keys_that_only_the_experiments_own_has(
    experiment: str, override: str, mine: str
) -> None:
    config = load_config(experiment, [override], needs_data=False)
    group, key = mine.partition("=")[0].split(".")
    assert not hasattr(getattr(config, group), key)
    with pytest.raises(UserError, match=f"^{group}.{key}: unknown key for {group}="):
        load_config(experiment, [override, mine], needs_data=False)


def test_usual_names_stand_for_keys_that_exist() -> None:
    assert set(USUAL_KEYS.values()) <= known_keys(RunConfig)
    # A switch's short name may be what others call a setting (optimizer, ema).
    keys = {key.rpartition(".")[2] for key in known_keys(RunConfig) if not key.startswith("speed.")}
    assert not set(USUAL_KEYS) & keys


def test_a_name_beside_a_source_is_a_folder() -> None:
    # One that is not there is then said to be missing, not that none is set.
    typed = ["data=insects", "data.source=folder"]
    assert load_config("vit_digits", typed).data.root == "insects"
    assert default_experiment(typed, [CONFIGS]) == "finetune"


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["optim.lrr=1", "seed=-1", "data.image_size=big", "speed.clip=x", "zz=1"])
    keys = [line.partition(":")[0] for line in caught.value.lines]
    assert keys == ["seed", "data.image_size", "optim.lrr", "speed.clip", "zz"]
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", ["data.image_size=9", "model.heads=3", "schedule.epochs=1"])
    assert len(caught.value.lines) == 3


@pytest.mark.parametrize(
    "value",
    ["/data/size=224", "train-{000000..000146}.tar", "it's", 'a"b(', r"/a\b (1)"],
)
def test_what_hydra_cannot_read_is_a_text(value: str) -> None:
    config = load_config("vit_digits", [f"data.train={value}", "data.root=x", "data.source=tar"])
    assert config.data.train == value


def test_what_is_printed_is_checked(tool: Tool) -> None:
    assert tool("optim.lrr=0.1", "--cfg", "job") == (
        2,
        [f"error: optim.lrr: unknown key; did you mean optim.lr? {HERE}"],
        [],
    )
    # What only a run needs may be missing.
    assert tool("--config-name", "finetune", "--cfg", "job", purpose=Purpose(trains=True)) == (0, [], [])
