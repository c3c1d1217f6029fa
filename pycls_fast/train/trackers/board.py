"""The trackers of a run, opened and called as one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError, first_line
from pycls_fast.exit_status import FAULT, INTERRUPTED, MISTAKE
from pycls_fast.parallel import World
from pycls_fast.train.resume import flat
from pycls_fast.train.trackers.background import Background
from pycls_fast.train.trackers.mlflow import MLflow
from pycls_fast.train.trackers.tensorboard import TensorBoard
from pycls_fast.train.trackers.wandb import WandB

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

# By `runtime.tracker`, which is also the name of the package.
_TRACKERS: dict[str, type[WandB] | type[MLflow]] = {"wandb": WandB, "mlflow": MLflow}


class Tracker(Protocol):
    """Something that records the numbers of one run."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by their names, such as `train/loss`."""

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Record the exit status and the final numbers (none if the run did not finish), and close."""


class Board:
    """The trackers of a run, called as one; a context manager that ends them.

    Set `status` to the run's exit status before the context ends without an exception.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self.status = FAULT
        self._trackers = trackers
        self._final: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.status = next((status for of, status in _STATUS.items() if issubclass(kind, of)), FAULT)
        for tracker in self._trackers:
            tracker.end(int(self.status), self._final)

    def add(self, record: Mapping[str, Any]) -> None:
        """Record a `train` or `eval` record."""
        if record["kind"] == "train":
            values = {f"train/{name}": record[name] for name in _TRAIN if name in record}
        else:
            values = _scores(f"{record['split']}_{record['weights']}", record)
        for tracker in self._trackers:
            tracker.add(record["step"], values)

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Keep the scores of `summary.json` for the end."""
        for place in ("final", "best"):
            self._final |= _scores(place, summary[place] or {})


_STATUS = {UserError: MISTAKE, KeyboardInterrupt: INTERRUPTED}


def _scores(place: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{place}/{name}": record[name] for name in _EVAL if record.get(name) is not None}


def check_installed(config: RunConfig, world: World) -> None:
    """Check that rank 0 has the package of `runtime.tracker`; all ranks call this.

    Raises:
        UserError: it has not.
    """
    name = config.runtime.tracker
    if name != "none" and not world.from_main(world.is_main and _is_installed(name)):
        raise UserError(f"runtime.tracker: {name} is not installed: pip install -e '.[{name}]'")


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def open_board(run: Run) -> Board:
    """Open the trackers that are configured, on rank 0; all ranks call this.

    Raises:
        UserError: the tracker cannot start the run. A resumed run continues without it.
    """
    runtime, trackers = run.config.runtime, list[Tracker]()
    problem = None
    if run.world.is_main and runtime.tensorboard:
        trackers.append(TensorBoard(run.folder.path, run.start_step))
    if run.world.is_main and runtime.tracker != "none":
        try:
            trackers.append(Background(_open(run), runtime.tracker, run.display.warn))
        except Exception as error:  # noqa: BLE001  # the network's, the server's or the package's own
            why, way_out = f"{type(error).__name__}: {first_line(error)}", _TRACKERS[runtime.tracker].way_out
            problem = f"runtime.tracker: {runtime.tracker} cannot start ({why}); {way_out}"
    problem = run.world.from_main(problem)
    if problem is not None and run.start_step == 0:
        raise UserError(problem)
    if problem is not None:
        run.display.warn(f"{problem}; the run continues without it")
    return Board(*trackers)


def _open(run: Run) -> Tracker:
    """The tracker's run: the one of an earlier process, whose id is in the run folder, or a new one."""
    runtime, file = run.config.runtime, run.folder.path / "tracker.json"
    ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    tracker = _TRACKERS[runtime.tracker](
        run.folder.path, project=runtime.tracker_project, settings=flat(run.settings()), id=ids.get(runtime.tracker)
    )
    run.folder.write_json(file.name, {**ids, runtime.tracker: tracker.id})
    return tracker
