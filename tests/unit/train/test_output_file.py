"""`output=`: a place that cannot be written is told before the work, not after it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.gradients import count_gradients
from pycls_fast.ledger.measure.numerics import measure_numerics
from pycls_fast.train.folder import atomic_write, output_file, write_json
from pycls_fast.train.tasks import score as scoring
from pycls_fast.train.tasks.knn import score_neighbours
from pycls_fast.train.tasks.lr_range import lr_range_test
from pycls_fast.train.tasks.score import score

TOOLS: dict[str, Callable[[RunConfig, str], int]] = {
    "score": lambda config, output: score(config, "val", output),
    "knn": lambda config, output: score_neighbours(config, k=1, temperature=1.0, split="val", output=output),
    "lr_find": lambda config, output: lr_range_test(config, steps=2, lr_min=0.1, lr_max=1.0, output=output),
    "numerics": lambda config, output: measure_numerics(config, steps=1, output=output),
    "gradients": lambda config, output: count_gradients(config, steps=1, warmup_steps=0, loss_scale=1.0, output=output),
}


def test_folders_are_made_and_nothing_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = output_file("~/new/folder/a.json")
    assert file == tmp_path / "new/folder/a.json"
    assert not list(file.parent.iterdir())
    name = os.fsdecode(b"caf\xe9")
    write_json(file, {"name": name, "class": "caf\u00e9"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"name": name, "class": "caf\u00e9"}
    assert list(file.parent.iterdir()) == [file]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^output: .* is a folder; give the path of a file$"):
        output_file(tmp_path)
    with pytest.raises(UserError, match=r"^output: .*file/a.json cannot be written \(.*\); give another path$"):
        output_file(tmp_path / "file/a.json")
    with pytest.raises(UserError, match=r"^predictions: is empty; give the path of a file, or leave predictions= out$"):
        output_file("", key="predictions")
    for length in (255, 300):
        with pytest.raises(UserError, match=r"cannot be written \(File name too long\); give another path$"):
            output_file(tmp_path / ("a" * length))
    file = output_file(tmp_path / "a.json")
    file.mkdir()
    with pytest.raises(UserError, match=r"^output: .*a.json could not be written \(Is a directory\)$"):
        write_json(file, {})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": math.nan, "classes": [{"top1": math.inf}, (1.5,)]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "classes": [{"top1": None}, [1.5]]}


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "there" / "a.json"
    link.symlink_to("there/a.json")
    for number in (1, 2):
        write_json(output_file(link), {"number": number})
        assert link.is_symlink()
        assert json.loads(target.read_text()) == {"number": number}
    assert not target.is_symlink()


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(UnicodeEncodeError), atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("half\ud800", encoding="utf-8")
    assert (tmp_path / "a").read_text() == "before"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.mark.parametrize("tool", TOOLS)
def test_told_before_the_work(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr(build, "sources", work)
    monkeypatch.setattr(scoring, "find_weights", lambda weights: tmp_path)
    monkeypatch.setattr(scoring, "opened", lambda weights, world: None)
    (tmp_path / "file").touch()
    config = load_config("vit_digits", [f"weights={tmp_path}", "runtime.device=cpu"])
    run = partial(TOOLS[tool], config)
    with pytest.raises(UserError, match=r"^output: .* cannot be written \(.*\); give another path$"):
        run(str(tmp_path / "file/a.json"))
    with pytest.raises(AssertionError, match="too late"):
        run(str(tmp_path / "new/a.json"))


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_numbers_come_with_the_environment(tool: str, tmp_path: Path, digits: Path) -> None:
    base = [
        f"data.root={digits}", "data.num_workers=0", "model.width=16", "model.heads=2", "model.depth=1",
        "model.mlp_width=16", "runtime.threads=1", "runtime.device=cpu", "runtime.progress=plain", "precision=fp32",
    ]  # fmt: skip
    config = load_config("vit_digits", base)
    network = build.model(config, 10, build.switches(config, torch.device("cpu")))
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    config = load_config("vit_digits", [*base, f"weights={tmp_path / 'weights.pt'}"])
    assert TOOLS[tool](config, str(tmp_path / "out" / "a.json")) == 0
    # One of them writes a folder.
    (file,) = [path for path in (tmp_path / "out").rglob("*.json") if path.is_file()]
    record = json.loads(file.read_text())
    found = record["environment"]
    # Looked for first.
    assert {key: record[key] for key in ("world_size", "device")} == {"world_size": 1, "device": "cpu"}
    assert record["versions"] == found["versions"]
    assert found.keys() >= {"command", "versions", "git", "processor", "threads", "device", "world_size"}
