"""UserError: lines, text, and the way between processes."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable

import pytest
import torch

from pycls_fast.errors import UserError, first_line, one_of, print_lines, refusing, reporting
from pycls_fast.models.layers import ATTENTION


def test_it_survives_a_pickle() -> None:
    back = pickle.loads(pickle.dumps(UserError("a\nb", "c")))
    assert (type(back), back.lines, str(back)) == (UserError, ("a\nb", "c"), "a\nb\nc")


def test_one_of_the_names_that_there_are() -> None:
    one_of("depth", 18, {18: "a", 50: "b"})
    with pytest.raises(UserError, match=r"^depth: must be one of 18, 50; got 20$"):
        one_of("depth", 20, {18: "a", 50: "b"})


def test_the_first_line_of_any_error() -> None:
    texts = ("a\nb", "\n  \nb", "", "\n")
    assert [first_line(OSError(text)) for text in texts] == ["a", "b", "OSError", "OSError"]


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "4501234"}, "MASTER_PORT"),
        # In one process it says nothing about who speaks.
        ({"LOCAL_RANK": "1", "RANK": "x"}, "RANK"),
    ],
)
def test_variables_of_launchers_are_checked_first(
    variables: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert reporting(lambda: pytest.fail("started")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {key}: ")


def failing(error: BaseException) -> Callable[[], int]:
    def fail() -> int:
        raise error

    return fail


def compiling_lacks_memory() -> int:
    from torch._inductor.exc import InductorError

    raise InductorError(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has"), None)


def test_a_device_without_memory_is_one_line_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory may be full on one GPU alone; of a mistake one rank of each node speaks."""
    full = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total"))
    variables = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert reporting(full) == 2
    says = "the device is out of memory (CUDA out of memory. Tried to allocate 20.00 GiB)"
    way_out = "lower the batch size or the model, or end what else uses it"
    assert capsys.readouterr().err == f"error: rank 9: {says}; {way_out}\n"
    for rank, told in (("1", ""), ("0", "error: seed\n")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert reporting(failing(UserError("seed"))) == 2
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        (failing(MemoryError()), "out of host memory"),
        (failing(OSError(errno.ENOMEM, "Cannot allocate memory", "/tmp")), "out of host memory"),
        (failing(ImportError("_C.so: failed to map segment from shared object")), "out of host memory"),
        (lambda: len(torch.empty(2**60)), "the device is out of memory (can't allocate memory"),
        (failing(RuntimeError("could not create a primitive")), "the device is out of memory (could not create a pr"),
        (failing(RuntimeError("std::bad_alloc")), "the device is out of memory (std::bad_alloc)"),
        (failing(torch.AcceleratorError("CUDA error: out of memory\nSearch")), "the device is out of memory (CUDA"),
        (failing(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when")), "the device is out of memory (CUDA"),
        # Imports torch's compiler.
        pytest.param(compiling_lacks_memory, "the device is out of memory (Out", marks=pytest.mark.slow),
        (failing(RuntimeError("can't start new thread")), "the system gives no more threads (ulimit -u)"),
        (
            lambda: len(ATTENTION["sdpa_cudnn"](*[torch.ones(1, 1, 2, 8)] * 3)),
            "speed.attention: this device has no such",
        ),
        (failing(RuntimeError("No available kernel. Aborting execution.")), "speed.attention: this device has no"),
        (failing(OSError(errno.ENOSPC, "No space left on device")), "No space left on device\n"),
        (failing(PermissionError(errno.EACCES, "Permission denied", "/a")), "/a: Permission denied\n"),
    ],
)
def test_a_machine_without_what_is_asked_of_it_is_one_line(
    fail: Callable[[], int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reporting(fail) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def cleaning_up_fails() -> int:
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("'NoneType' object has no attribute '_flags'")
    except AttributeError as error:
        raise UserError(str(error)) from error


@pytest.mark.parametrize(
    "interrupted",
    [
        failing(KeyboardInterrupt()),
        failing(ValueError("Error building `literal`:\n  KeyboardInterrupt: ")),
        cleaning_up_fails,
    ],
)
def test_ctrl_c_is_one_line_wherever_it_comes(
    interrupted: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reporting(interrupted) == 130
    assert capsys.readouterr().err == "interrupted: Ctrl-C ended this at once\n"


def test_an_error_within_a_block_is_a_line() -> None:
    def line(error: Exception, *kinds: type[Exception], use: str = "") -> str:
        with pytest.raises(UserError) as caught, refusing("file: /a cannot be read", *kinds, use=use):
            raise error
        return str(caught.value)

    missing = FileNotFoundError(2, "No such file", "/a")
    assert line(missing, use="give another") == "file: /a cannot be read (No such file); give another"
    assert line(FileNotFoundError(2, "No such file", "/b")) == "file: /a cannot be read (/b: No such file)"
    assert line(KeyError("b"), LookupError) == "file: /a cannot be read (KeyError: 'b')"
    assert line(UserError("it"), Exception) == "it"
    with pytest.raises(ZeroDivisionError), refusing("file: /a cannot be read"):
        raise ZeroDivisionError


def test_on_a_terminal_lines_are_wrapped_between_words(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((30, 24)))
    print_lines("note", ["the standard deviation of a/very/long/path/to/a/folder-of-images is 2"])
    print_lines("note", ["pycls-fast runs a/long/path/to/a/run b"], whole=True)
    assert capfd.readouterr().err.splitlines() == [
        *("note: the standard deviation", "  of", "  a/very/long/path/to/a/folder-of-images", "  is 2"),
        "note: pycls-fast runs a/long/path/to/a/run b",
    ]
