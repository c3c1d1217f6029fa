"""tools/export_net.py: any checkpoint becomes one file, which loads again."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.options_line import read_options
from pycls_fast.errors import UserError
from pycls_fast.train import checkpoint
from pycls_fast.train.export import export
from pycls_fast.train.weights import load_weights

ROOT = Path(__file__).parents[3]
CONFIG = load_config("vit_digits", ["model.width=32", "model.depth=1", "data.image_size=8", "model.patch_size=4"])
CLASSES = tuple("0123456789")


def network() -> torch.nn.Module:
    return build.model(CONFIG, 10, build.switches(CONFIG, torch.device("cpu")))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with a checkpoint whose average differs from its weights."""
    state = {
        "step": 7,
        "model": network().state_dict(),
        "ema": {name: value + 1 for name, value in network().state_dict().items()},
        "optimizer": {},
        "classes": list(CLASSES),
        "config": CONFIG.model_dump(mode="json"),
    }
    checkpoint.save(state, tmp_path / "run" / "checkpoints", 7, keep=2)
    return tmp_path / "run"


def write(source: Path, output: Path, **settings: object) -> dict[str, torch.Tensor]:
    chosen = {"which": "auto", "dtype": None, "overwrite": False} | settings
    assert export(str(source), str(output), **chosen) == 0  # type: ignore[arg-type]
    return load_file(output)


@pytest.mark.parametrize(("which", "added"), [("auto", 1), ("ema", 1), ("model", 0)])
def test_the_chosen_weights_under_their_plain_names(run_dir: Path, tmp_path: Path, which: str, added: int) -> None:
    tensors = write(run_dir, tmp_path / "net.safetensors", which=which)
    own = network().state_dict()
    assert tensors.keys() == own.keys()
    assert all(torch.equal(tensors[name], value + added) for name, value in own.items())


def test_what_another_program_has_to_know_is_in_the_file(run_dir: Path, tmp_path: Path) -> None:
    write(run_dir, tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == list(CLASSES)
    assert json.loads(about["model"])["width"] == 32
    assert json.loads(about["preprocessing"]) == {
        "image_size": 8,
        "crop_ratio": CONFIG.augment.eval_crop_ratio,
        "interpolation": CONFIG.augment.interpolation,
        "mean": list(CONFIG.data.mean),
        "std": list(CONFIG.data.std),
    }
    assert about["weights"] == "ema"
    assert about["step"] == "7"
    assert "root" not in json.loads(about["config"])["data"]


def test_the_file_loads_and_exports_again(run_dir: Path, tmp_path: Path) -> None:
    first = write(run_dir, tmp_path / "net.safetensors")
    loaded = network()
    origin = load_weights(loaded, tmp_path / "net.safetensors", classes=CLASSES)
    assert (origin.kind, origin.step) == ("ema", 7)
    assert all(torch.equal(first[name], value) for name, value in loaded.state_dict().items())
    again = write(tmp_path / "net.safetensors", tmp_path / "half.safetensors", dtype="bfloat16")
    assert all(torch.equal(again[name], value.bfloat16()) for name, value in first.items())
    other = tuple("abcdefghij")
    with pytest.raises(UserError, match="was trained on other classes"):
        load_weights(loaded, tmp_path / "net.safetensors", classes=other, for_training=False)


def test_weights_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    old = {"format": 1, "step": 3, "model": {n: v + 2 for n, v in network().state_dict().items()}, "ema": None}
    torch.save({**old, "classes": list(CLASSES), "config": CONFIG.model_dump(mode="json")}, tmp_path / "best.pt")
    loaded = network()
    assert load_weights(loaded, tmp_path, classes=CLASSES).step == 3
    assert all(torch.equal(old["model"][n], v) for n, v in loaded.state_dict().items())  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["weights=nowhere"], "weights: nowhere is no file of weights and no run folder with a checkpoint"),
        (["output=net.pt"], "output: the file is in the safetensors format; call it net.safetensors"),
        (["output=no/folder/net.safetensors"], "output: no/folder is no folder"),
        (["output=there.safetensors"], "output: there.safetensors exists; give another name, or overwrite=true"),
        (["weights=there.safetensors"], "weights: there.safetensors cannot be read"),
        (["dtype=int8"], 'dtype: must be one of float32, bfloat16, float16; got "int8"'),
        (["wieghts=x"], "wieghts: unknown key; did you mean weights?"),
        (["--weights"], "--weights: not a key=value; the keys are weights, output, format, which, dtype, overwrite"),
    ],
)
def test_mistakes_get_a_line(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.safetensors").write_bytes(b"not what its name says")
    given = {argument.partition("=")[0] for argument in arguments}
    usual = [a for a in (f"weights={run_dir}", "output=net.safetensors") if a.partition("=")[0] not in given]
    tool = runpy.run_path(str(ROOT / "tools" / "export_net.py"))
    with pytest.raises(UserError) as caught:
        tool["main"](read_options([*usual, *arguments], tool["Options"]))
    assert any(line in told.replace(f"{tmp_path}/", "") for told in caught.value.lines), caught.value.lines
    assert not Path("net.safetensors").exists()


def test_the_command_line(run_dir: Path) -> None:
    """Without an experiment or an installed package; a mistake is status 2 without a traceback."""
    command = [sys.executable, str(ROOT / "tools" / "export_net.py"), f"weights={run_dir}", "output=net.pt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=run_dir, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: output: the file is in the safetensors format; call it net.safetensors\n"
