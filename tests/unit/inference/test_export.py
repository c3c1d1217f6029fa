"""`pycls-fast export`: any checkpoint becomes one file, which loads again and computes the same."""

from __future__ import annotations

import copy
import json
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

import pycls_fast
from pycls_fast.commands.weights import ExportVerb
from pycls_fast.config import validate_saved
from pycls_fast.config.keys import PATHS
from pycls_fast.config.launch import read_options
from pycls_fast.config.messages import section_keys
from pycls_fast.config.reuse import saved_with_weights
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.inference.export import export
from pycls_fast.models.export_formats import FORMATS, SUFFIXES, About
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.train.load_weights import load_weights
from pycls_fast.train.saved_weights import NOT_PUBLISHED, open_weights, preprocessing
from tests.factories import assert_same_bits, config_of
from tests.integration.runs import run_process
from tests.unit.inference.conftest import CLASSES, VIT, make_network, make_run, metadata

# What stack traces of this machine would contain.
PACKAGE = str(Path(pycls_fast.__file__).parent).encode()
CONFIG = config_of(*VIT)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose average is not its weights."""
    return make_run(tmp_path / "run", ema=True)


def write(source: Path, output: Path, **settings: Any) -> dict[str, torch.Tensor]:
    assert export(str(source), str(output), **settings) == 0
    return load_file(output)


@pytest.mark.parametrize(("which", "sign"), [("auto", -1), ("ema", -1), ("model", 1)])
def test_the_chosen_weights_under_their_plain_names(run_dir: Path, tmp_path: Path, which: str, sign: int) -> None:
    tensors = write(run_dir, tmp_path / "net.safetensors", which=which)
    own = make_network(CONFIG).state_dict()
    assert_same_bits(tensors, {name: sign * value for name, value in own.items()})


def test_what_another_program_has_to_know_is_in_the_file(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, tmp_path / "net.safetensors")
    about = metadata(tmp_path / "net.safetensors")
    assert json.loads(about["classes"]) == list(CLASSES)
    assert json.loads(about["model"])["width"] == 24
    assert json.loads(about["preprocessing"]) == {
        "image_size": 8,
        "crop_ratio": CONFIG.augment.eval_crop_ratio,
        "crop": "center",
        "exif_orientation": False,
        "interpolation": CONFIG.augment.interpolation,
        "mean": list(CONFIG.data.mean),
        "std": list(CONFIG.data.std),
        "transparent": "drop",
    }
    assert about["weights"] == "ema"
    assert about["step"] == "7"


# Texts of the configuration that name no place on a machine.
NO_PATHS = (
    "config_name", "weights_allow", "model.name", "model.options", "model.module", "data.dataset",
    "data.path_column", "data.image_column", "data.label_column", "data.label_separator", "data.group_by",
    "data.hub_config", "optim.trainable", "precision.fp8_skip",
)  # fmt: skip


def test_no_place_on_a_machine_is_in_the_file(run_dir: Path, tmp_path: Path) -> None:
    texts: list[str] = []

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            for inner in section_keys(section)[name]:
                walk(inner, f"{prefix}{name}.")
            if any(kind is str or str in get_args(kind) for kind in (field.annotation, *get_args(field.annotation))):
                texts.append(f"{prefix}{name}")

    walk(RunConfig, "")
    assert {text for text in texts if not text.startswith("trackers.")} == {*PATHS, "imports", "resume", *NO_PATHS}
    write(run_dir, tmp_path / "net.safetensors")
    config = json.loads(metadata(tmp_path / "net.safetensors")["config"])
    assert not [key for key in NOT_PUBLISHED if key in config or key.removeprefix("data.") in config["data"]]
    validate_saved(config, "net.safetensors")


def test_the_file_loads_and_exports_again(run_dir: Path, tmp_path: Path) -> None:
    first = write(run_dir, tmp_path / "net.safetensors")
    loaded = make_network(CONFIG)
    weights, _ = load_weights(loaded, tmp_path / "net.safetensors", classes=CLASSES)
    assert (weights.kind, weights.step) == ("ema", 7)
    assert_same_bits(first, loaded.state_dict())
    again = write(tmp_path / "net.safetensors", tmp_path / "half.safetensors", dtype="bfloat16")
    assert_same_bits(again, {name: value.bfloat16() for name, value in first.items()})
    other = tuple("abcdefghij")
    with pytest.raises(UserError, match="was trained on different classes"):
        load_weights(loaded, tmp_path / "net.safetensors", classes=other, for_training=False)


@pytest.mark.parametrize(
    "about", [{"classes": "cat,dog"}, {"classes": "10"}, {"step": "7.5"}, {"config": '{"width": 7}'}]
)
def test_other_programs_metadata_is_ignored(tmp_path: Path, about: dict[str, str]) -> None:
    save_file(make_network(CONFIG).state_dict(), tmp_path / "net.safetensors", metadata=about)
    load_weights(make_network(CONFIG), tmp_path / "net.safetensors", classes=CLASSES)
    opened = open_weights(tmp_path / "net.safetensors")
    assert (opened.step, opened.classes) == (None, None)
    with pytest.raises(UserError, match="does not say which model and classes it belongs to"):
        pycls_fast.load(tmp_path / "net.safetensors")
    assert saved_with_weights([f"weights={tmp_path / 'net.safetensors'}"]) is None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["weights=nowhere"], "weights: nowhere is neither a weights file nor a run folder with a checkpoint"),
        (["format=onnx"], "output: format=onnx writes a file net.onnx; give another path"),
        (["format=timm"], "output: format=timm writes a folder net; give another path"),
        (["format=timm", "output=run"], "output: run exists (overwrite=true replaces it)"),
        (["format=timm", "output=run", "overwrite=true"], "output: run holds something other than a timm model"),
        (["output=new/n.onnx", "dtype=float16"], "dtype: must be one of null, int8 with format=onnx; got float16"),
        (["images=there"], "images: safetensors holds the weights alone, which nothing runs; leave it out"),
        (["output=there.safetensors/net.safetensors"], "net.safetensors cannot be written (File exists)"),
        (["output=there.safetensors"], "output: there.safetensors exists (overwrite=true replaces it)"),
        (["weights=there.safetensors"], "weights: there.safetensors cannot be read"),
    ],
)
def test_mistakes_get_a_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.safetensors").write_bytes(b"not what its name says")
    given = {argument.partition("=")[0] for argument in arguments}
    usual = [a for a in (f"weights={run_dir}", "output=net.safetensors") if a.partition("=")[0] not in given]
    with pytest.raises(UserError) as caught:
        read_options([*usual, *arguments], ExportVerb)()
    assert any(line in told.replace(f"{tmp_path}/", "") for told in caught.value.lines), caught.value.lines
    assert not Path("net.safetensors").exists()
    assert not Path("new").exists()


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A run with values in every tensor: a fresh head is zero, and all models would agree."""
    return make_run(tmp_path / "drawn")


def pixels() -> torch.Tensor:
    """uint8 (3, 3, 8, 8)."""
    return torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def logits(source: Path, **settings: str) -> torch.Tensor:
    """Of the run itself, from the same bytes."""
    return pycls_fast.load(source, **settings).logits(pixels().permute(0, 2, 3, 1))


def test_the_folder_for_timm(drawn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.v1"
    scores = {"weights": "model", "split": "val", "top1": 12.5, "top5": 75.0, "loss": 2.25, "count": 1200}
    records = [{"kind": "eval", "step": step, **scores, "top1": top1} for step, top1 in ((7, 12.5), (8, 90.0))]
    (drawn / "metrics.jsonl").write_text(
        "".join(json.dumps(record | {"epoch": 1, "time": 0}) + "\n" for record in records)
    )
    assert export(str(drawn), str(folder), format="timm") == 0
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (folder / "README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "timm"
    assert "| top-1 | 12.50% |\n| top-5 | 75.00% |\n| loss | 2.2500 |\n| images | 1,200 |\n" in text
    assert '"class [9]"]' in text
    assert str(tmp_path) not in card
    # transformers reads the names here only, and else takes those of ImageNet for 1,000 classes.
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == [f"class [{i}]" for i in range(10)]
    assert config["pretrained_cfg"]["mean"] == list(CONFIG.data.mean)


@pytest.mark.slow
def test_only_exported_files_of_a_folder_are_overwritten(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be a clone of a hub's repository, the working folder or a link."""
    export(str(drawn), str(tmp_path / "clone"), format="timm")
    (tmp_path / "clone" / ".git").mkdir()
    for kept in (".git/HEAD", "README.md"):
        (tmp_path / "clone" / kept).write_text("ours")
    (tmp_path / "link").symlink_to("clone")
    monkeypatch.chdir(tmp_path / "clone")
    for output in (".", str(tmp_path / "link")):
        Path("model.safetensors").write_bytes(b"old")
        export(str(drawn), output, overwrite=True, format="timm")
        assert load_file("model.safetensors")
        assert {path.name for path in Path().iterdir()} == {"config.json", "model.safetensors", "README.md", ".git"}
    assert Path(".git/HEAD").read_text() == Path("README.md").read_text() == "ours"


def test_onnxruntime_computes_the_same(drawn: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    file = tmp_path / "net.onnx"
    assert export(str(drawn), str(file), format="onnx") == 0
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [each.shape for each in (*session.get_inputs(), *session.get_outputs())] == [
        ["batch", 3, 8, 8],
        ["batch", 10],
    ]
    (found,) = session.run(["logits"], {"images": pixels().numpy()})
    torch.testing.assert_close(torch.from_numpy(found), logits(drawn), rtol=1e-4, atol=1e-4)
    texts = session.get_modelmeta().custom_metadata_map
    assert json.loads(texts["classes"])[3] == "class [3]"
    assert texts["outputs"] == "softmax"
    assert json.loads(texts["preprocessing"])["image_size"] == 8
    assert PACKAGE not in file.read_bytes()
    assert "python run_onnx.py" in (tmp_path / "run_onnx.py").read_text()


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=pytest.mark.slow), "program"])
def test_what_computes_something_else_is_not_written(
    drawn: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    write = FORMATS[form]

    def write_another(model: torch.nn.Module, path: Path, about: About) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.bias[3] += 0.1 * logits(drawn).abs().max()
        write(other, path, about)

    monkeypatch.setitem(FORMATS, form, write_another)
    file = tmp_path / f"net{SUFFIXES[form]}"
    line = r"^output: not written, as the file does not compute what the network does: \d+ "
    with pytest.raises(UserError, match=line):
        export(str(drawn), str(file), format=form)
    assert not file.exists()


def test_a_network_that_a_format_cannot_hold_is_one_line(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = VisionTransformer.forward
    monkeypatch.setattr(VisionTransformer, "forward", lambda self, x: forward(self, x if x.sum() > 0 else -x))
    with pytest.raises(UserError, match=r"^output: the network cannot be written as program \(.*; choose"):
        export(str(drawn), str(tmp_path / "net.pt2"))
    assert not (tmp_path / "net.pt2").exists()


def test_a_program_computes_the_same(drawn: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "net.pt2"
    assert export(str(drawn), str(file)) == 0
    texts = {"classes": "", "step": ""}
    program = torch.export.load(file, extra_files=texts).module()
    torch.testing.assert_close(program(pixels()), logits(drawn), rtol=1e-4, atol=1e-4)
    assert json.loads(texts["classes"])[3] == "class [3]"
    assert texts["step"] == "7"
    with zipfile.ZipFile(file) as archive:
        assert not any(PACKAGE in archive.read(name) for name in archive.namelist())
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.slow
def test_openvino_computes_the_same(drawn: Path, tmp_path: Path) -> None:
    # In processes of their own: absl, which openvino imports, closes pytest's standard error with its log.
    command = [sys.executable, "-m", "pycls_fast", "export", f"weights={drawn}", "output=net.xml"]
    said = run_process(command, cwd=tmp_path).stdout
    assert "; 16 of 16 drawn images have the network's class, logits differ by at most" in said
    text = (tmp_path / "net.xml").read_text()
    assert all(part in text for part in ('names="images"', 'names="logits"', "class [3]", "crop_ratio"))
    assert PACKAGE.decode() not in text
    (tmp_path / "net.xml").unlink()
    assert "net.bin exists (overwrite=true replaces it)" in run_process(command, cwd=tmp_path, expect=2).stderr


def test_int8_is_fitted_on_some_images_and_compared_on_others(
    drawn: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    onnx = pytest.importorskip("onnx")
    file, damaged = tmp_path / "net.onnx", folder / "damaged.png"
    damaged.touch()
    assert export(str(drawn), str(file), format="onnx", dtype="int8", images=[str(folder)]) == 0
    assert [record.name for record in caplog.records if record.name == "root"] == []
    said = capsys.readouterr()
    assert " of 2 images have the network's class (at least 80% have to), logits" in said.out
    assert "1 of 6 images could not be read" in said.err
    with pytest.raises(UserError, match=r"^images: none can be read"):
        export(str(drawn), str(tmp_path / "two.onnx"), format="onnx", images=[str(damaged)])
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(file).graph.node}
    with pytest.raises(UserError, match=r"^images: dtype=int8"):
        export(str(drawn), str(tmp_path / "two.onnx"), format="onnx", dtype="int8")
    with pytest.raises(UserError, match=r"^images: 1 are too few"):
        export(str(drawn), str(tmp_path / "two.onnx"), format="onnx", dtype="int8", images=[str(folder / "0.png")])
    with pytest.raises(UserError, match=r"^dtype: must be one of null with format=program; got int8"):
        export(str(drawn), str(tmp_path / "net.pt2"), dtype="int8")
    with pytest.raises(UserError, match=r"^format: must be one of .*; got ONNX"):
        export(str(drawn), str(tmp_path / "net"), format="ONNX")


def test_weights_that_int8_cannot_hold_are_not_written(drawn: Path, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    weights, file = tmp_path / "large.safetensors", tmp_path / "new" / "net.onnx"
    tensors = write(drawn, weights)
    # Logits whose differences are less than a step of their range.
    save_file(tensors | {"head.bias": tensors["head.bias"] + 1e4}, weights, metadata(weights))
    assert export(str(weights), str(tmp_path / "float.onnx"), images=[str(folder)]) == 0
    line = r"^output: not written, .*: 0 of 2 images have the network's class \(at least 80% have to\)"
    with pytest.raises(UserError, match=line):
        export(str(weights), str(file), dtype="int8", images=[str(folder)])
    assert not file.parent.exists() or not list(file.parent.iterdir())


@pytest.mark.parametrize(
    ("crop", "size", "transparent"),
    [("center", "12", "drop"), ("squash", "[8,12]", "white"), ("border", "[8,12]", "drop")],
)
def test_the_script_for_onnx_sees_the_same_pixels(tmp_path: Path, crop: str, size: str, transparent: str) -> None:
    pytest.importorskip("onnxruntime")
    from pycls_fast.inference import run_onnx

    settings = [f"data.image_size={size}", f"data.transparent={transparent}", "model.patch_size=4"]
    settings += [f"augment.eval_crop={crop}", "augment.eval_crop_ratio=0.8", "speed.decode=pillow"]
    classifier = pycls_fast.load(make_run(tmp_path / "run", *settings))
    how = preprocessing(classifier.config.model_dump(mode="json"))
    draw = np.random.default_rng(0)
    for height, width in ((30, 40), (41, 23), (9, 9), (64, 15)):
        gray = Image.fromarray(draw.integers(0, 2**16, (height, width), dtype=np.uint16))
        floats = [Image.fromarray(np.asarray(gray) / np.float32(scale)) for scale in (65535, 257, 1)]
        for image in (Image.fromarray(draw.integers(0, 256, (height, width, 4), dtype=np.uint8)), gray, *floats):
            (batch,) = classifier.batches(classifier.given(image))
            assert np.array_equal(run_onnx.prepared(image, how), batch.images_BHWC[0].permute(2, 0, 1).numpy())


def test_files_are_readable_by_others(drawn: Path, tmp_path: Path) -> None:
    write(drawn, tmp_path / "net.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "net.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
