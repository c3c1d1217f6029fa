"""`pycls_fast.load`, which imports torch when it is called."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import pycls_fast
from pycls_fast import inference


def test_all_that_it_takes_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = inspect.signature(inference.load).parameters
    assert inspect.signature(pycls_fast.load).parameters == names
    given: dict[str, Any] = {name: object() for name in names}
    monkeypatch.setattr(inference, "load", lambda run, **settings: {"run": run, **settings})
    assert pycls_fast.load(**given) == given
