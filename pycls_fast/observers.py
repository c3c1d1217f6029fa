"""What watches a run without changing it: trackers, which get its numbers, and callbacks, which get the run itself.

Only the first process calls them. An attribute whose name begins with an underscore may change; each run has its own
copy of the object.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from pycls_fast.choice import Choice
from pycls_fast.errors import DONE, INTERRUPTED, STOPPED
from pycls_fast.values import Text


class Callback(Choice, key="callbacks"):
    """Code that is called during a run with the run (`pycls_fast.train.run_state.Run`), and must not change it.

    Under strategies that shard, the network's weights are DTensors, of which this process has only its part: to gather
    the whole (`full_tensor`) it would wait forever for the others, which are not called.
    """

    name: str = ""
    """The callback."""

    def start(self, run: Any) -> None:
        """Called before the first step of this process."""

    def step(self, run: Any, record: Mapping[str, Any]) -> None:
        """Called with each `train` record of `metrics.jsonl`, every `runtime.log_every_steps` steps."""

    def evaluated(self, run: Any, record: Mapping[str, Any]) -> None:
        """Called with each `eval` record."""

    def end(self, run: Any, status: int) -> None:
        """Called at the end, also of a run that fails, with the exit status."""


class Tracker(Choice, key="trackers"):
    """Something that records the numbers of one run. A resumed run continues its run there.

    Attributes:
        remote: sends to a server, whose failure does not end training. `add` must not wait for it.
        way_out: what to do if it cannot be opened.
    """

    remote: ClassVar[bool] = False
    way_out: ClassVar[str] = ""

    name: str = ""
    """The tracker."""

    def open(self, folder: Path, settings: Mapping[str, Any], run_id: str | None, start_step: int) -> str | None:
        """Begin to record.

        Args:
            folder: the run's, whose name is the run's.
            settings: the configuration, with dotted keys.
            run_id: what this returned in an earlier process of the run; None for a new run.
            start_step: later steps that an earlier process recorded are repeated.
        """
        raise NotImplementedError

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by their names, such as `train/loss`."""
        raise NotImplementedError

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Record the exit status and the final numbers (none if the run did not finish), and close."""


class TensorBoard(Tracker, name="tensorboard"):
    """Event files, under `tensorboard/` in the run folder."""

    _writer: Any = None

    def open(self, folder: Path, settings: Mapping[str, Any], run_id: str | None, start_step: int) -> None:
        # Slow to import; only the rank that writes pays for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: int, final: Mapping[str, float]) -> None:
        # The files have no place for the state of a run.
        self._writer.close()


class WandB(Tracker, name="wandb"):
    """Weights & Biases. Entity, mode and login come from its own environment variables (WANDB_ENTITY, WANDB_MODE)."""

    remote = True
    way_out = "pip install 'pycls_fast[wandb]' and log in with `wandb login`, or set WANDB_MODE=offline"

    project: Text = "pycls_fast"
    """The project, which is created if it does not exist."""

    _run: Any = None

    def open(self, folder: Path, settings: Mapping[str, Any], run_id: str | None, start_step: int) -> str:
        import wandb

        # Not W&B's own: WANDB_RUN_ID would give every run of a sweep the same.
        run_id = run_id or secrets.token_hex(8)
        self._run = wandb.init(
            project=self.project,
            name=folder.name,
            dir=folder,
            id=run_id,
            resume="allow",
            config=dict(settings),
            allow_val_change=True,
            # A run that the calling program has open stays its own.
            reinit="create_new",
        )
        # W&B's own count of steps would refuse those that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        return run_id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def end(self, status: int, final: Mapping[str, float]) -> None:
        self._run.summary.update(dict(final))
        self._run.finish(exit_code=status)


_STATE = {DONE: "FINISHED", STOPPED: "KILLED", INTERRUPTED: "KILLED"}
# What a request may hold.
_PARAMETERS = 100


class MLflow(Tracker, name="mlflow"):
    """MLflow. The server or store comes from its own environment variables (MLFLOW_TRACKING_URI).

    It keeps the first value of each setting, also of a resumed run.
    """

    remote = True
    way_out = "pip install 'pycls_fast[mlflow]' and check MLFLOW_TRACKING_URI"

    project: Text = "pycls_fast"
    """The experiment, which is created if it does not exist."""

    _client: Any = None
    _id: str = ""
    _step: int = 0
    _sending: list[Any] = PrivateAttr(default_factory=list)

    def open(self, folder: Path, settings: Mapping[str, Any], run_id: str | None, start_step: int) -> str:
        import mlflow
        from mlflow.entities import Param

        # Not `mlflow.start_run` and `mlflow.set_experiment`: the process may have a run and an experiment of its own.
        self._client = mlflow.MlflowClient()
        if run_id is None:
            experiment = self._client.get_experiment_by_name(self.project)
            made = self._client.create_experiment(self.project) if experiment is None else experiment.experiment_id
            run = self._client.create_run(made, run_name=folder.name)
        else:
            self._client.update_run(run_id, status="RUNNING")
            run = self._client.get_run(run_id)
        self._id = run.info.run_id
        try:
            new = [Param(key, str(value)) for key, value in settings.items() if key not in run.data.params]
            for start in range(0, len(new), _PARAMETERS):
                self._client.log_batch(self._id, params=new[start : start + _PARAMETERS])
        except Exception:
            # The run would stay active there.
            self._client.set_terminated(self._id, status="FAILED")
            raise
        return self._id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._step = step
        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._sending.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def end(self, status: int, final: Mapping[str, float]) -> None:
        if final:
            self.add(self._step, final)
        try:
            for sent in self._sending:
                sent.wait()
        finally:
            # Numbers that could not be sent do not leave the run active there.
            self._client.set_terminated(self._id, status=_STATE.get(status, "FAILED"))
