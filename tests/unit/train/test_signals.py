"""Who asks a run to stop, when that is obeyed, and what is said."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from pycls_fast.config import load_config
from pycls_fast.errors import UserError, end_import
from pycls_fast.train import signals, train
from pycls_fast.train.signals import stop_requests
from tests.factories import config_of

SMALL = ("model.width=32", "model.depth=1", "model.mlp_width=32", "data.image_size=8", "model.patch_size=2")
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the tests themselves were started under."""
    for name in ("SUBMITIT_EXECUTOR", "SUBMITIT_PREEMPT_SIGNAL", "SLURM_JOB_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_is_answered_at_once(capfd: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    with stop_requests() as stop:
        stop.training = True
        send(number)
        assert stop.name == number.name
        (line,) = capfd.readouterr().err.split("\n")[1:-1]
        assert line.startswith(f"{number.name}: stopping when this step is done and saved")
        send(signal.SIGTERM)
        assert (stop.name, capfd.readouterr().err) == (number.name, "")
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize("finished", [False, True])
def test_a_second_sigterm_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *, finished: bool
) -> None:
    """Not one that comes in the same moment: `timeout` signals the process and its group."""
    with stop_requests() as stop:
        stop.training, stop.finished = True, finished
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        monkeypatch.setattr(signals, "_ECHO_SECONDS", 0.0)
        with pytest.raises(SystemExit, match="143"):
            send(signal.SIGTERM)
    assert capfd.readouterr().err.endswith("\ninterrupted: SIGTERM again ended this at once\n")


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_second_one_is_not_lost_in_a_destructor(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int, ending: type[BaseException]
) -> None:
    """Python prints a traceback of what is raised there, and goes on."""

    class Dying:
        def __del__(self) -> None:
            send(number)

    monkeypatch.setattr(signals, "_ECHO_SECONDS", 0.0)

    def lose_it() -> None:
        Dying()
        time.sleep(30)

    with stop_requests() as stop:
        stop.training = True
        send(number)
        with pytest.raises(ending):
            lose_it()
    assert "Traceback" not in capfd.readouterr().err


def test_who_waits_for_data_obeys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several ranks later: a batch that is only slow lets all of them finish the step and save."""
    with stop_requests() as stop:
        stop.training = True
        stop.check()
        send(signal.SIGTERM)
        with pytest.raises(signals.Stopped):
            stop.check()
        stop.check(ranks=2)
        monkeypatch.setattr(signals, "_LATE_SECONDS", 0.0)
        with pytest.raises(UserError, match=r"^SIGTERM: this rank waits for data"):
            stop.check(ranks=2)


def test_ctrl_c_before_the_training_runs_the_cleanup() -> None:
    """The tools' own handler may end the process at once."""
    signal.signal(signal.SIGINT, end_import)
    with pytest.raises(KeyboardInterrupt), stop_requests():
        send(signal.SIGINT)


def test_a_finished_training_ignores_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_requests() as stop:
        stop.training = stop.finished = True
        send(signal.SIGTERM)
        assert (stop.name, capfd.readouterr().err) == (None, "")
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_requests() as stop:
        stop.training = True
        send(signal.SIGHUP)
    assert not stop


def test_the_warning_of_a_scheduler_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all is saved, and once; submitit's handler requeues the job then and exits."""
    calls: list[int] = []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    with stop_requests() as stop:
        send(signal.SIGUSR2)
        assert calls == [signal.SIGUSR2], "nothing to save yet: requeued at once"
        stop.training = True
        # A preemption sends both; which comes first is not known.
        send(signal.SIGTERM)
        send(signal.SIGUSR2)
        send(signal.SIGUSR2)
        assert (stop.name, calls) == ("SIGTERM", [signal.SIGUSR2])
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    stop.call_launcher()
    assert calls == [signal.SIGUSR2] * 2
    # The handler has returned, so another task has to requeue the job, which this one's end might prevent.
    assert waits == [60]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_warning_of_a_batch_job(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """`#SBATCH --signal=USR1@120`, which would otherwise kill the process."""
    with stop_requests():
        assert signal.getsignal(number) == signal.SIG_DFL
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with stop_requests() as stop:
        stop.training = True
        send(number)
    assert stop.name == number.name
    stop.call_launcher()


def test_a_thread_catches_no_signals() -> None:
    """Python has no signal handlers there; the training itself works."""
    stops: list[bool] = []

    def inside() -> None:
        with stop_requests() as stop:
            stops.append(bool(stop))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert stops == [False]


@pytest.mark.parametrize("at", ["pycls_fast.train.start.build_parts", "pycls_fast.train.start.print_table"])
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))], ids=["INT", "TERM"]
)
def test_before_the_training_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Path, at: str, number: int, ends: BaseException
) -> None:
    """And leaves nothing behind, whether before or behind the files that say what the run is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(at, lambda *arguments: send(number))
    config = config_of(*SMALL, f"data.root={digits}", "runtime.progress=plain")
    with pytest.raises(type(ends)) as raised:
        train(config)
    assert raised.value.args == ends.args
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("at", "left"),
    [("open_observers", set()), ("Loop.run_to_end", {"checkpoints", "config.yaml", "environment.json", "log.txt"})],
)
def test_a_run_whose_training_begins_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Path, at: str, left: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"pycls_fast.train.loop.{at}", Mock(side_effect=UserError("key: wrong")))
    typed = [*SMALL, f"data.root={digits}", "runtime.progress=plain", "trackers=[]"]
    with pytest.raises(UserError, match="key: wrong"):
        train(load_config("vit_digits", typed))
    assert {path.name for path in tmp_path.glob("runs/*/*/*")} == left
    # What ended it is in there.
    assert all(log.read_text().endswith("error: key: wrong\n") for log in tmp_path.glob("runs/*/*/log.txt"))
    assert bool(left) == bool(list(tmp_path.iterdir()))
