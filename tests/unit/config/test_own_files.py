"""Experiments and groups of the user's own, tools and their options, sweeps: in this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pycls_fast.config import Purpose, Verb, command_alone, overrides_name
from pycls_fast.config.compose import as_hydra_overrides, compose
from pycls_fast.config.keys import CONFIGS, as_typed
from tests.unit.conftest import Tool


def test_an_own_group(tool: Tool, tmp_path: Path) -> None:
    file = tmp_path / "model" / "narrow.yaml"
    file.parent.mkdir()
    file.write_text("kind: vit\nwidth: 8\ndepth: 2\nheads: 2\nmlp_widht: 3\npatch_size: 4\n")
    status, lines, _ = tool("--config-dir", ".", "model=narrow")
    assert (status, lines) == (
        2,
        [
            f"error: model.mlp_width: missing; set it with model.mlp_width=VALUE ({file} or the command line)",
            f"error: model.mlp_widht: unknown key; did you mean model.mlp_width? ({file})",
        ],
    )
    file.write_text(file.read_text().replace("widht", "width"))
    status, lines, calls = tool("--config-dir", ".", "model=narrow")
    assert (status, lines, calls[0][0].model.model_dump()["width"]) == (0, [], 8)


def test_off_and_on_need_no_quotes(tool: Tool, tmp_path: Path) -> None:
    """To YAML they are booleans."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [vit_digits, _self_]\nspeed: {compile: off, cuda_graphs: on}\ndata: {index_cache: off}\n"
    )
    status, lines, calls = tool("--config-dir", ".", "--config-name", "mine")
    assert (status, lines) == (0, [])
    config = calls[0][0]
    assert (config.speed.compile, config.speed.cuda_graphs, config.data.index_cache) == ("off", "on", "off")


@pytest.mark.parametrize(
    "value",
    [
        {"root": "/Bilder/Äpfel (1)", "label_separator": ";"},
        ["a, b", "null", "1e-3", "it's", 'say "x"', "b.*", ""],
    ],
)
def test_what_is_written_for_the_command_line_is_read_as_it_was(value: object) -> None:
    """As when a section is given from Python."""
    (parsed,) = OverridesParser.create().parse_overrides([f"key={as_typed(value)}"])
    assert parsed.value() == value


def test_a_checkout_behind_a_link_knows_its_own_folder(tmp_path: Path) -> None:
    """Taken for the user's, it was handed to a ledger's processes in place of that."""
    (tmp_path / "link").symlink_to(CONFIGS.parent)
    spec = importlib.util.spec_from_file_location("keys", tmp_path / "link" / "pycls_fast" / "config" / "keys.py")
    assert spec is not None
    assert spec.loader is not None
    keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keys)
    assert keys.shown_path(keys.CONFIGS / "vit_digits.yaml") == "configs/vit_digits.yaml"


@pytest.mark.parametrize("experiment", ["mine", "vit_digits"])
def test_a_folder_of_configurations_from_python(tmp_path: Path, experiment: str) -> None:
    """Experiments of both folders find groups of both."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "own.yaml").write_text("name: sgd\nlr: 1e-3\n")
    (tmp_path / "mine.yaml").write_text("defaults: [vit_digits, _self_]\nseed: 5\n")
    values = compose(experiment, ["optim=own"], [CONFIGS, tmp_path]).values
    # YAML 1.1 reads 1e-3 as text; Hydra does not.
    assert (values["optim"], values["model"]["kind"]) == ({"name": "sgd", "lr": 1e-3, **values["optim"]}, "vit")


def test_own_files_win_over_ours_of_the_same_names(tool: Tool, tmp_path: Path) -> None:
    """Such as a copy of an experiment that was changed."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "adamw.yaml").write_text("name: adamw\nbetas: [0.5, 0.75]\n")
    ours = (CONFIGS / "vit_digits.yaml").read_text()
    (tmp_path / "vit_digits.yaml").write_text(ours.replace("epochs: 80", "epochs: 7"))
    values = compose("vit_digits", [], [CONFIGS, tmp_path]).values
    assert (values["schedule"]["epochs"], values["optim"]["betas"]) == (7, [0.5, 0.75])
    status, lines, calls = tool("--config-dir", ".", "--config-name", "vit_digits")
    assert (status, lines) == (0, [])
    assert (calls[0][0].schedule.epochs, calls[0][0].optim.betas) == (7, (0.5, 0.75))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config-dir", "nowhere"], "nowhere: no such folder of configurations"),
        (["--seed", "3"], "unrecognized arguments: --seed; write key=value for a value, --help lists what there is"),
        (["--config-name", "vit_digit"], "--config-name vit_digit: no such experiment; did you mean vit_digits?"),
        (["--config-name", ""], "--config-name '': no such experiment; there is "),
        (["splt=train"], "splt: unknown key; did you mean split? (the command line)"),
        (["steps=1.5"], "steps: must be a valid integer; got 1.5 (the command line)"),
    ],
)
def test_mistakes_in_flags_and_options_of_a_tool(tool: Tool, arguments: list[str], line: str) -> None:
    status, lines, calls = tool(*arguments)
    assert (status, len(lines), calls) == (2, 1, [])
    assert lines[0].startswith(f"error: {line}")


def test_flags_and_overrides_may_come_in_any_order(tool: Tool) -> None:
    for arguments in (
        ["--config-name", "resnet_digits", "seed=3", "steps=5"],
        ["seed=3", "--config-name=resnet_digits", "steps=5"],
        ["seed=3", "steps=5", "-cn", "resnet_digits"],
    ):
        status, lines, calls = tool(*arguments)
        assert (status, lines) == (0, [])
        [(config, options)] = calls
        assert (config.config_name, config.seed, options.steps) == ("resnet_digits", 3, 5)


def test_a_missing_data_root_is_a_mistake_only_for_tools_that_read_data(tool: Tool) -> None:
    assert tool("--config-name", "vit_ti16")[0] == 2
    for steps, status in ((3, 0), (4, 2)):
        arguments = ("--config-name", "vit_ti16", f"steps={steps}")
        assert tool(*arguments, reads_images=property(lambda verb: verb.steps == 4))[0] == status


def test_values_that_an_experiment_keeps_for_another_optimizer_are_named(tool: Tool) -> None:
    """Its learning rate is one for the optimizer that it names."""
    arguments = ["--config-name", "vit_s16", "data.root=/nowhere", "optim=lion"]
    status, lines, calls = tool(*arguments)
    kept = "lr, weight_decay, lr_batch_size: the experiment's own, which win; change them with optim.KEY=VALUE"
    assert (status, lines, calls[0][0].optim.lr) == (0, [f"note: optim=lion: {kept}"], 5e-4)
    assert tool(*arguments, "optim.lr=1e-4", "optim.weight_decay=10", "optim.lr_batch_size=null")[:2] == (0, [])
    assert tool(*arguments[:3])[:2] == (0, [])


@pytest.mark.parametrize(
    ("words", "experiment"),
    [
        ([], "vit_digits"),
        (["data=digits", "epochs=30"], "vit_digits"),
        (["data=/not/here"], "finetune"),
        (["data=tar", "data.train=a.tar"], "finetune"),
        (["data={root: /not/here}"], "finetune"),
        (["+weights=timm:resnet18.a1_in1k"], "finetune"),
        (["weights=timm:resnet18.a1_in1k,torchvision:resnet50", "--multirun"], "finetune"),
        (["--config-name", "resnet_digits", "weights=run", "data.root=."], "resnet_digits"),
    ],
)
def test_own_images_or_weights_are_fine_tuned(tool: Tool, words: list[str], experiment: str) -> None:
    status, lines, calls = tool(*words, experiment="", purpose=Purpose(needs_data=False))
    assert (status, lines, {config.config_name for config, _ in calls}) == (0, [], {experiment})


def test_what_a_file_says_of_the_model_of_weights_counts(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [finetune, _self_]\nmodel: {drop_path: 0.25}\n")
    arguments = ["--config-dir", ".", "--config-name", "mine", "data=.", "weights=torchvision:vit_l_16"]
    for more, drop_path in (([], 0.25), (["model.drop_path=0.5"], 0.5)):
        status, lines, calls = tool(*arguments, *more)
        assert (status, lines) == (0, [])
        assert (calls[0][0].model.depth, calls[0][0].model.drop_path) == (24, drop_path)


@pytest.mark.parametrize("name", ["typo", "folder of runs"])
def test_weights_that_are_not_there_are_told_before_their_data(tool: Tool, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder of runs" / "run").mkdir(parents=True)
    weights = tmp_path / name
    # The second would not fit the model that is built without weights.
    for more in ([], ["data.image_size=100"]):
        status, lines, _ = tool(f"weights='{weights}'", *more, experiment="", config_of_weights=True)
        assert [line.partition(";")[0] for line in lines] == [f"error: weights: there are none at {weights}"]
        assert status == 2


def test_several_runs_leave_nothing_of_hydras_behind(tool: Tool, tmp_path: Path) -> None:
    status, lines, calls = tool("--multirun", "seed=1,-2", "optim=adamw,sgd", "~optim.clip_norm")
    assert (status, [line for line in lines if not line.startswith("note: ")]) == (
        2,
        2 * ["error: seed: must be greater than or equal to 0; got -2 (the command line)"],
    )
    assert [(config.seed, config.optim.name) for config, _ in calls] == [(1, "adamw"), (1, "sgd")]
    assert list(tmp_path.iterdir()) == []


def test_a_fault_in_the_tool_is_not_taken_for_a_mistake(tool: Tool) -> None:
    status, lines, _ = tool(reads_images=property(lambda verb: int("ours")))
    assert (status, lines[0][:9]) == (1, "Traceback")
    assert lines[-1].startswith("ValueError: ")


def test_runs_of_a_sweep_do_not_share_a_folder(tool: Tool) -> None:
    for key in ("run_dir", "output", "predictions"):
        status, (line,), calls = tool("--multirun", "seed=1,2", f"{key}=out/a")
        assert (status, calls) == (2, [])
        assert line.startswith(f"error: {key}: out/a for every run of --multirun; leave it out, or ")
        assert line.endswith(f"'{key}=NAME${{hydra:job.num}}' (the command line)")
    status, _, calls = tool("-m", "seed=1,2", "run_dir=out/${hydra:job.num}")
    assert (status, [config.run_dir for config, _ in calls]) == (0, ["out/0", "out/1"])
    assert tool("-m", "seed=1", "run_dir=out")[0] == 0


def test_a_run_of_a_sweep_can_be_started_by_itself(tool: Tool) -> None:
    """Its command makes its configuration, whatever Hydra alone knew of it."""
    seen: list[list[str] | None] = []

    def look(verb: Verb) -> bool:
        seen.append(command_alone())
        return True

    arguments = ["seed=1,2", "optim=sgd", "data.root=/photos (${hydra:job.num})", "run_dir=out/${hydra:job.num}"]
    _, _, calls = tool("--config-name", "resnet_digits", "-m", *arguments, reads_images=property(look))
    assert len(calls) == 2
    for (config, _), command in zip(calls, list(seen), strict=True):
        assert command is not None
        status, _, again = tool(*command, f"run_dir={config.run_dir}", reads_images=property(look))
        assert (status, [config for config, _ in again]) == (0, [config])
    assert seen[2:] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            ["optim.lr=1e-3", "model=convnext_tiny", "data.root=.", "runtime.threads=1", "weights=runs/a b/best.pt"],
            "lr-1e-3_model-timm_name-convnext_tiny_weights-best.pt",
        ),
        (["optim=lion", "epochs=9", f"imports=[{'a' * 200}]"], "optim-lion_epochs-9"),
        ([f"weights=timm:{'a' * 200}", "data.mean=[0.5,0.5,0.5]"], f"weights-timm-{'a' * 25}_mean-0.5-0.5-0.5"),
        # The runs of a sweep differ in what comes last.
        ([*(f"data.wnids={letter * 30}" for letter in "abc"), "seed=1"], f"wnids-{'b' * 30}_wnids-{'c' * 30}_seed-1"),
        ([], ""),
    ],
)
def test_a_folder_is_named_by_what_was_typed(arguments: list[str], name: str) -> None:
    """Whether the values can be used does not matter."""
    assert overrides_name(as_hydra_overrides(arguments, [CONFIGS])) == name


def test_a_folder_is_not_named_by_what_hydra_deletes() -> None:
    assert overrides_name(["~model=null", "++model={kind:mine}"]) == "model-kind-mine"
