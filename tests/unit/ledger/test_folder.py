"""A ledger's folder: whose it is, who uses it, how long its starts took."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.config.ladder import LadderSettings
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import folder as module
from pycls_fast.ledger.ladder.folder import LedgerFolder, changed, code_digest, conditions, files_of
from pycls_fast.ledger.ladder.ledger import Ledger
from tests.factories import config_of
from tests.unit.ledger.stand_ins import LADDER, SETTINGS, FakeProcess, quiet, run


def test_a_folder_belongs_to_its_experiment_and_machine(tmp_path: Path) -> None:
    folder = tmp_path / "report"

    def opened(now: Mapping[str, Any]) -> None:
        place = LedgerFolder(folder)
        ledger = Ledger(LADDER, LadderSettings(), [], [], "cpu", place, say=quiet, conditions=now)
        with ledger.folder.opened(ledger.plan()):
            pass

    before = conditions(config_of("optim.lr=0.001"), "cpu")
    opened(before)
    opened(before)
    other = conditions(config_of("optim.lr=0.002", "schedule.epochs=7"), "cpu")
    with pytest.raises(UserError, match=r"holds a ledger with different optim\.lr, schedule\.epochs; choose another"):
        opened(other)
    for key in ("device", "processor", "cores", "torch", "torchvision", "timm"):
        with pytest.raises(UserError, match=f"different {key}; choose"):
            opened({**before, key: "?"})
    with pytest.raises(UserError, match=r"and [0-9]+ more; choose"):
        opened(conditions(load_config("resnet_digits"), "cpu"))
    assert changed({**before, "experiment": {**before["experiment"], "speedy": 1}}, before) == ["speedy"]


def test_different_code_is_not_measured_into_the_same_folder(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Otherwise the old numbers would be reported as those of the new code."""

    def opened(code: str, *, accept: bool = False, rounds: int = 1) -> list[str]:
        place = LedgerFolder(tmp_path, code=lambda: code, accept_code=accept)
        settings = LadderSettings(**{**SETTINGS, "rounds": rounds})
        ledger = Ledger(LADDER, settings, [], [], "cpu", place, say=quiet)
        with ledger.folder.opened(ledger.plan()):
            run(ledger)
        assert json.loads((tmp_path / "plan.json").read_text())["code"] == place.codes
        return place.codes

    assert opened("a") == opened("a") == ["a"]
    with pytest.raises(UserError, match=r"with different code \(accept_code=true, if .*\); choose another"):
        opened("b")
    # Nothing is left to measure, so that all is still of the first.
    assert opened("b", accept=True) == ["a"]
    assert opened("b", accept=True, rounds=2) == ["a", "b"]


def test_the_code_is_that_of_the_package_and_the_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, configs = tmp_path / "pycls_fast", tmp_path / "configs"
    monkeypatch.setattr(module, "_PACKAGE", package)
    files = {
        package / "data" / "region.c": True, package / "a.py": True, configs / "augment" / "own.yaml": True,
        configs / "mine.yaml": False, configs / "ladders" / "l.yaml": False,
    }  # fmt: skip
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x: 1")
    found = [code_digest([configs])]
    for file in files:
        file.write_text("x: 2")
        found.append(code_digest([configs]))
    assert [now != before for before, now in pairwise(found)] == list(files.values())
    # A lock of an editor: a link to nothing.
    (package / ".#a.py").symlink_to("nobody@nowhere")
    assert code_digest([configs]) == found[-1]


def test_own_modules_are_code_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they import, unless it is installed or Python's own; whichever command has started."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ["ledger_one", "ledger_package"]
    texts = {
        "ledger_package/__init__.py": "", "ledger_package/inner.py": "", "ledger_helper.py": "",
        "ledger_one.py": "import ledger_helper, sys, timm", "unrelated.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in names:
        importlib.import_module(name)
    for name in ("json", "__main__"):
        monkeypatch.setattr(sys.modules[name], "__file__", str(tmp_path / "unrelated.py"), raising=False)
    assert files_of(names) == sorted(tmp_path / name for name in texts if name != "unrelated.py")
    found = code_digest([], own=files_of(names))
    (tmp_path / "ledger_helper.py").write_text("x = 2")
    assert code_digest([], own=files_of(names)) != found


def test_the_time_of_all_starts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    first, second = LedgerFolder(tmp_path), LedgerFolder(tmp_path)
    with first.opened({}):
        now = 130.0
        first.save()
        # Killed here: what came after that is lost.
        saved = (tmp_path / "plan.json").read_text()
        now = 5000.0
    (tmp_path / "plan.json").write_text(saved)
    with second.opened({}):
        now = 5012.0
        assert second.seconds == 42.0
    assert json.loads((tmp_path / "plan.json").read_text())["worked"] == 42.0
