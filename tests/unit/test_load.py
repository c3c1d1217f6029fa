"""`pycls_fast.load` and `train_net`, which import torch when they are called, and what else is imported late."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import pycls_fast
from pycls_fast import inference, train


def test_all_that_it_takes_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = inspect.signature(inference.load).parameters
    assert inspect.signature(pycls_fast.load).parameters == names
    given: dict[str, Any] = {name: object() for name in names}
    monkeypatch.setattr(inference, "load", lambda run, **settings: {"run": run, **settings})
    assert pycls_fast.load(**given) == given


def test_all_that_training_takes_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = inspect.signature(train.train_net).parameters
    assert inspect.signature(pycls_fast.train_net).parameters == names
    given: dict[str, Any] = {name: object() for name in names}
    monkeypatch.setattr(train, "train_net", lambda *places, **settings: (places, settings))
    assert pycls_fast.train_net(**given) == (
        (given["experiment"], given["overrides"]),
        {"config_dir": given["config_dir"]},
    )


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_where_it_is_used() -> None:
    late = ("timm", "matplotlib", "torch.utils.tensorboard")
    command = (
        "import sys; import pycls_fast.inference, pycls_fast.train.loop, pycls_fast.train.tasks.lr_range; "
        f"print([name for name in {late!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
