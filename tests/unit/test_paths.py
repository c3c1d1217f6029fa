"""Paths with a tilde, and users without a home."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from pycls_fast.data import native
from pycls_fast.data.sources.index import _places
from pycls_fast.errors import UserError
from pycls_fast.files import cache_folder, user_path


def test_home_is_resolved_and_nobodys_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/images") == Path("/somewhere/images")
    assert user_path(Path("~/images")) == Path("/somewhere/images")
    assert user_path("~nobody_of_that_name/images") == Path("~nobody_of_that_name/images")


def _without_a_passwd_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_cache_of_nobody_is_below_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`docker run --user 12345` without HOME."""
    _without_a_passwd_line(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == Path(".cache/pycls_fast")
    assert _places("hub:x", "auto")[0].parent == cache_folder()
    monkeypatch.setenv("CC", "no-such-compiler")
    native.library.cache_clear()
    with pytest.raises(UserError, match="no-such-compiler"):
        native.library()
    cache_folder().mkdir(parents=True, exist_ok=True)
    native._path().touch()
    monkeypatch.setattr(os, "getuid", lambda: -2)
    with pytest.raises(UserError, match="belongs to another user, whose code is not run; remove it"):
        native.library()
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/pycls_fast")
