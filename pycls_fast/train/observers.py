"""The trackers and callbacks of a run, opened and called as one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pycls_fast.config.keys import flat
from pycls_fast.errors import FAULT, INTERRUPTED, MISTAKE, STOPPED, UserError, first_line
from pycls_fast.observers import Callback, Tracker
from pycls_fast.reading import read_json
from pycls_fast.train.agreement import on_main
from pycls_fast.train.display import SCORES
from pycls_fast.train.folder import writing

if TYPE_CHECKING:
    from pycls_fast.train.run_state import Run

# Keys of a training record that say when it was, not what it measured.
_WHEN = {"step", "epoch", "time"}
# A stopped run waits so long for a server.
_STOPPED_SECONDS = 15.0
_STATUS = {UserError: MISTAKE, KeyboardInterrupt: INTERRUPTED}


class Observers:
    """A run's trackers and callbacks, called as one.

    Set `status` to the run's exit status before they end. A remote tracker that fails causes one warning, and is not
    called again.
    """

    def __init__(self, run: Run) -> None:
        self.status = FAULT
        self.trackers: list[Tracker] = []
        self.callbacks: list[Callback] = []
        self._run = run
        self._final: dict[str, float] = {}

    def start(self) -> None:
        """Start those that are configured; each tracker continues its run of an earlier process, whose id is in the
        run folder, or begins a new one."""
        run = self._run
        file = run.folder.path / "tracker.json"
        # Each run has its own: they may remember something.
        self.callbacks = [callback.model_copy(deep=True) for callback in run.config.callbacks]
        trackers = [tracker.model_copy(deep=True) for tracker in run.config.trackers]
        # Remote ones first: the others leave files in the folder of a run that does not start.
        counts = Counter[str]()
        for tracker in sorted(trackers, key=lambda tracker: not tracker.remote):
            self.trackers.append(tracker)
            # There may be several of a kind, for different projects.
            counts[tracker.name] += 1
            key = tracker.name if counts[tracker.name] == 1 else f"{tracker.name} {counts[tracker.name]}"
            with self._guarded(tracker, starts=run.start_step == 0):
                ids = dict(read_json(file)) if file.is_file() else {}
                run_id = tracker.open(run.folder.path, flat(run.settings()), ids.get(key), run.start_step)
                if run_id is not None:
                    run.folder.write_json(file.name, {**ids, key: run_id})
        for callback in self.callbacks:
            callback.start(run)

    def add(self, record: Mapping[str, Any]) -> None:
        """Record a `train` or `eval` record."""
        if record["kind"] == "train":
            numbers = ((name, value) for name, value in record.items() if isinstance(value, int | float))
            values = {f"train/{name}": value for name, value in numbers if name not in _WHEN}
        else:
            values = _scores(f"{record['split']}_{record['weights']}", record)
        for tracker in list(self.trackers):
            with self._guarded(tracker):
                tracker.add(record["step"], values)
        for callback in self.callbacks:
            (callback.step if record["kind"] == "train" else callback.evaluated)(self._run, record)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Keep the scores of `summary.json` for the end."""
        for place in ("final", "best"):
            self._final |= _scores(place, summary[place] or {})

    def end(self) -> None:
        """End all of them, even if ending one fails."""
        with ExitStack() as stack:
            for tracker in self.trackers:
                stack.callback(self._end, tracker)
            for callback in self.callbacks:
                stack.callback(callback.end, self._run, int(self.status))

    def _end(self, tracker: Tracker) -> None:
        def end() -> None:
            with self._guarded(tracker):
                tracker.end(int(self.status), self._final)

        if self.status != STOPPED or not tracker.remote:
            end()
            return
        # Whoever stops a run soon kills it, and it may have to requeue its job before.
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_STOPPED_SECONDS)
        if thread.is_alive():
            self._run.display.warn(f"trackers: {tracker.name} does not end, and may lack the last numbers")

    @contextmanager
    def _guarded(self, tracker: Tracker, *, starts: bool = False) -> Iterator[None]:
        """Turn what a remote tracker raises into a warning, or into a `UserError` if it is only about to start."""
        run = self._run
        if not tracker.remote:
            with writing(run.folder.path / tracker.name):
                yield
            return
        try:
            yield
        except Exception as error:  # its network's, its server's or its own
            if starts and isinstance(error, UserError):
                raise
            self.trackers.remove(tracker)
            reason = f"{type(error).__name__}: {first_line(error)}"
            if starts:
                raise UserError(f"trackers: {tracker.name} cannot start ({reason}); {tracker.way_out}") from error
            run.display.warn(f"trackers: {tracker.name} failed ({reason}); the run continues without it")


def _scores(place: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{place}/{name}": record[name] for name in (*SCORES, "loss") if record.get(name) is not None}


@contextmanager
def open_observers(run: Run) -> Iterator[Observers]:
    """A context with the trackers that are configured and the callbacks, started, on rank 0; all ranks call this. A
    `UserError` if a remote tracker cannot start the run; a resumed run continues without it."""
    run.world.at("starting trackers and callbacks")
    observers = Observers(run)
    try:
        on_main(run.world, observers.start)
        yield observers
    except BaseException as error:
        observers.status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), FAULT)
        raise
    finally:
        observers.end()
