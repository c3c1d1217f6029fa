"""The command `pycls-fast`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pycls_fast import __version__
from pycls_fast.cli import VERBS, main
from pycls_fast.config.compose import load_config


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
    lines = out.splitlines()[2:-2]
    assert [line.split()[0] for line in lines[::2]] == list(VERBS)
    assert [line.split()[:3] for line in lines[1::2]] == [["$", "pycls-fast", verb] for verb in VERBS]


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(capsys, monkeypatch, "--version") == (0, f"pycls-fast {__version__}\n", "")


def test_short_names(digits: Path) -> None:
    short = load_config("vit_digits", ["epochs=30", "lr=0.01", "batch_size=20", "device=cpu", f"data={digits}"])
    # A path is told as one that is not there, not as an option.
    assert load_config("vit_digits", ["data=/not/here"]).data.root == "/not/here"
    long = ["schedule.epochs=30", "optim.lr=0.01", "data.global_batch_size=20", "runtime.device=cpu"]
    assert short == load_config("vit_digits", [*long, f"data.root={digits}"])


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    status, out, _ = said(capsys, monkeypatch, verb, *(["verify"] if verb == "prepare" else []), "--help")
    assert status == 0
    assert f"`pycls-fast {verb} " in out.splitlines()[0]


def test_a_mistyped_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = said(capsys, monkeypatch, "trian", "seed=1")
    assert (status, err) == (2, "error: trian: no such verb; did you mean train?\n")


@pytest.mark.parametrize("verb", ["predict", "export", "maps", "compare", "runs"])
def test_a_verb_alone_answers_with_its_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    status, _, err = said(capsys, monkeypatch, verb)
    assert status == 2
    assert err.splitlines()[-1].startswith(f"error: the command is pycls-fast {verb} ")
