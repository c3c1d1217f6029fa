"""`pycls_fast.train` and `train_net`: training in this process, and what is made of its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, Subset

import pycls_fast
from pycls_fast import build
from pycls_fast.config import RunConfig, load_config, overrides_name
from pycls_fast.errors import UserError
from pycls_fast.inference import from_python
from pycls_fast.observers import MLflow
from pycls_fast.optim.choices import SGD
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.train import loop
from pycls_fast.train.assemble import build_parts
from pycls_fast.train.display import Display
from pycls_fast.train.environment import Call
from pycls_fast.train.metrics import TrainMetrics
from tests.integration.runs import ROOT, TINY, records


@pytest.fixture
def small(digits: Path) -> list[str]:
    return [*TINY, f"data.root={digits}", "data.num_workers=0", "runtime.device=cpu", "runtime.threads=1"]


@pytest.mark.slow
def test_an_own_experiment_is_trained_and_loaded(
    small: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/short.yaml").write_text(
        "defaults: [vit_digits, {override optim: lion}, _self_]\noptim: {lr: 0.001}\nseed: 5\n"
    )
    trained = pycls_fast.train_net("short", [*small, "optim=sgd"], config_dir="mine")
    assert trained.status == 0
    assert trained.run_dir.parent == Path("runs/short")
    assert trained.run_dir.name.endswith(overrides_name([*small, "optim=sgd"]))
    # The note that the command line prints: the file's learning rate is not meant for SGD.
    assert "note: optim=sgd: lr, " in capsys.readouterr().err
    call = f"pycls_fast.train_net('short', {[*small, 'optim=sgd']!r}, config_dir='mine')"
    assert (trained.run_dir / "config.yaml").read_text().splitlines()[0] == f"# {call}"
    assert json.loads((trained.run_dir / "environment.json").read_text())["command"] == call
    assert trained.summary == json.loads((trained.run_dir / "summary.json").read_text())
    assert (trained.summary["config_name"], trained.summary["seed"], trained.summary["epochs"]) == ("short", 5, 2)
    classifier = pycls_fast.load(trained.run_dir, device="cpu")
    (found,) = classifier.predict(np.zeros((8, 8, 3), np.uint8))
    assert found.class_name in classifier.classes
    # Again with the same folder: it resumes.
    again = pycls_fast.train_net(
        "short", [*small, "optim=sgd", f"run_dir={trained.run_dir}", "schedule.epochs=3"], config_dir="mine"
    )
    assert again.run_dir == trained.run_dir
    assert again.summary["epochs"] == 3
    assert [record["epoch"] for record in records(again.run_dir, "eval")] == [1, 2, 3]


def test_the_words_of_the_command_line(small: Sequence[str], digits: Path, tmp_path: Path) -> None:
    assert callable(pycls_fast.train)
    words = {"data": digits, "epochs": 2, "device": "cpu", "optim__lr": 1e-3, "runtime": {"threads": 1}}
    run = pycls_fast.train("vit_digits", TINY, run_dir=tmp_path / "run", data__num_workers=0, **words)  # type: ignore[operator]
    assert run.metrics["top1"] == max(record["top1"] for record in records(run.run_dir, "eval"))
    picture = sorted(digits.glob("*/*"))[0]
    (found,) = run.predict(picture)
    copy = run.export(tmp_path / "copy.safetensors")
    for weights in (run.best, copy):
        (again,) = pycls_fast.load(weights, device="cpu").predict(picture)
        assert again.top == found.top


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs/start.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(cell["source"], names)
    assert names["first"].metrics["top1"] > 50
    assert names["run"].metrics["top1"] > 60
    assert names["classifier"].classes == ("7", "8", "9")


def own_loop() -> Callable[..., Any]:
    """The loop that the notebook shows, of the parts alone."""
    cells = json.loads((ROOT / "docs/start.ipynb").read_text())["cells"]
    (code,) = (cell["source"] for cell in cells if "def fit(" in cell["source"])
    names: dict[str, Any] = {}
    exec(code.partition("\n\nkeys = ")[0], names)
    fit: Callable[..., Any] = names["fit"]
    return fit


@pytest.fixture
def plain(digits: Path) -> RunConfig:
    keys = ("augment=none", "model.drop_path=0", "optim.clip_norm=null", "optim.ema_decay=0.9", "precision=fp32")
    return load_config("vit_digits", [*TINY, f"data.root={digits}", "data.num_workers=0", *keys])


def test_a_loop_of_ones_own_computes_what_the_step_does(plain: RunConfig) -> None:
    network, ema, _ = own_loop()(plain, 3)
    parts = build_parts(plain, ALONE, Display(speaks=False, mode="plain"))
    metrics = TrainMetrics(ALONE.device)
    batches = build.train_loader(parts.config, parts.sources["train"], ALONE, parts.switches, start_step=0, steps=3)
    for step, batch in enumerate(batches):
        parts.step(step, [batch], metrics)
    assert parts.step.ema is not None
    for own, ours in ((network.state_dict(), parts.network.state_dict()), (ema.values, parts.step.ema.values)):
        assert own.keys() == ours.keys()
        assert all(torch.equal(own[name], ours[name]) for name in own)


def test_a_loop_of_ones_own_runs_under_accelerate(plain: RunConfig) -> None:
    accelerator = Accelerator(cpu=True)
    world = World(accelerator.process_index, accelerator.num_processes, accelerator.device)
    _, _, expected = own_loop()(plain, 3)
    _, _, losses = own_loop()(plain, 3, world, accelerator.prepare, accelerator.backward)
    assert losses == expected


class Drawn(Dataset[tuple[Image.Image, int]]):
    """Images of digits as Pillow opens them, without a list of labels."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.glob("*/*"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.files[index]).convert("L"), int(self.files[index].parent.name)


class Pixelwise(nn.Module):
    """Its last layer sees each pixel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(images.flatten(2).transpose(1, 2)).mean(1)
        return logits


class Own(nn.Module):
    def __init__(self, width: int = 8, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
        self.out = nn.Linear(width * 4 * 4, 10, bias=bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.layers(images))
        return logits


def test_a_dataset_and_a_module(digits: Path, tmp_path: Path) -> None:
    whole, module = Drawn(digits), Own()
    before = module.out.weight.clone()
    splits = {"train": Subset(whole, range(0, len(whole), 2)), "val": Subset(whole, range(1, len(whole), 2))}
    words: dict[str, Any] = {
        "epochs": 1, "lr": 1e-9, "device": "cpu", "image_size": 8, "batch_size": 32, "data__num_workers": 2,
        "head": "small",
    }  # fmt: skip
    run = pycls_fast.train_net(data=splits, model=module, run_dir=tmp_path / "run", **words)
    assert run.metrics["count"] == len(splits["val"])
    # It began with the module's values, which are still the module's.
    trained = pycls_fast.load(run.run_dir, device="cpu", model=Own()).network.last_layer().weight
    torch.testing.assert_close(trained, before)
    torch.testing.assert_close(module.out.weight, before, rtol=0, atol=0)
    assert run.predict(digits)[0].class_name in "0123456789"
    with pytest.raises(UserError, match=r"^model: the given Own does not classify 10 classes of 16 px images"):
        pycls_fast.train_net(data=digits, model=module, **{**words, "image_size": 16})
    with pytest.raises(UserError, match=r"^data.source: given \(train\): images without labels, or none"):
        pycls_fast.train_net(data=Subset(whole, []), model=module, data__root=digits, **words)
    module.layers[1].bias = module.layers[0].bias
    with pytest.raises(UserError, match=r"fsdp cannot shard .* \(layers.0.bias and layers.1.bias\); use parallel=ddp$"):
        pycls_fast.train_net(data=digits, model=module, parallel="fsdp", **words)


@pytest.mark.slow
def test_two_runs_with_modules_of_one_class(digits: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"data": digits, "epochs": 1, "device": "cpu", "image_size": 8, "batch_size": 32}
    first, second = (
        pycls_fast.train_net(
            model=Own(width, bias=bias).to(dtype), run_dir=tmp_path / str(width), data__num_workers=0, **words
        )
        for width, bias, dtype in ((8, True, torch.float32), (4, False, torch.float16))
    )
    with pytest.raises(UserError, match=r"^model: the last layer, network.out, gets \(64, 3\) numbers of an image"):
        pycls_fast.train_net(model=Pixelwise(), run_dir=tmp_path / "pixels", data__num_workers=0, **words)
    copy = first.export(tmp_path / "copy.safetensors")
    assert pycls_fast.load(copy, device="cpu", model=Own(8)).network.last_layer().in_features == 8 * 4 * 4
    assert first.predict(digits)[0].class_name in "0123456789"
    assert second.classifier.network.last_layer().in_features == 4 * 4 * 4
    # In a new folder it goes on with the head that it has, and fits no new one.
    words |= {"epochs": 2, "resume": str(first.run_dir / "checkpoints/best"), "run_dir": tmp_path / "on"}
    on = pycls_fast.train_net(model=Own(8), data__num_workers=0, **words)
    assert [record["event"] for record in records(on.run_dir, "event")] == ["resumed"]


def test_a_training_that_is_stopped_has_everything_up_to_then(
    small: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = loop.Loop._train_step

    def stopped(self: loop.Loop, *arguments: object) -> None:
        step(self, *arguments)  # type: ignore[arg-type]
        self.stop.name = "SIGTERM"

    monkeypatch.setattr(loop.Loop, "_train_step", stopped)
    trained = pycls_fast.train_net("vit_digits", [*small, f"run_dir={tmp_path / 'run'}"])
    assert (trained.run_dir, trained.status) == (tmp_path / "run", 3)
    assert trained.summary is not None
    assert (trained.summary["stopped"], trained.summary["steps"], trained.metrics) == ("SIGTERM", 1, None)
    page = (trained.run_dir / "index.html").read_text()
    assert "stopped by SIGTERM" in page
    assert '<td>command</td><td class="words">pycls_fast.train_net(' in page
    assert "stopped by SIGTERM; everything up to step 1 is saved" in (trained.run_dir / "log.txt").read_text()
    monkeypatch.undo()
    trained = pycls_fast.train_net("vit_digits", [*small, f"run_dir={tmp_path / 'run'}"])
    assert trained.summary is not None
    assert (trained.status, trained.summary["stopped"]) == (0, None)


def test_lost_ranks_end_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    two = World(rank=1, size=2, device=torch.device("cpu"))

    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    monkeypatch.setattr(loop.build, "world", lambda config: nullcontext(two))
    monkeypatch.setattr(loop, "_train", Mock(side_effect=lost))
    with pytest.raises(SystemExit) as ended:
        pycls_fast.train_net("vit_digits")
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: rank 1 lost other ranks")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[RunConfig, str]]:
    """What is to be trained, and is not: configurations, and settings for the folder's name."""
    calls: list[tuple[RunConfig, str]] = []

    def train(config: RunConfig, on_start: Callable[[Path], None], call: Call) -> int:
        calls.append((config, call.settings))
        on_start(tmp_path)
        return 0

    monkeypatch.setattr(from_python, "train", train)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize("name", ["a,b", "{a}", '"a"', "null", "1e3", " a", "a\\"])
def test_a_path_is_a_path(name: str, asked: list[tuple[RunConfig, str]]) -> None:
    """Whatever its name means on a command line."""
    Path(name).mkdir()
    pycls_fast.train_net("vit_digits", data=Path(name), run_dir=Path(name))
    assert (asked[0][0].data.root, asked[0][0].run_dir) == (name, name)
    if name == "a,b":
        pycls_fast.train_net("vit_digits", data=name, run_dir=name)
        assert asked[0] == asked[1]


OWN = {"data": ".", "weights": "timm:resnet18.a1_in1k", "epochs": 9, "optim__lr": 0.01, "runtime": {"threads": 1}}


@pytest.mark.parametrize(
    ("values", "experiment", "settings"),
    [
        ({}, "vit_digits", ""),
        (OWN, "finetune", "seed-1_weights-timm-resnet18.a1_in1k_epochs-9_lr-0.01"),
        ({"data": ".", "model": nn.Linear(2, 2)}, "finetune", "seed-1_model-given"),
    ],
)
def test_experiment_and_name_are_those_of_the_same_words(
    asked: list[tuple[RunConfig, str]], values: dict[str, Any], experiment: str, settings: str
) -> None:
    pycls_fast.train(overrides=["seed=1"] if values else [], **values)
    assert [(config.config_name, named) for config, named in asked] == [(experiment, settings)]


def test_trackers_as_objects(asked: list[tuple[RunConfig, str]]) -> None:
    given = MLflow(project="cats, {dogs}")
    pycls_fast.train("vit_digits", trackers=[given])
    assert asked[0][0].trackers == (given,)


def test_another_optimizer_as_an_object(asked: list[tuple[RunConfig, str]]) -> None:
    """The experiment's has `betas`."""
    given = SGD(lr=0.1)
    pycls_fast.train("vit_digits", optim=given)
    assert asked[0][0].optim == given


def test_values_of_wrong_kinds() -> None:
    with pytest.raises(UserError, match=r"^overrides: must be a list of key=value; got the text seed=1"):
        pycls_fast.train_net("vit_digits", "seed=1")
    with pytest.raises(UserError, match=r"^data: must not be an array; give a list of numbers, or images as a torch"):
        pycls_fast.train_net(data=np.zeros((4, 8, 8, 3), np.uint8))
    # A section with a path is fine.
    with pytest.raises(UserError, match=r"^weights: not set; give a run, a file, timm:NAME"):
        pycls_fast.train_net(data={"root": Path("/")})
    with pytest.raises(UserError, match=r"^optim.lrr: unknown key; did you mean optim.lr\? \(the call\)$"):
        pycls_fast.train_net(optim__lrr=1.0)
