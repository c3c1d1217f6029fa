"""The trackers of a run, opened and called as one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pycls_fast.config.keys import flat
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import FAULT, INTERRUPTED, MISTAKE, UserError, first_line
from pycls_fast.parallel import World
from pycls_fast.train.trackers.background import Background, Tracker
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
_STATUS = {UserError: MISTAKE, KeyboardInterrupt: INTERRUPTED}


class Board:
    """The trackers of a run, called as one; a context manager that ends them.

    Set `status` to the run's exit status before the context ends without an exception.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self.status = FAULT
        self._trackers = list(trackers)
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
            for tracker in self._trackers:
                stack.callback(tracker.end, int(self.status), self._final)

    def include(self, tracker: Tracker) -> None:
        """Call this tracker, too."""
        self._trackers.append(tracker)

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


def _scores(place: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {f"{place}/{name}": record[name] for name in _EVAL if record.get(name) is not None}


def check_installed(config: RunConfig, world: World) -> None:
    """Check that rank 0 can import the package of `runtime.tracker`; all ranks call this.

    Raises:
        UserError: it cannot.
    """
    name = config.runtime.tracker
    if name == "none":
        return
    problem = world.from_main(_import_problem(name) if world.is_main else None)
    if problem is not None:
        raise UserError(f"runtime.tracker: {problem}")


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
    """Open the trackers that are configured, on rank 0; all ranks call this.

    Raises:
        UserError: the tracker cannot start the run. A resumed run continues without it.
    """
    board, runtime = Board(), run.config.runtime
    with ExitStack() as stack:
        # Ends those that are open if a later one fails.
        stack.push(board)
        problem = None
        if runtime.tracker != "none":
            run.world.at("starting the tracker")
        if run.world.is_main and runtime.tracker != "none":
            way_out = _TRACKERS[runtime.tracker].way_out
            background = Background(partial(_open, run), runtime.tracker, way_out, run.display.warn)
            board.include(background)
            problem = background.wait_for_start() if run.start_step == 0 else None
        problem = run.world.from_main(problem)
        if problem is not None:
            raise UserError(problem)
        # Last: it leaves files in the folder of a run that does not start.
        if run.world.is_main and runtime.tensorboard:
            board.include(TensorBoard(run.folder.path, run.start_step))
        stack.pop_all()
    return board


def _open(run: Run) -> Tracker:
    """The tracker's run: the one of an earlier process, whose id is in the run folder, or a new one."""
    runtime, file = run.config.runtime, run.folder.path / "tracker.json"
    ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    tracker = _TRACKERS[runtime.tracker](
        run.folder.path, project=runtime.tracker_project, settings=flat(run.settings()), run_id=ids.get(runtime.tracker)
    )
    run.folder.write_json(file.name, {**ids, runtime.tracker: tracker.id})
    return tracker
