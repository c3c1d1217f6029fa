"""Each family has a member of the user's own: the files of docs/extend.md, which are written beside a run and imported.

All in this process, besides one command that has all eight of them.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pycls_fast
from pycls_fast import build
from pycls_fast.choice import FAMILIES
from pycls_fast.config import Section, load_config
from pycls_fast.config.help import help_text
from pycls_fast.errors import UserError
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.values import Size
from tests.integration.runs import ROOT, TINY, command, records, run_process

FILES = dict(
    re.findall(
        r"^```python\n# (my_\w+)\.py: [^\n]*\n(.*?)^```$", (ROOT / "docs/extend.md").read_text("utf-8"), re.M | re.S
    )
)
CHOSEN = {
    "my_optim": ["optim=sign", "optim.lr=1e-3", "optim.momentum=0.5"],
    "my_loss": ["loss=focal", "loss.gamma=1.5"],
    "my_schedule": ["schedule=inverse_root", "schedule.timescale=4"],
    "my_policy": ["augment.policy={name: negative, probability: 1.0}"],
    "my_source": ["data=stripes", "data.images=160", "data.image_size=8", "data.global_batch_size=64"],
    "my_model": ["model=tiny", "model.width=8"],
    "my_tracker": ["trackers=[table]"],
    "my_callback": ["callbacks=[{name: weights, of: head}]"],
}
SMALL = [*TINY, "speed.compile=off", "data.num_workers=0", "runtime.device=cpu"]
EVERYTHING = [f"imports=[{','.join(CHOSEN)}]", *(override for chosen in CHOSEN.values() for override in chosen)]


def small(*overrides: str) -> list[str]:
    """The settings of a small run, without those of a ViT if there is another model or source."""
    given = [key for key in SMALL if not (key.startswith("model.") and "model=tiny" in overrides)]
    return [*given, *overrides]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the eight files; what they register is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for family in FAMILIES.values():
        monkeypatch.setattr(family, "_members", dict(family._members))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def trained(name: str, digits: Path, *more: str) -> Path:
    """Train for two steps, and resume for two more."""
    given = small(*CHOSEN[name], f"imports=[{name}]", f"data.root={digits}", "run_dir=run", *more)
    assert train(load_config("vit_digits", [*given, "schedule.max_steps=2"])) == 0
    assert train(load_config("vit_digits", [*given, "schedule.max_steps=4"])) == 0
    assert [record["step"] for record in records(Path("run"), "train")] == [1, 2, 3, 4]
    return Path("run")


def test_the_document_has_a_file_of_each_family() -> None:
    assert FILES.keys() == CHOSEN.keys()


def test_an_optimizer(digits: Path) -> None:
    run = trained("my_optim", digits)
    # The rate of each step is the size of each change.
    assert load_config("vit_digits", ["imports=[my_optim]", "optim=sign", "optim.lr=1"]).optim.own() == {
        "momentum": 0.9
    }
    assert (run / "config.yaml").read_text().count("name: sign") == 1


def test_a_loss(digits: Path) -> None:
    run = trained("my_loss", digits, "augment=none")
    # At first all classes are equally likely: (1 - 1/10)^1.5 log 10.
    assert records(run, "train")[0]["loss"] == pytest.approx(0.9**1.5 * math.log(10), rel=1e-3)


def test_a_schedule(digits: Path) -> None:
    run = trained("my_schedule", digits, "schedule.warmup_epochs=0", "optim.lr=1e-3")
    expected = [1e-3 * (1 + step / 4) ** -0.5 for step in range(4)]
    assert [record["lr"] for record in records(run, "train")] == pytest.approx(expected)


def test_a_policy(digits: Path) -> None:
    config = load_config("vit_digits", small(*CHOSEN["my_policy"], "imports=[my_policy]"))
    step = config.augment.policy.build(interpolation="bilinear", image_size=Size(8, 8), mean=(0.5, 0.5, 0.5))
    assert np.asarray(step(Image.new("RGB", (2, 2), (0, 55, 255)))).tolist() == [[[255, 200, 0]] * 2] * 2
    trained("my_policy", digits)


def test_a_source() -> None:
    given = small(*CHOSEN["my_source"], "imports=[my_source]", "run_dir=run", "schedule.max_steps=2")
    assert train(load_config("vit_digits", given)) == 0
    (record,) = records(Path("run"), "eval")
    assert record["count"] == 32


def test_a_model_is_loaded_and_exported(digits: Path) -> None:
    run = trained("my_model", digits)
    classifier = pycls_fast.load(run)
    assert classifier.logits(np.zeros((8, 8, 3), np.uint8)).shape == (1, 10)
    assert sum(p.numel() for p in classifier.network.parameters()) == 8 * 28 + 16 + 90


def test_shards_of_a_model_begin_with_what_its_constructor_draws(here: Path, digits: Path) -> None:
    text = FILES["my_model"].replace("    def forward", "        nn.init.ones_(self.head.weight)\n\n    def forward")
    (here / "my_model.py").write_text(text)
    given = small(*CHOSEN["my_model"], "imports=[my_model]", f"data.root={digits}", "schedule.max_steps=1")
    for parallel in ("single", "fsdp"):
        assert train(load_config("vit_digits", [*given, f"parallel={parallel}", f"run_dir={parallel}"])) == 0
    (whole,), (shards,) = records(Path("single"), "train"), records(Path("fsdp"), "train")
    assert shards["loss"] == pytest.approx(whole["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "speed.recompute=full",
            "speed.recompute: full works on repeated blocks, and tiny has none .Network.units.; use",
        ),
        ("speed.compile=blocks", "speed.compile: blocks works on repeated blocks, .*; use speed.compile=model"),
        ("optim.layer_decay=0.7", "optim.layer_decay: 0.7 works on repeated blocks, .*; use optim.layer_decay=null"),
        ("optim=muon", "optim.name: muon works on repeated blocks, .*; use optim=adamw"),
    ],
)
def test_a_model_that_names_no_blocks(override: str, line: str) -> None:
    config = load_config("vit_digits", [*CHOSEN["my_model"], "imports=[my_model]", override])
    with pytest.raises(UserError, match=f"^{line}"):
        build.model(config, 10, build.switches(config, torch.device("cpu")))


@pytest.mark.parametrize(
    ("head", "used"),
    [
        ("nn.Conv2d(width, classes, 1)", "head(self.norm(self.stem(images_BCHW)).relu()).mean((2, 3))"),
        ("nn.Linear(width, 5 * classes)", "head(self.norm(self.stem(images_BCHW)).relu().mean((2, 3)))[:, ::5]"),
    ],
)
def test_a_model_without_a_linear_head(here: Path, head: str, used: str) -> None:
    text = FILES["my_model"].replace("nn.Linear(width, classes)", head)
    (here / "my_model.py").write_text(re.sub(r"head\(self\.norm.*", used, text))
    with pytest.raises(UserError, match=r"^model\.kind: tiny needs a linear layer that gives its 10 logits: the last"):
        build.model(load_config("vit_digits", [*CHOSEN["my_model"], "imports=[my_model]"]), 10, Speed())


def test_a_model_of_one_image_size(here: Path) -> None:
    text = FILES["my_model"].replace(".mean((2, 3))", ".flatten(1)")
    (here / "my_model.py").write_text(text.replace("nn.Linear(width,", "nn.Linear(64 * width,"))
    given = [*CHOSEN["my_model"], "imports=[my_model]", "data.image_size=8", "data.image_size_schedule=[[0,6],[1,8]]"]
    with pytest.raises(UserError, match=r"^data\.image_size_schedule: tiny at data.image_size=8 does not take 6; use"):
        build.model(load_config("vit_digits", given), 10, Speed())


def test_a_tracker(digits: Path) -> None:
    run = trained("my_tracker", digits)
    lines = [line.split(",") for line in (run / "table.csv").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records(run, "train")]
    assert [(int(step), float(value)) for step, name, value in lines if name == "train/loss"] == losses


def test_a_callback(digits: Path) -> None:
    run = trained("my_callback", digits)
    lines = (run / "norms.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("ended")] == ["ended with status 0"] * 2
    assert [line.split()[0] for line in lines if not line.startswith("ended")] == ["2", "4"]


def test_help_shows_them() -> None:
    load_config("vit_digits", ["imports=[my_optim,my_model,my_policy]"])
    shown = help_text(Section, [], ["optim=sign", "augment.policy=negative", "model"])
    assert "signSGD with momentum (Bernstein et al., 2018)." in shown
    assert "optim.momentum=0.9  number at least 0 and less than 1" in shown
    assert "augment.policy.probability=0.5" in shown
    assert "model.width=16  whole number greater than 0" in shown


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optim=sign", "optim.momentun=0.5"], "optim.momentun: unknown key; did you mean optim.momentum?"),
        (["optim=sign", "optim.lr=1", "optim.momentum=2"], "optim.momentum: must be less than 1"),
        (["optim=sgin"], "optim.name: must be one of adamw, .*, sign; got .*; did you mean sign?"),
        (["callbacks=[{name: weights, off: x}]"], r"callbacks\[0\].off: unknown key; did you mean callbacks\[0\].of\?"),
        (["callbacks=[weight]"], r"callbacks\[0\].name: must be one of weights; got .*; did you mean weights?"),
    ],
)
def test_mistakes_in_their_keys_are_those_of_ours(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        load_config("vit_digits", ["imports=[my_optim,my_callback]", *overrides])


def test_two_of_one_name_are_an_error() -> None:
    (Path.cwd() / "other.py").write_text(FILES["my_schedule"])
    with pytest.raises(UserError, match=r"schedule\.name: inverse_root is my_schedule\..* and other\."):
        load_config("vit_digits", ["imports=[my_schedule,other]"])


@pytest.mark.slow
def test_all_of_them_at_the_command_line(here: Path) -> None:
    overrides = small(*EVERYTHING, "run_dir=run", "schedule.max_steps=2")
    run_process(command(*overrides), cwd=here)
    score = command("weights=run", tool="test_net", config_name=None)
    line = run_process(score, cwd=here, expect=2).stderr
    typed = line.rpartition("to run it, add ")[2].partition(" ")[0]
    assert typed == EVERYTHING[0]
    done = run_process([*score, typed], cwd=here)
    assert "top-1" in done.stdout
    run_process(command("weights=run", "output=net.safetensors", tool="export_net", config_name=None), cwd=here)
    Image.new("RGB", (32, 32)).save(here / "image.png")
    words = ["net.safetensors", "image.png", "imports=my_model"]
    run_process([*command(tool="predict", config_name=None), *words], cwd=here)
    words = ["run", "image.png", "imports=[my_model,my_loss]"]
    run_process([*command(tool="predict", config_name=None), *words], cwd=here)
    assert torch.isfinite(torch.tensor(records(here / "run", "train")[-1]["loss"]))
