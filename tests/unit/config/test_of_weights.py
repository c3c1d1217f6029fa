"""Tools that score weights take the configuration that these bring along, or say why not; a run's is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.models.choices import ViTModel
from pycls_fast.speed import Speed, resolve
from pycls_fast.strategies import Parallel
from pycls_fast.values import Size
from tests.factories import load_run_config
from tests.unit.conftest import Tool


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(
        "vit_digits",
        ["seed=5", "data.source=folder", "data.image_size=20", "optim.betas=[0.8,0.95]", "augment.policy=rand_augment",
         "model.num_classes=7"],
    )  # fmt: skip


def header(values: object) -> bytes:
    """Of a safetensors file without tensors."""
    text = json.dumps({"__metadata__": {"config": json.dumps(values)}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.fixture
def home(tmp_path: Path, config: RunConfig) -> Path:
    """A run with a checkpoint, the checkpoint elsewhere, and what was exported."""
    values = config.model_dump(mode="json")
    checkpoints = tmp_path / "run" / "checkpoints"
    names = ("copied", "moved, too", "Ann's 'own'", 'a [1], "b" c')
    for folder in (checkpoints / "step_000000007", *(tmp_path / name for name in names)):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": 7, "config": values}))
    (checkpoints / "best").symlink_to("step_000000007", target_is_directory=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    exported = {key: value for key, value in values.items() if key not in ("run_dir", "resume", "weights")}
    (tmp_path / "exported.safetensors").write_bytes(header(exported))
    # A folder as timm keeps it.
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "config.json").write_text("{}")
    (tmp_path / "timm" / "model.safetensors").write_bytes(header(exported))
    return tmp_path


@pytest.mark.parametrize(
    ("here", "source"),
    [
        (".", "run/checkpoints/best"),
        (".", "copied"),
        (".", "exported.safetensors"),
        (".", "timm"),
        (".", "${oc.env:PYCLS_FAST_RUN}"),
        (".", '"moved, too"'),
        (".", "Ann's 'own'"),
        (".", 'a [1], "b" c'),
        ("run/checkpoints", "best"),
    ],
)
def test_weights_bring_their_configuration_from_wherever_they_are(
    tool: Tool, home: Path, config: RunConfig, here: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCLS_FAST_RUN", str(home / "run"))
    monkeypatch.chdir(home / here)
    status, lines, calls = tool(f"weights={source}", "steps=4", config_of_weights=True)
    assert (status, lines) == (0, [])
    [(read, options)] = calls
    named = str(home / "run") if "oc.env" in source else source.strip('"')
    assert read == config.model_copy(update={"speed": Speed(preset=config.speed.preset), "weights": named})
    assert options.steps == 4


def test_a_sweep_over_saved_weights(tool: Tool, home: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    status, lines, calls = tool("weights=run,exported.safetensors", "-m", "seed=0,1", config_of_weights=True)
    assert (status, lines, len(calls)) == (0, [], 4)
    assert {read.data.image_size for read, _ in calls} == {config.data.image_size}
    assert [(read.weights, read.seed) for read, _ in calls[:2]] == [("run", 0), ("run", 1)]


def test_weights_of_other_projects_bring_none(tool: Tool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "other").mkdir()
    (home / "other" / "net.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
    (home / "loop").symlink_to("loop")
    monkeypatch.chdir(home)
    for source in ("other/net.safetensors", "timm:resnet18", "nowhere", "loop"):
        status, _, calls = tool(f"weights={source}", config_of_weights=True)
        assert (status, calls[0][0].config_name, calls[0][0].seed) == (0, "vit_digits", 0)
    # A name is no file in the folder of a run.
    monkeypatch.chdir(home / "run")
    assert tool("weights=timm:resnet18", config_of_weights=True)[2][0][0].seed == 0


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("copied/state.json", "{", "{file}: is not a run's configuration (Expecting"),
        ("run/config.yaml", "", "{file}: is not a run's configuration (the whole: "),
    ],
)
def test_a_damaged_record_is_named(
    tool: Tool, home: Path, file: str, text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / file).write_text(text)
    monkeypatch.chdir(home)
    status, lines, _ = tool(f"weights={file.partition('/')[0]}", config_of_weights=True)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: {line.format(file=home / file)}")
    assert lines[0].endswith("; give the folder of a run, as pycls-fast runs lists them")


def test_a_path_that_depends_on_the_configuration_is_refused(tool: Tool) -> None:
    status, lines, _ = tool("weights=runs/${seed}", config_of_weights=True)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith("error: weights: runs/${seed} cannot be resolved before the configuration is found, ")


@pytest.mark.parametrize(
    ("weights", "kind", "what"),
    [
        ("timm:convnext_tiny.fb_in22k", "timm", {"name": "convnext_tiny.fb_in22k"}),
        ("torchvision:resnet50.IMAGENET1K_V2", "resnet", {"depth": 50}),
        ("torchvision:vit_l_16", "vit", {"width": 1024}),
        ("tf_efficientnet_lite0.safetensors", "timm", {"name": "tf_efficientnet_lite0"}),
        ("resnet50-11ad3fa6.pth", "resnet", {"depth": 50}),
        ("resnet50.a1_in1k.safetensors", "timm", {"name": "resnet50"}),
        ("vit_l_16-852ce7e3.pth", "vit", {"width": 1024}),
        ("deit_small_distilled_patch16_224-649709d9.pth", "vit", {"width": 384, "distillation_token": True}),
        ("model.safetensors", "vit", {"width": 768}),
        ("run", "vit", {"width": 64, "num_classes": None}),
    ],
)
def test_weights_choose_the_model(home: Path, weights: str, kind: str, what: dict[str, object]) -> None:
    if "." in weights and ":" not in weights:
        (home / weights).touch()
    source = weights if ":" in weights else str(home / weights)
    config = load_config("finetune", ["data.root=/nowhere", f"weights={source}", "model.drop_path=0.1"])
    assert (config.model.kind, config.model.drop_path) == (kind, 0.1)
    assert {key: getattr(config.model, key) for key in what} == what
    typed = load_config("finetune", ["data.root=/nowhere", f"weights={source}", "model={drop_path: 0.1}"])
    assert typed.model == config.model
    # A model that is named stays.
    named = load_config("finetune", ["data.root=/nowhere", f"weights={source}", "model=resnet18"])
    assert named.model.kind == "resnet"


def test_a_run_that_resumes_goes_on_without_the_file_of_its_weights(home: Path) -> None:
    keys, run = ["data.root=/nowhere", "weights=/gone.safetensors"], home / "run"
    for more in ([f"run_dir={run}"], [f"resume={run / 'checkpoints/best'}"]):
        assert load_config("finetune", [*keys, *more]).model.model_dump()["width"] == 64
    for more in ([f"run_dir={home / 'new'}"], [f"run_dir={run}", "resume=never"]):
        with pytest.raises(UserError, match="there are none at /gone"):
            load_config("finetune", [*keys, *more])


def test_torchvisions_networks_that_are_not_ours_are_refused_before_they_are_downloaded() -> None:
    with pytest.raises(UserError, match=r"torchvision's vgg16 is no network of ours.*weights=timm:vgg16"):
        load_config("finetune", ["data.root=/nowhere", "weights=torchvision:vgg16"])
    with pytest.raises(UserError, match=r"none at resnet50.a1_in1k; did you mean timm:resnet50.a1_in1k\?"):
        load_config("finetune", ["data.root=/nowhere", "weights=resnet50.a1_in1k"])


def test_finetuning_a_run_keeps_the_size_of_its_images(home: Path) -> None:
    chosen = ["data.root=images", f"weights={home / 'run'}"]
    assert load_config("finetune", chosen).data.image_size == (20, 20)
    assert load_config("finetune", [*chosen, "data.image_size=24"]).data.image_size == (24, 24)


@pytest.mark.parametrize("kind", ["digits", "packed"])
def test_other_images_are_seen_as_the_saved_ones(home: Path, config: RunConfig, kind: str) -> None:
    """A folder, and another kind of source, for which only the old kind's own keys go."""
    file = home / "run" / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["data"] |= {"source": "manifest", "label_column": "kind"}
    file.write_text(yaml.safe_dump(values))
    overrides = [f"data={home}", f"data.source={kind}"]
    read = load_run_config(home / "run", overrides).data
    assert (read.root, read.source) == (str(home), kind)
    assert (read.image_size, read.mean, read.val_fraction) == (Size(20, 20), config.data.mean, config.data.val_fraction)
    assert load_run_config(home / "run", overrides[:1]).data.own()["label_column"] == "kind"


def test_a_value_that_was_edited_names_the_file(home: Path) -> None:
    file = home / "run" / "config.yaml"
    file.write_text(file.read_text().replace("seed: 5", "seed: five"))
    with pytest.raises(UserError) as caught:
        load_run_config(home / "run")
    assert caught.value.lines == (f'seed: must be a valid integer; got "five" ({file})',)


@pytest.mark.parametrize(
    "override",
    [
        "data.root=/photos (2024)", "augment={policy: {name: rand_augment, num_ops: 1}}", "~optim.clip_norm",
        "seed=${data.image_size}", "model=resnet_digits",
    ],
)  # fmt: skip
def test_an_override_means_the_same_as_where_hydra_composes(tmp_path: Path, override: str) -> None:
    # No switch is set by hand, which reading back would leave out.
    base = ["data.source=folder", "data.root=x", "speed.compile=null"]
    values = load_config("vit_digits", base).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    overrides = ["data.wnids=null", override]
    composed = load_config("vit_digits", [*base, *overrides])
    assert load_run_config(tmp_path, overrides) == composed


def test_a_run_of_any_device_is_read_anywhere(tmp_path: Path) -> None:
    """The file has the switches that were in force, which nobody has set by hand."""
    kept = load_config("vit_digits", ["data=synthetic", "precision=amp_bf16", "speed=fast"])
    values = kept.model_dump(mode="json")
    values["speed"] = resolve(kept.speed, "cuda", kept.optim, in_16_bits=True).model_dump()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    read = load_run_config(tmp_path)
    assert (read.speed.preset, read.speed.by_hand) == ("fast", {})
    build.switches(read, torch.device("cpu"))
    assert load_run_config(tmp_path, ["speed.ema=loop"]).speed.by_hand == {"ema": "loop"}


@pytest.mark.parametrize(
    "overrides",
    [["parallel=hsdp", "parallel.shard_degree=4", "parallel.replicate_degree=8"], ["parallel=fairscale_fsdp"]],
)
def test_a_run_of_any_strategy_is_scored_by_any_number_of_ranks(tmp_path: Path, overrides: list[str]) -> None:
    kept = load_config(
        "vit_digits", ["data.source=folder", *overrides, "parallel.backend=gloo", "parallel.timeout_seconds=77"]
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(kept.model_dump(mode="json")))
    assert load_run_config(tmp_path).parallel == Parallel(backend="gloo", timeout_seconds=77)
    assert load_run_config(tmp_path, ["parallel=ddp"]).parallel.name == "ddp"


@pytest.mark.parametrize("source", ["timm:NAME", "NAME.safetensors"])
def test_deit_with_two_classifiers_is_our_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = "deit_small_distilled_patch16_224"
    (tmp_path / f"{name}.safetensors").write_bytes(header({}))
    model = load_config("finetune", ["data.root=.", f"weights={source.replace('NAME', name)}"]).model
    assert isinstance(model, ViTModel)
    assert (model.width, model.distillation_token) == (384, True)
