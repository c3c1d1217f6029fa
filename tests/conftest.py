"""What every test shares."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.cli import main
from pycls_fast.data.sources.arrays import write_digits
from tests.processes import Started

# Two tests or ranks side by side must not fight for the same cores.
torch.set_num_threads(1)

# Parquet files are copied there once; not into the user's own cache.
ARROW_FILES = tempfile.mkdtemp(prefix="pycls_fast_arrow")
atexit.register(shutil.rmtree, ARROW_FILES, ignore_errors=True)
os.environ["HF_DATASETS_CACHE"] = ARROW_FILES

# In the background of a shell's script it is ignored, by the processes that tests start, too; some tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_about_cuda(markers: str) -> bool:
    """Whether an expression of `pytest -m` chooses tests of a GPU."""
    return re.search(r"(?<!not )\bcuda\b", markers) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from the other tests and their processes: they compare bits, and start more ranks than there are GPUs.

    torch looks once in a process, so this comes before any test asks.
    """
    if not is_about_cuda(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# The limit of a slow test, or of one on a GPU, in seconds; pyproject.toml has that of the others.
SLOW_LIMIT = 3600
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """For CI, which runs a slice of the slow tests at a time."""
    parser.addoption("--minutes", type=float, help="start no test later than this")
    parser.addoption("--turn", type=int, default=0, help="which test file begins; those before it come last")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests their limit, and let the files take turns. The first on a GPU may train for all of its file."""
    for item in items:
        is_slow = item.get_closest_marker("slow") or item.get_closest_marker("cuda")
        if is_slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))
    files = list(dict.fromkeys(item.path for item in items))
    place = {file: (number - config.option.turn) % len(files) for number, file in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late."""
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over")


PICTURES = (("validation", "draw_curves"), ("summary", "draw_curves"), ("summary", "draw_confusion"))


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[None]:
    """Runs in this process draw no pictures, which takes half of the time of a small one; see `drawn`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in PICTURES:
            if (place := f"pycls_fast.train.{module}") in sys.modules:
                patch.setattr(f"{place}.{name}", lambda *arguments: None)
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn."""
    from pycls_fast.train import pictures

    for module, name in PICTURES:
        monkeypatch.setattr(f"pycls_fast.train.{module}.{name}", getattr(pictures, name))


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP ends processes, those that the test starts as well; under nohup it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts processes that end with the test."""
    processes = Started()
    yield processes
    processes.end()


Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Typed]:
    """Runs `pycls-fast WORDS` in this process: its status, what it printed, and on standard error."""

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["pycls-fast", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    yield run
    GlobalHydra.instance().clear()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as class folders."""
    folder = tmp_path_factory.mktemp("digits") / "images"
    write_digits(folder)
    return folder
