"""The command `pycls-fast`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pycls_fast import __version__
from pycls_fast.cli import VERBS, find_verb, main
from pycls_fast.config.compose import load_config
from pycls_fast.config.launch import _with_usage, _with_words
from pycls_fast.errors import UserError
from tests.conftest import Typed


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_help_lists_the_verbs(typed: Typed, words: tuple[str, ...]) -> None:
    status, out, _ = typed(*words)
    assert status == 0
    lines = out.splitlines()[2:-2]
    assert [line.split()[0] for line in lines[::2]] == list(VERBS)
    assert [line.split()[:3] for line in lines[1::2]] == [["$", "pycls-fast", verb] for verb in VERBS]


@pytest.mark.parametrize("words", [(), ("predict", "RUN")])
def test_version(typed: Typed, words: tuple[str, ...]) -> None:
    assert typed(*words, "--version") == (0, f"pycls-fast {__version__}\n", "")


def test_short_names(digits: Path) -> None:
    short = load_config("vit_digits", ["epochs=30", "lr=0.01", "batch_size=20", "device=cpu", f"data={digits}"])
    # A path is told as one that is not there, not as an option.
    assert load_config("vit_digits", ["data=/not/here"]).data.root == "/not/here"
    assert load_config("vit_digits", ["data=not_here.csv"]).data.root == "not_here.csv"
    long = ["schedule.epochs=30", "optim.lr=0.01", "data.global_batch_size=20", "runtime.device=cpu"]
    assert short == load_config("vit_digits", [*long, f"data.root={digits}"])


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(typed: Typed, verb: str) -> None:
    status, out, _ = typed(verb, *(["verify"] if verb == "prepare" else []), "--help")
    assert status == 0
    assert f"`pycls-fast {verb} " in out.splitlines()[0]


def test_help_of_a_key_of_a_verb_that_takes_words(typed: Typed) -> None:
    assert typed("test", "RUN", "--help")[1].startswith("Evaluate a checkpoint")
    assert typed("test", "--help", "split")[1].startswith("split=val")


def test_a_mistyped_verb(typed: Typed) -> None:
    assert typed("trian", "seed=1") == (2, "", "error: trian: no such verb; did you mean train?\n")
    experiment = "error: finetune: no such verb, but an experiment: pycls-fast train --config-name finetune\n"
    assert typed("finetune", "data=.") == (2, "", experiment)
    # The usage is for what is missing.
    assert "the command is" not in typed("train", "optim.lrr=1")[2]


@pytest.mark.parametrize(
    "words",
    [
        *("export", "compare", "soup", "prepare", "test", "train data=.", "predict RUN", "lr-find lr_max=1"),
    ],
)
def test_a_missing_value_is_answered_with_the_usage(typed: Typed, words: str) -> None:
    status, _, err = typed(*words.split())
    verb = words.split()[0]
    assert status == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"error: the command is pycls-fast {verb} ")
    assert last.endswith(f", for example pycls-fast {verb} {VERBS[verb][1]}")


def test_words_are_the_values_of_keys(tmp_path: Path) -> None:
    (tmp_path / "lr=1").touch()
    assert _with_words([f"{tmp_path}/lr=1", "lr=1"], find_verb("test")) == [f"weights={tmp_path}/lr=1", "lr=1"]
    soup = find_verb("soup")
    assert _with_words(["a", "b c", "d,e", "seed=1"], soup) == ["weights=a", 'others=["b c","d,e"]', "seed=1"]
    # Words are not lost where the key is given.
    assert _with_words(["a", "weights=b"], soup) == ['others=["a"]', "weights=b"]
    assert _with_words(["a", "data=b"], find_verb("knn")) == ["weights=a", "data=b"]
    assert _with_words(["a", "weights=b"], find_verb("test")) == ["a", "weights=b"]
    assert _with_words(["~optim", "a"], find_verb("train")) == ["a", "~optim"]


def test_the_usage_does_not_answer_what_a_file_lacks() -> None:
    line = "optim.lr: missing; set it with optim.lr=VALUE (runs/a/config.yaml)"
    with pytest.raises(UserError) as refused, _with_usage(find_verb("predict")):
        raise UserError(line)
    assert refused.value.lines == (line,)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("pycls-fast tr", ["train"]),
        ("pycls-fast train optim.weight_d", ["optim.weight_decay="]),
        ("pycls-fast train optim", ["optim.", "optim="]),
        ("pycls-fast train  seed=1 loss=b", ["loss=bce"]),
        ("pycls-fast test sp", ["speed.", "speed=", "split="]),
        ("pycls-fast train --config-name vit_di", ["vit_digits"]),
        ("/usr/bin/python3 tools/train_net.py epo", ["epochs="]),
    ],
)
def test_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, told: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["pycls-fast", "-sc", "query=bash"])
    with pytest.raises(SystemExit, match="0"):
        main("train" if "train_net" in line else None)
    assert capsys.readouterr().out.split() == told


def test_the_script_of_a_shell_asks_for_completions(typed: Typed) -> None:
    status, out, _ = typed("-sc", "install=bash")
    assert (status, out.split()[-1]) == (0, "pycls-fast")
    assert "$helper -sc query=bash" in out
    assert typed("-sc")[::2] == (
        2,
        "error: -sc: must be one of install=bash, install=fish, install=zsh, "
        "uninstall=bash, uninstall=fish, uninstall=zsh; got nothing\n",
    )
