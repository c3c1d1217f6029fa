"""Paths with a tilde."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast.paths import user_path


def test_home_is_resolved_and_nobodys_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/images") == Path("/somewhere/images")
    assert user_path(Path("~/images")) == Path("/somewhere/images")
    assert user_path("~nobody_of_that_name/images") == Path("~nobody_of_that_name/images")


def test_no_path_of_the_code_is_resolved_by_pathlib() -> None:
    """Its `expanduser` raises a RuntimeError for a user that there is not: a traceback for a mistyped path."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("pycls_fast", "tools") for file in (root / folder).rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if ").expanduser(" in file.read_text(encoding="utf-8")] == []
