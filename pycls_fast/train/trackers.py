"""The trackers and callbacks of a run, opened and called as one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pycls_fast.config.keys import flat
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, FAULT, INTERRUPTED, MISTAKE, STOPPED, UserError, first_line
from pycls_fast.observers import Callback, Tracker
from pycls_fast.parallel import World
from pycls_fast.train.folder import writing

if TYPE_CHECKING:
    from pycls_fast.train.run import Run

_TRAIN = (
    "loss",
    "lr",
    "grad_norm",
    "images_per_second",
    "data_wait_fraction",
    "memory_peak_bytes",
    "loss_scale",
)
_EVAL = ("top1", "top5", "class_top1", "loss")

_STATUS = {UserError: MISTAKE, KeyboardInterrupt: INTERRUPTED}
_START_SECONDS = 60.0
# How long `end` waits for what has not been sent, by the exit status. A stopped run may have little time left, and its
# folder stays locked meanwhile.
_END_SECONDS = {DONE: 60.0, MISTAKE: 60.0, STOPPED: 5.0}
_END_SECONDS_ELSE = 1.0


class Board:
    """The trackers and callbacks of a run, called as one; a context manager that ends them.

    Set `status` to the run's exit status before the context ends without an exception.
    """

    def __init__(
        self, *trackers: Tracker | Background, callbacks: Sequence[Callback] = (), run: Run | None = None
    ) -> None:
        self.status = FAULT
        self.trackers = list(trackers)
        self._callbacks, self._run = callbacks, run
        self._folder = Path() if run is None else run.folder.path
        self._final: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.status = next(
                (status for error_type, status in _STATUS.items() if issubclass(kind, error_type)), FAULT
            )
        # All of them, although the end of one may fail.
        with ExitStack() as stack:
            for tracker in self.trackers:
                stack.callback(tracker.end, int(self.status), self._final)
            for callback in self._callbacks:
                stack.callback(callback.end, self._run, int(self.status))

    def add(self, record: Mapping[str, Any]) -> None:
        """Record a `train` or `eval` record."""
        if record["kind"] == "train":
            values = {f"train/{name}": record[name] for name in _TRAIN if name in record}
        else:
            values = _scores(f"{record['split']}_{record['weights']}", record)
        for tracker in self.trackers:
            with writing(self._folder / tracker.name):
                tracker.add(record["step"], values)
        for callback in self._callbacks:
            (callback.step if record["kind"] == "train" else callback.evaluated)(self._run, record)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Keep the scores of `summary.json` for the end."""
        for place in ("final", "best"):
            self._final |= _scores(place, summary[place] or {})


def _scores(place: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{place}/{name}": record[name] for name in _EVAL if record.get(name) is not None}


def check_installed(config: RunConfig, world: World) -> None:
    """Check that rank 0 can import the packages of the trackers; all ranks call this.

    Raises:
        UserError: it cannot.
    """
    names = [tracker.package for tracker in config.trackers if tracker.package]
    if not names:
        return
    problems = [f"trackers: {problem}" for problem in map(_import_problem, names) if problem] if world.is_main else []
    problems = world.from_main(problems)
    if problems:
        raise UserError(*problems)


def _import_problem(name: str) -> str | None:
    missing = f"{name} is not installed: pip install -e '.[{name}]'"
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  # versions that do not fit each other fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return missing
        return f"{name} cannot be imported ({type(error).__name__}: {first_line(error)}); correct its installation"
    # Python takes any folder of this name, such as the one that W&B writes to, for a package, which has no file.
    return None if getattr(module, "__file__", None) else missing


def open_board(run: Run) -> Board:
    """Open the trackers that are configured and start the callbacks, on rank 0; all ranks call this.

    Raises:
        UserError: a remote tracker cannot start the run. A resumed run continues without it.
    """
    if any(tracker.remote for tracker in run.config.trackers):
        run.world.at("starting the tracker")
    # Each run has its own: they may remember something.
    callbacks = [callback.model_copy(deep=True) for callback in run.config.callbacks] if run.world.is_main else []
    trackers = [tracker.model_copy(deep=True) for tracker in run.config.trackers] if run.world.is_main else []
    board = Board(callbacks=callbacks, run=run if run.world.is_main else None)
    with ExitStack() as stack:
        # Ends those that are open if a later one fails.
        stack.push(board)
        problem = None
        for tracker in (tracker for tracker in trackers if tracker.remote):
            background = Background(tracker, partial(_open, run, tracker), run.display.warn)
            board.trackers.append(background)
            problem = problem or (background.wait_for_start() if run.start_step == 0 else None)
        problem = run.world.from_main(problem)
        if problem is not None:
            raise UserError(problem)
        # Last: they leave files in the folder of a run that does not start.
        for tracker in (tracker for tracker in trackers if not tracker.remote):
            with writing(run.folder.path / tracker.name):
                _open(run, tracker)
            board.trackers.append(tracker)
        for callback in callbacks:
            callback.start(run)
        stack.pop_all()
    return board


def _open(run: Run, tracker: Tracker) -> None:
    """Continue the tracker's run of an earlier process, whose id is in the run folder, or begin a new one."""
    file = run.folder.path / "tracker.json"
    ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    run_id = tracker.open(run.folder.path, flat(run.settings()), ids.get(tracker.name), run.start_step)
    if run_id is not None:
        run.folder.write_json(file.name, {**ids, tracker.name: run_id})


class Background:
    """Opens and calls a tracker in a thread, in order. After its first failure, which is one warning, it is not called
    again.

    Args:
        tracker: what is opened and called.
        opens: opens it; called in the thread.
        warn: called with a warning, in the thread of the caller.
    """

    def __init__(self, tracker: Tracker, opens: Callable[[], object], warn: Callable[[str], None]) -> None:
        self.name = tracker.name
        self._tracker, self._open, self._warn = tracker, opens, warn
        self._started = Event()
        self._failure: str | None = None
        self._reported = False
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        # A daemon, so that Python does not wait for a server that does not answer. W&B's own process still may.
        self._thread = Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """Wait until the tracker is open; returns why it cannot be opened, which is then not a warning."""
        if not self._started.wait(_START_SECONDS):
            self._failure = self._failure or self._cannot_start(_no_answer(_START_SECONDS))
        self._reported = self._failure is not None
        return self._failure

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step."""
        self._calls.put(lambda tracker: tracker.add(step, values))
        self._report("the run continues without it")

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Queue the end, and wait until everything is sent, but not for long."""
        self._calls.put(lambda tracker: tracker.end(status, final))
        self._calls.put(None)
        seconds = _END_SECONDS.get(status, _END_SECONDS_ELSE)
        if self._failure is None:
            self._thread.join(seconds)
        if self._failure is None and self._thread.is_alive():
            self._failure = self._failed(_no_answer(seconds))
        self._report("not everything was sent")

    def _work(self) -> None:
        try:
            self._open()
        except UserError as error:
            self._failure = self._failure or error.lines[0]
            return
        except Exception as error:  # noqa: BLE001  # the network's, the server's or the package's own
            self._failure = self._failure or self._cannot_start(_reason(error))
            return
        finally:
            self._started.set()
        for call in iter(self._calls.get, None):
            if self._failure is None:
                try:
                    call(self._tracker)
                except Exception as error:  # noqa: BLE001  # its network or server
                    self._failure = self._failed(_reason(error))

    def _cannot_start(self, reason: str) -> str:
        return f"trackers: {self._tracker.name} cannot start ({reason}); {self._tracker.way_out}"

    def _failed(self, reason: str) -> str:
        return f"trackers: {self._tracker.name} failed ({reason})"

    def _report(self, consequence: str) -> None:
        if self._failure is not None and not self._reported:
            self._reported = True
            self._warn(f"{self._failure}; {consequence}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _no_answer(seconds: float) -> str:
    return f"no answer for {seconds:g} s"
