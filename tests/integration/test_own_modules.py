"""Modules of the user's own (`imports`), which register a model with timm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file

import pycls_fast
from pycls_fast.config import load_config
from pycls_fast.config.compose import import_modules
from pycls_fast.config.reuse import saved_with_weights
from pycls_fast.errors import UserError
from pycls_fast.inference.export import export
from pycls_fast.train.saved_weights import open_weights
from tests.integration.runs import command, run_process, under_torchrun

MODEL = """
from torch import nn
from timm.models import register_model


class Tiny(nn.Module):
    def __init__(self, num_classes, in_chans):
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 8, 3)
        self.head = nn.Linear(8, num_classes)
        self.default_cfg = {"classifier": "head"}

    def forward(self, images_BCHW):
        return self.head(self.stem(images_BCHW).mean((2, 3)))


@register_model
def tiny_of_this_test(pretrained=False, num_classes=10, in_chans=3, **others):
    return Tiny(num_classes, in_chans)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.slow
def test_a_model_of_the_users_own_trains_and_is_loaded(here: Path, digits: Path) -> None:
    (here / "my_package").mkdir()
    (here / "my_package" / "nets.py").write_text(MODEL)
    arguments = command(
        "imports=[my_package.nets]", "model=timm", "model.name=tiny_of_this_test", f"data.root={digits}", "run_dir=run",
        "schedule.epochs=1", "schedule.warmup_epochs=0", "trackers=[]", "speed.compile=off",
    )  # fmt: skip
    run_process(under_torchrun(arguments, 2), cwd=here)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["imports"] == ["my_package.nets"]
    # A file names no modules: nothing is imported when somebody else loads it.
    export("run", "net.safetensors")
    assert not timm.is_model("tiny_of_this_test")
    own = r"^model.name: timm .* has no model tiny_of_this_test; .*: imports=\[MODULE\] \(in Python: import it first\)$"
    with pytest.raises(UserError, match=own):
        pycls_fast.load("net.safetensors")
    image = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(UserError, match=own):
        pycls_fast.load("run")
    import_modules(["my_package.nets"])
    logits = pycls_fast.load("run").logits(image)
    assert logits.shape == (1, 10)
    assert torch.equal(pycls_fast.load("net.safetensors").logits(image), logits)


def test_a_file_of_weights_that_names_modules_imports_nothing(here: Path) -> None:
    config = load_config("vit_digits").model_dump(mode="json") | {"imports": ["of_nobody"]}
    save_file({"x": torch.zeros(1)}, "net.safetensors", {"config": json.dumps(config), "classes": '["a", "b"]'})
    saved = saved_with_weights(["weights=net.safetensors"])
    assert "imports" not in saved.values
    opened = open_weights(Path("net.safetensors"))
    assert opened.config is not None
    assert "imports" not in opened.config


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        (
            "x = 1\n\nraise ValueError('no such depth')",
            "own_mod",
            r"ValueError: no such depth \(.*own_mod.py, line 3\)",
        ),
        ("x = (", "own_mod", r"SyntaxError: '\(' was never closed \(own_mod.py, line 1\)"),
        # Something else is missing, which is not the name that the user gave.
        ("import of_nobody", "own_mod", r"ModuleNotFoundError: No module named 'of_nobody' \(.*own_mod.py, line 1\)"),
        ("", "of_nobody", r"ModuleNotFoundError: No module named 'of_nobody' \(.*, PYTHONPATH\)"),
        ("", "own_mod.nets", r"ModuleNotFoundError: No module named 'own_mod.nets'; .*, PYTHONPATH\)"),
        ("", "own/mod.py", r"ModuleNotFoundError: .*, PYTHONPATH\); did you mean own.mod\?$"),
    ],
)
def test_a_module_that_fails_is_one_line(here: Path, text: str, name: str, line: str) -> None:
    (here / "own_mod.py").write_text(text)
    with pytest.raises(UserError, match=f"^imports: {name}: {line}"):
        import_modules([name])
