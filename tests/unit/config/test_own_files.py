"""Experiments and groups of the user's own, in a folder given with `--config-dir`: mistakes name the file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.commands.train import table_of
from pycls_fast.config import Purpose, RunConfig, command_alone, command_line, load_config
from pycls_fast.errors import UserError
from tests.unit.config.conftest import Options, Tool

TRAINING = Purpose(trains=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim: {lrr: 3}", "optim.lrr: unknown key; did you mean optim.lr? ({file})"),
        ("optim: {lr: fast}", 'optim.lr: must be a number; got "fast" ({file})'),
        ("optim: {lr: .nan}", "optim.lr: must be a finite number; got nan ({file})"),
        ("optim: 3", "optim: must be a group of keys; got 3 ({file})"),
        ("optim: {lr: '${foo.bar}'}", "optim.lr: Interpolation key 'foo.bar' not found ({file})"),
        ("optim: {eps: '???'}", "optim.eps: left open as ???; set it with optim.eps=VALUE ({file})"),
        ("data: {image_size: 17}", "data.image_size: 17 is not divisible by model.patch_size=4; use 16 or 20 ({file})"),
        # Set in the experiment that this one is based on.
        (
            "schedule: {epochs: 2}",
            "schedule.warmup_epochs: 5 is longer than the training of schedule.epochs=2; use schedule.warmup_epochs=2 "
            "or less (configs/vit_digits.yaml)",
        ),
        ("seed: 1\nseed: 2", "{file}: line 3 is not valid YAML: found duplicate key seed"),
        ("optim: {lr: 3\nseed: 2", "{file}: line 3 is not valid YAML: expected ',' or '}}', but got ':'"),
        ("\tseed: 3", "{file}: line 2 is not valid YAML: found character '\\t' that cannot start any token"),
    ],
)
def test_a_mistake_in_an_own_experiment_names_the_file(tool: Tool, tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "own" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"defaults: [vit_digits, _self_]\n{text}\n")
    status, lines, calls = tool("--config-dir", str(file.parent), "--config-name", "mine")
    assert (status, lines, calls) == (2, [f"error: {line.format(file=file)}"], [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "defaults: [vit_digitz]",
            "vit_digitz: no such file in configs/; did you mean vit_digits? (the defaults of mine)",
        ),
        (
            "defaults: [vit_digits, {optim: sgd}]",
            "optim: chosen twice; write optim=NAME without a +, or 'override optim: NAME' in a file's defaults",
        ),
        (
            "defaults: [vit_digits, {override optim: sgdd}]",
            "optim=sgdd: no such file in configs/optim; did you mean sgd?",
        ),
        ("defaults: 3", "Invalid defaults list in 'mine', defaults must be a list (got int)"),
        ("[1, 2]", "mine.yaml: holds a list; a configuration is made of key: value"),
    ],
)
def test_a_mistake_in_the_defaults_of_an_own_experiment(tool: Tool, tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"{text}\n")
    status, lines, _ = tool("--config-dir", ".", "--config-name", "mine")
    assert (status, lines) == (2, [f"error: {line}"])


def test_a_file_in_another_encoding_is_named(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"run_dir: caf\xe9\n")
    assert tool("--config-dir=.", "--config-name=mine")[:2] == (
        2,
        ["error: mine.yaml: not written in UTF-8; save it as UTF-8"],
    )


def test_a_mistake_in_an_own_group_names_the_file_though_it_was_chosen_on_the_command_line(
    tool: Tool, tmp_path: Path
) -> None:
    file = tmp_path / "model" / "tiny.yaml"
    file.parent.mkdir()
    file.write_text("kind: vit\nwidth: 8\ndepth: 2\nheads: 2\nmlp_widht: 3\npatch_size: 4\n")
    status, lines, _ = tool("--config-dir", ".", "model=tiny")
    assert status == 2
    assert lines == [
        f"error: model.mlp_width: missing; set it with model.mlp_width=VALUE ({file} or the command line)",
        f"error: model.mlp_widht: unknown key; did you mean model.mlp_width? ({file})",
    ]
    file.write_text("kind: vit\nwidth: 8\ndepth: 2\nheads: 2\nmlp_width: 3\npatch_size: 4\n")
    status, lines, calls = tool("--config-dir", ".", "model=tiny")
    assert (status, lines) == (0, [])
    assert calls[0][0].model.model_dump()["width"] == 8


def test_off_and_on_need_no_quotes(tool: Tool, tmp_path: Path) -> None:
    """To YAML they are booleans."""
    speed = "compile: off, recompute: off, cuda_graphs: on, optimizer_compile: off"
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [vit_digits, _self_]\nspeed: {{{speed}}}\ndata: {{index_cache: off}}\n"
    )
    status, lines, calls = tool("--config-dir", ".", "--config-name", "mine")
    assert (status, lines) == (0, [])
    chosen, data = calls[0][0].speed, calls[0][0].data
    assert (chosen.compile, chosen.recompute, chosen.cuda_graphs, chosen.optimizer_compile) == (
        "off",
        "off",
        "on",
        "off",
    )
    assert data.index_cache == "off"
    for mistake in ("speed.compile=true", "data.index_cache=true"):
        status, (line,), _ = tool(mistake)
        assert (status, "; got true" in line) == (2, True)


def test_a_folder_of_configurations_for_load_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "model: {kind: resnet, depth: 18}\noptim: {name: sgd, lr: 1e-3}\ndata: {source: synthetic}\nloss: {nmae: bce}\n"
    )
    with pytest.raises(UserError) as caught:
        load_config("mine", folder=tmp_path)
    assert caught.value.lines == (f"loss.nmae: unknown key; did you mean loss.name? ({tmp_path / 'mine.yaml'})",)
    # YAML 1.1 reads 1e-3 as text; Hydra does not.
    assert load_config("mine", ["~loss.nmae"], folder=tmp_path).optim.lr == 1e-3
    with pytest.raises(UserError, match=r"/nowhere: no such folder of configurations$"):
        load_config("mine", folder=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder; give one that holds .yaml files"),
        (["--config-name"], "--config-name: needs a value"),
        (["--confi-name", "x"], "--confi-name: unknown option; did you mean --config-name?"),
        (["--confi-name=x"], "--confi-name: unknown option; did you mean --config-name?"),
        (["--seed", "3"], "--seed: unknown option; did you mean seed=VALUE?"),
        (["--config-name", ""], None),  # and all that there are
        (["splt=train"], "splt: unknown key; did you mean split? (the command line)"),
        (["steps=1.5"], "steps: must be a whole number; got 1.5 (the command line)"),
    ],
)
def test_mistakes_in_flags_and_options_of_a_tool(tool: Tool, arguments: list[str], line: str | None) -> None:
    status, lines, calls = tool(*arguments)
    assert (status, len(lines), calls) == (2, 1, [])
    if line is not None:
        assert lines == [f"error: {line}"]


def test_mistakes_in_options_and_configuration_are_told_together(tool: Tool) -> None:
    status, lines, _ = tool("steps=x", "seed=-1")
    assert (status, len(lines)) == (2, 2)
    assert [line.split(":")[1] for line in lines] == [" steps", " seed"]


def test_flags_and_overrides_may_come_in_any_order(tool: Tool) -> None:
    for arguments in (
        ["--config-name", "resnet_digits", "seed=3", "steps=5"],
        ["seed=3", "--config-name=resnet_digits", "steps=5"],
        ["seed=3", "steps=5", "-cn", "resnet_digits"],
    ):
        status, lines, calls = tool(*arguments)
        assert (status, lines) == (0, [])
        [(config, options)] = calls
        assert (config.config_name, config.seed, options) == ("resnet_digits", 3, Options(steps=5))


def test_a_missing_data_root_is_a_mistake_only_for_tools_that_read_data(tool: Tool) -> None:
    assert tool("--config-name", "vit_ti16")[0] == 2
    for steps, status in ((3, 0), (4, 2)):
        arguments = ("--config-name", "vit_ti16", f"steps={steps}")
        assert tool(*arguments, needs_data=lambda options: options.steps == 4)[0] == status


@pytest.mark.slow
def test_training_needs_weights_where_the_experiment_fine_tunes(tool: Tool) -> None:
    line = "error: weights: not set; give what to fine-tune as weights=SOURCE ({} or the command line)"
    arguments = ("--config-name", "mae_finetune_l16", "data.root=/nowhere")
    assert tool(*arguments, purpose=TRAINING)[:2] == (2, [line.format("configs/mae_finetune_b16.yaml")])
    # A tool that trains nothing has its own say.
    assert tool(*arguments)[0] == 0
    assert tool(*arguments, "weights=SOURCE", purpose=TRAINING)[0] == 0
    assert tool(*arguments, "resume=RUN/checkpoints/step_000000100", purpose=TRAINING)[0] == 0
    assert tool("optim.trainable=head", purpose=TRAINING)[:2] == (2, [line.format("configs/vit_digits.yaml")])


@pytest.mark.slow
def test_lamb_is_not_trained_from_a_head_of_zeros(tool: Tool) -> None:
    line = (
        "error: model.init: jax begins the head with zeros, which optim=lamb hardly changes: its steps are in "
        "proportion to the weights; use model.init=trunc_normal (configs/model/vit_digits.yaml or the command line)"
    )
    assert tool("optim=lamb", purpose=TRAINING)[:2] == (2, [line])
    # The ratio goes with decay; what only reads or times weights does not move them.
    for taken in (["model.init=trunc_normal"], ["optim.weight_decay=0"], ["--config-name", "resnet_digits"]):
        assert tool("optim=lamb", *taken, purpose=TRAINING)[0] == 0
    assert tool("--config-name", "vit_s16", "data.root=/nowhere", "optim=lamb", purpose=TRAINING)[0] == 0
    assert tool("optim=lamb")[0] == 0
    # A loaded head is not zero; a fresh one is found when the network is there.
    assert tool("optim=lamb", "weights=RUN", purpose=TRAINING)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("key", ["decay_norms", "decay_biases"])
def test_lamb_has_no_trust_ratio_for_what_begins_with_zeros(tool: Tool, key: str) -> None:
    arguments = ("--config-name", "resnet_digits", "optim=lamb", f"optim.{key}=true")
    line = (
        f"error: optim.{key}: puts parameters that begin with zeros under the trust ratio of optim=lamb, which hardly "
        f"changes them; use optim.{key}=false (the command line)"
    )
    assert tool(*arguments, purpose=TRAINING)[:2] == (2, [line])
    assert tool(*arguments, "optim.weight_decay=0", purpose=TRAINING)[0] == 0
    assert tool(*arguments)[0] == 0


@pytest.mark.slow
def test_values_that_an_experiment_keeps_for_another_optimizer_are_named(tool: Tool, tmp_path: Path) -> None:
    """Its learning rate is one for the optimizer that it names."""
    arguments = ["--config-name", "vit_s16", "data.root=/nowhere", "optim=lion"]
    status, lines, calls = tool(*arguments)
    assert (status, lines) == (
        0,
        [
            "note: optim=lion: lr, weight_decay, lr_batch_size: the values of configs/vit_s16.yaml, not those of "
            "configs/optim/lion.yaml; change them with optim.KEY=VALUE"
        ],
    )
    assert (calls[0][0].optim.lr, calls[0][0].optim.weight_decay) == (5e-4, 0.05)
    assert tool(*arguments, "optim.lr=1e-4", "++optim.weight_decay=10", "optim.lr_batch_size=null")[:2] == (0, [])
    assert tool(*arguments[:3])[:2] == (0, [])
    # An experiment of one's own that is based on it, and an optimizer's file with a number that YAML takes for text.
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("name: sgd\nlr: 1e-2\nlr_batch_size: 512\nweight_decay: 1e-4\n")
    (tmp_path / "own.yaml").write_text("defaults: [vit_s16, _self_]\noptim: {momentum: 0.5}\n")
    assert tool("--config-dir", ".", "--config-name", "own", "data.root=/nowhere", "optim=mine")[:2] == (
        0,
        [
            f"note: optim=mine: {keys}: the values of {file}, not those of {tmp_path}/optim/mine.yaml; "
            "change them with optim.KEY=VALUE"
            for keys, file in (("lr, weight_decay", "configs/vit_s16.yaml"), ("momentum", f"{tmp_path}/own.yaml"))
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deit_s16", "rsb_a1", "rsb_a3", "torchvision_vit_b16", "vit_p_1gf"])
def test_augmentation_that_an_experiment_keeps_is_named(tool: Tool, name: str) -> None:
    """After `augment=none` nothing is left that no note names, and what the notes say takes it away."""
    arguments = ["--config-name", name, "data.root=/nowhere", "augment=none"]
    status, lines, calls = tool(*arguments)
    assert (status, {line.partition(": ")[0] for line in lines}) == (0, {"note"})
    left = calls[0][0].augment
    off = {"policy": None, "mixup_alpha": 0, "cutmix_alpha": 0, "repeats": 1}
    kept = [key for key, value in off.items() if getattr(left, key) != value]
    assert kept
    for key in kept:
        assert sum(f" {key}=" in line for line in lines) == 1
    ways = [way for line in lines for way in shlex.split(line.partition("; to take that file's values: ")[2])]
    status, lines, calls = tool(*arguments, *ways)
    assert (status, lines) == (0, [])
    expected = load_config("vit_ti16", ["data.root=/nowhere", "augment=none"]).augment
    # Settings of RandAugment may be left, which have no effect.
    assert calls[0][0].augment == expected.model_copy(update={"rand_augment": calls[0][0].augment.rand_augment})


# An experiment with a RandAugment of its own.
OWN_RAND_AUGMENT = """
defaults: [vit_ti16, _self_]
augment:
  interpolation: bicubic
  policy: rand_augment
  rand_augment: {library: timm, num_ops: 2, magnitude: 9, magnitude_std: 0.5, increasing: true, probability: 0.5}
"""


def test_the_policy_that_an_experiment_keeps_is_named(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN_RAND_AUGMENT)
    arguments = ["--config-dir", str(tmp_path), "--config-name", "own", "data.root=/nowhere", "augment=trivial"]
    status, lines, calls = tool(*arguments)
    assert (status, calls[0][0].augment.policy) == (0, "rand_augment")
    (line,) = lines
    kept = "interpolation=bicubic, policy=rand_augment"
    assert line.startswith(f"note: augment=trivial: {kept}: set in {tmp_path}/own.yaml")
    assert line.endswith(
        "to take that file's values: augment.interpolation=bilinear augment.policy=trivial_augment_wide"
    )
    assert tool(*arguments, "augment.policy=null")[2][-1][0].augment.policy is None


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "chosen"), [("own", "big_vision"), ("rsb_a3", "timm_ra")])
def test_the_way_to_another_rand_augment_leaves_nothing_of_the_kept_one(
    tool: Tool, tmp_path: Path, experiment: str, chosen: str
) -> None:
    (tmp_path / "own.yaml").write_text(OWN_RAND_AUGMENT)
    arguments = ["--config-dir", str(tmp_path), "--config-name", experiment, "data.root=/nowhere", f"augment={chosen}"]
    _, lines, _ = tool(*arguments)
    ways = [way for line in lines for way in shlex.split(line.partition("; to take that file's values: ")[2])]
    status, lines, calls = tool(*arguments, *ways)
    assert (status, lines) == (0, [])
    expected = load_config("vit_ti16", ["data.root=/nowhere", f"augment={chosen}"]).augment
    assert calls[-1][0].augment.rand_augment == expected.rand_augment


@pytest.mark.parametrize(
    ("own", "noted"),
    [("{rand_augment: {magnitude: 5}}", True), ("{policy: null, rand_augment: {magnitude: 5}}", False)],
)
def test_rand_augment_without_a_policy_is_noted(tool: Tool, tmp_path: Path, own: str, noted: bool) -> None:
    (tmp_path / "own.yaml").write_text(f"defaults: [resnet50, _self_]\naugment: {own}\n")
    line = "note: augment.rand_augment has no effect with augment.policy=null: it is for augment.policy=rand_augment"
    status, lines, _ = tool("--config-dir", ".", "--config-name", "own", "data.root=/nowhere")
    assert (status, lines) == (0, [line] if noted else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "own", "named", "still"),
    [
        ("optim: lion", "optim: {weight_decay: 10}", ["lr, weight_decay, lr_batch_size"], ["lr, lr_batch_size"]),
        ("augment: none", "augment: {repeats: 2}", ["repeats=3"], []),
    ],
)
def test_what_an_own_file_keeps_for_a_group_that_it_chooses_is_named(
    tool: Tool, tmp_path: Path, group: str, own: str, named: list[str], still: list[str]
) -> None:
    (tmp_path / "base.yaml").write_text("defaults: [vit_s16, _self_]\naugment: {repeats: 3}\ndata: {root: x}\n")
    file = tmp_path / "own.yaml"
    # What stands beside the choice is meant for it.
    for text, keys in (("", named), (own, still)):
        file.write_text(f"defaults: [base, {{override /{group}}}, _self_]\n{text}\n")
        status, lines, _ = tool("--config-dir", ".", "--config-name", "own")
        assert (status, [line.split(": ")[2] for line in lines]) == (0, keys)


@pytest.mark.slow
def test_several_runs_leave_nothing_of_hydras_behind(tool: Tool, tmp_path: Path) -> None:
    status, lines, calls = tool("--multirun", "seed=1,2", "optim=adamw,sgd", "~optim.clip_norm")
    assert (status, {line.split(":")[0] for line in lines}) == (0, {"note"})
    assert [(config.seed, config.optim.name) for config, _ in calls] == [
        (1, "adamw"),
        (1, "sgd"),
        (2, "adamw"),
        (2, "sgd"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_bad_run_of_several_is_told_and_the_others_run(tool: Tool) -> None:
    status, lines, calls = tool("-m", "seed=1,-2,3")
    assert (status, lines) == (2, ["error: seed: must be at least 0; got -2 (the command line)"])
    assert [config.seed for config, _ in calls] == [1, 3]


def test_one_rank_of_a_node_speaks(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert tool("seed=-1")[:2] == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [ValueError("ours"), KeyError("ours"), TypeError("ours")])
def test_a_fault_in_the_tool_is_not_taken_for_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception
) -> None:
    def main(config: RunConfig, options: Any) -> int:
        raise fault

    monkeypatch.setattr("sys.argv", ["tool.py"])
    try:
        with pytest.raises(SystemExit) as stopped:
            command_line(main)
    finally:
        GlobalHydra.instance().clear()
    assert stopped.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "ours" in printed.splitlines()[-1]


def test_the_status_of_the_tool_is_the_status_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tool.py"])
    try:
        with pytest.raises(SystemExit) as stopped:
            command_line(lambda config, options: 3)
    finally:
        GlobalHydra.instance().clear()
    assert stopped.value.code == 3


@pytest.mark.slow
def test_runs_of_a_sweep_do_not_share_a_folder(tool: Tool) -> None:
    status, lines, calls = tool("--multirun", "seed=1,2", "run_dir=out")
    assert (status, calls) == (2, [])
    assert lines == [
        "error: run_dir: out for every run of --multirun; leave it out, or give each its own with "
        "'run_dir=out/${hydra:job.num}' (the command line)"
    ]
    status, _, calls = tool("-m", "seed=1,2", "run_dir=out/${hydra:job.num}")
    assert (status, [config.run_dir for config, _ in calls]) == (0, ["out/0", "out/1"])
    assert tool("-m", "seed=1", "run_dir=out")[0] == 0
    status, _, calls = tool("-m", "seed=3", "run_dir=a,b")
    assert (status, [config.run_dir for config, _ in calls]) == (0, ["a", "b"])


@pytest.mark.slow
def test_a_sweep_may_end_with_a_note(tool: Tool) -> None:
    assert tool("--multirun", "seed=1,2", after_sweep=lambda: "the end")[:2] == (0, ["note: the end"])
    assert tool("--multirun", "seed=1,2", after_sweep=lambda: None)[1] == []


def test_a_run_by_itself_is_no_sweep(tool: Tool) -> None:
    assert tool("seed=1", after_sweep=lambda: "the end")[1] == []
    assert tool("--multirun", "seed=1", after_sweep=lambda: "the end")[1] == []


@pytest.mark.parametrize(
    ("run_dirs", "others", "listed"),
    [
        (["my out/0", "my out/1"], [], "'my out'"),
        (["out/0", "out/1"], ["out/2"], "out/0 out/1"),
        (["a", "b"], [], "a b"),
        (["out/0", "out/1", "other/2"], [], "out/0 out/1 other/2"),
    ],
)
def test_the_table_of_a_sweep_has_its_runs_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_dirs: list[str], others: list[str], listed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (*run_dirs, *others):
        Path(folder).mkdir(parents=True)
    note = table_of([Path(folder) for folder in run_dirs])
    assert note == f"list the runs of this sweep: pycls-fast runs {listed}"
    assert table_of([]) is None


@pytest.mark.slow
def test_a_run_of_a_sweep_can_be_started_by_itself(tool: Tool) -> None:
    """Its command makes its configuration, whatever Hydra alone knew of it."""
    seen: list[list[str] | None] = []

    def look(options: object) -> bool:
        seen.append(command_alone())
        return True

    arguments = ["seed=1,2", "optim=sgd", "data.root=/photos (${hydra:job.num})", "run_dir=out/${hydra:job.num}"]
    _, _, calls = tool("--config-name", "resnet_digits", "-m", *arguments, needs_data=look)
    assert len(calls) == 2
    for (config, _), command in zip(calls, list(seen), strict=True):
        assert command is not None
        status, _, again = tool(*command, f"run_dir={config.run_dir}", needs_data=look)
        assert (status, [config for config, _ in again]) == (0, [config])
    assert seen[2:] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "/photos (2024)",
        "/data/size=224",
        "a#b",
        "train-{000000..000146}.tar",
        "it's",
        'a"b(',
        "plain",
        "50%",
        r"/a\b (1)",
        "\\\\a (\\\\b\\",
        r'a\"b (\\"',
    ],
)
def test_values_that_hydra_would_not_read(value: str) -> None:
    config = load_config("vit_digits", [f"data.train={value}", "data.root=x", "data.source=tar"])
    assert config.data.train == value
