"""The command `pycls-fast`."""

from __future__ import annotations

import sys

import pytest

from pycls_fast.cli import VERBS, main


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["pycls-fast", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_lists_the_verbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    status, out, _ = said(capsys, monkeypatch, *words)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("    ")] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    status, out, _ = said(capsys, monkeypatch, verb, *(["verify"] if verb == "prepare" else []), "--help")
    assert status == 0
    assert f"`pycls-fast {verb} " in out.splitlines()[0]


def test_a_mistyped_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = said(capsys, monkeypatch, "trian", "seed=1")
    assert (status, err) == (2, "error: trian: no such verb; did you mean train?\n")


def test_a_mistyped_key_of_a_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = said(capsys, monkeypatch, "train", "sed=1")
    assert status == 2
    assert err.startswith("error: sed: unknown key; did you mean seed?")
