"""MLflow. The server or store comes from its own environment variables (`MLFLOW_TRACKING_URI`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycls_fast.errors import DONE, INTERRUPTED, STOPPED

_STATE = {DONE: "FINISHED", STOPPED: "KILLED", INTERRUPTED: "KILLED"}
# What a request may hold.
_PARAMETERS = 100


class MLflow:
    """A run of MLflow; see `Tracker`.

    Args:
        run_dir: the run folder, whose name is the run's.
        project: the experiment; created if it does not exist.
        settings: the configuration, with dotted keys. MLflow keeps the first value of each, also of a resumed run.
        run_id: of the run to continue; None for a new one.
    """

    way_out = "check MLFLOW_TRACKING_URI"

    def __init__(self, run_dir: Path, *, project: str, settings: Mapping[str, Any], run_id: str | None) -> None:
        import mlflow

        # Not `mlflow.start_run` and `mlflow.set_experiment`: the process may have a run and an experiment of its own.
        self._client = mlflow.MlflowClient()
        if run_id is None:
            run = self._client.create_run(self._experiment(project), run_name=run_dir.name)
        else:
            self._client.update_run(run_id, status="RUNNING")
            run = self._client.get_run(run_id)
        self.id: str = run.info.run_id
        self._step = 0
        try:
            self._log_settings({key: value for key, value in settings.items() if key not in run.data.params})
        except Exception:
            # The run would stay active there.
            self._client.set_terminated(self.id, status="FAILED")
            raise

    def _experiment(self, name: str) -> str:
        """The id of an experiment, which is created if it does not exist."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except MlflowException:
                # Another run may have created it since.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return found.experiment_id

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        new = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(new), _PARAMETERS):
            self._client.log_batch(self.id, params=new[start : start + _PARAMETERS])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        from mlflow.entities import Metric

        self._step = step
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Send the final numbers and the state."""
        if final:
            self.add(self._step, final)
        self._client.set_terminated(self.id, status=_STATE.get(status, "FAILED"))
