"""Trackers: what W&B and MLflow get, with stand-ins for both packages."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pycls_fast.errors import DONE, FAULT, INTERRUPTED, MISTAKE, STOPPED, UserError
from pycls_fast.observers import TensorBoard
from pycls_fast.parallel.world import ALONE
from pycls_fast.train import observers, train
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.loop import Loop
from pycls_fast.train.observers import Observers, open_observers
from tests.factories import config_of
from tests.integration.runs import records
from tests.unit.train.test_loop import SMALL


@dataclass
class Seen:
    """What a package got for one run."""

    name: str
    project: str
    settings: dict[str, Any] = field(default_factory=dict)
    values: list[tuple[int, str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)


class Service:
    """A stand-in for both packages, and for MLflow's client: the runs by their ids, and what each call does first."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.runs: dict[str, Seen] = {}
        self.on_start = self.on_values = self.on_end = lambda: None

    def modules(self) -> dict[str, Any]:
        """The package's modules."""
        entities = SimpleNamespace(Param=lambda *pair: pair, Metric=lambda *values: values)
        return {self.package: SimpleNamespace(MlflowClient=lambda: self, init=self.init), "mlflow.entities": entities}

    def init(self, *, project: str, name: str, dir: Path, id: str, config: dict[str, Any], **others: Any) -> Any:  # noqa: A002
        """`wandb.init`."""
        assert others == {"resume": "allow", "reinit": "create_new", "allow_val_change": True}
        assert dir.name == name
        self.on_start()
        seen = self.runs.setdefault(id, Seen(name, project))
        seen.settings |= config

        def log(values: dict[str, float]) -> None:
            self.on_values()
            step = int(values.pop("step"))
            seen.values += [(step, key, value) for key, value in values.items()]

        def finish(exit_code: int) -> None:
            self.on_end()
            seen.states.append(exit_code)

        summary = SimpleNamespace(update=seen.final.update)
        return SimpleNamespace(log=log, finish=finish, summary=summary, define_metric=lambda name, step_metric: None)

    def get_experiment_by_name(self, name: str) -> Any:
        return None if name == "mine" else SimpleNamespace(experiment_id=name)

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.on_start()
        run_id = f"run {len(self.runs)}"
        self.runs[run_id] = Seen(run_name, experiment_id)
        return self.get_run(run_id)

    def get_run(self, run_id: str) -> Any:
        params = dict(self.runs[run_id].settings)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=SimpleNamespace(params=params))

    def update_run(self, run_id: str, status: str) -> None:
        self.on_start()
        assert status == "RUNNING"

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), synchronous: bool = True) -> Any:
        seen = self.runs[run_id]
        assert synchronous == (not metrics)
        assert len(params) <= 100
        for key, value in params:
            # As MLflow, which refuses another value.
            assert key not in seen.settings
            assert isinstance(value, str)
            seen.settings[key] = value
        for name, value, time_ms, step in metrics:
            assert time_ms > 1_700_000_000_000
            if name.startswith(("final/", "best/")):
                seen.final[name] = value
            else:
                seen.values.append((step, name, value))

        return SimpleNamespace(wait=self.on_values)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.on_end()
        self.runs[run_id].states.append(status)


@pytest.fixture(params=["wandb", "mlflow"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A stand-in for a package, which is imported in its place."""
    service = Service(request.param)
    for name, module in service.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return service


def run(service: Service, run_dir: Path, *overrides: str) -> int:
    given = [*SMALL, f"trackers=[{service.package}]", f"run_dir={run_dir}", *overrides]
    return train(config_of(*given))


@pytest.mark.slow
def test_a_run_is_recorded_and_a_resumed_one_continues(service: Service, tmp_path: Path) -> None:
    mine = f"trackers=[{{name: {service.package}, project: mine}}]"
    assert run(service, tmp_path / "one", "schedule.max_steps=3", mine) == 0
    assert run(service, tmp_path / "one") == 0
    assert run(service, tmp_path / "two") == 0
    assert [(seen.name, seen.project) for seen in service.runs.values()] == [("one", "mine"), ("two", "pycls_fast")]
    ids = [json.loads((tmp_path / name / "tracker.json").read_text()) for name in ("one", "two")]
    assert [found[service.package] for found in ids] == list(service.runs)
    seen = next(iter(service.runs.values()))
    wanted = [(r["step"], "train/loss", r["loss"]) for r in records(tmp_path / "one", "train")]
    assert len(wanted) == 6
    wanted += [(r["step"], "val_model/top1", r["top1"]) for r in records(tmp_path / "one", "eval")]
    assert sorted(value for value in seen.values if value[1] in ("train/loss", "val_model/top1")) == sorted(wanted)
    # Whatever else a record has.
    assert {"train/lr", "train/step_seconds"} <= {name for _, name, _ in seen.values}
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert (seen.final["final/top1"], seen.final["best/top1"]) == (summary["final"]["top1"], summary["best"]["top1"])
    assert seen.states == ([0, 0] if service.package == "wandb" else ["FINISHED", "FINISHED"])
    # W&B takes the new value, MLflow keeps the first one.
    assert seen.settings["schedule.max_steps"] == (None if service.package == "wandb" else "3")
    assert str(seen.settings["optim.lr"]) == "0.002"
    assert seen.settings["speed.attention"] == "sdpa"


@pytest.mark.slow
def test_each_of_several_of_a_kind_continues_its_own_run(service: Service, tmp_path: Path) -> None:
    both = f"trackers=[{{name: {service.package}, project: mine}}, {{name: {service.package}, project: ours}}]"
    for steps in (3, 6):
        assert run(service, tmp_path, f"schedule.max_steps={steps}", both) == 0
    assert [seen.project for seen in service.runs.values()] == ["mine", "ours"]
    for seen in service.runs.values():
        assert [step for step, name, _ in seen.values if name == "train/loss"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_its_failure_is_one_warning(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.on_values = Mock(side_effect=ConnectionError("no route to host\nat all"))
    assert run(service, tmp_path, "runtime.log_every_steps=1") == 0
    assert len(records(tmp_path, "train")) == 6
    (warning,) = re.findall(r"warning: (.*)", capsys.readouterr().out)
    assert warning.startswith(f"trackers: {service.package} failed (ConnectionError: no route to host); the run")
    # MLflow says it when all is done, and would keep the run active.
    (seen,) = service.runs.values()
    assert seen.states == ([] if service.package == "wandb" else ["FINISHED"])


@pytest.mark.slow
def test_a_start_that_fails_ends_a_new_run_but_not_a_resumed_one(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.on_start = fail = Mock(side_effect=PermissionError("not logged in"))
    line = f"trackers: {service.package} cannot start \\(PermissionError: not logged in\\); pip install "
    with pytest.raises(UserError, match=f"^{line}"):
        run(service, tmp_path)
    service.on_start = lambda: None
    run(service, tmp_path, "schedule.max_steps=3")
    capsys.readouterr()
    service.on_start = fail
    assert run(service, tmp_path) == 0
    assert re.search(f"warning: trackers: {service.package} failed .*not logged in", capsys.readouterr().out)


@pytest.mark.slow
def test_a_signal_is_recorded(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    do_what_is_due = Loop._do_what_is_due

    def stopped(self: Loop, done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        do_what_is_due(self, done)

    monkeypatch.setattr(Loop, "_do_what_is_due", stopped)
    assert run(service, tmp_path, "runtime.log_every_steps=1") == STOPPED
    (seen,) = service.runs.values()
    assert seen.states == [STOPPED if service.package == "wandb" else "KILLED"]
    assert not seen.final
    # A server that is gone holds nobody up.
    service.on_end = wait = Mock(side_effect=lambda: threading.Event().wait(60.0))
    monkeypatch.setattr(observers, "_STOPPED_SECONDS", 0.1)
    assert run(service, tmp_path / "again", "runtime.log_every_steps=1") == STOPPED
    assert wait.called
    assert f"warning: trackers: {service.package} does not end" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_a_finished_run_that_waits_for_its_tracker(service: Service, tmp_path: Path) -> None:
    service.on_end = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(service, tmp_path)
    assert (tmp_path / "summary.json").exists()


class Noted(TensorBoard, name="noted"):
    """A tracker that remembers how it ended."""

    _status: int | None = None

    def end(self, status: int, final: Mapping[str, float]) -> None:
        self._status = status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, DONE),
        (UserError("optim.lr: too high"), MISTAKE),
        (KeyboardInterrupt(), INTERRUPTED),
        (RuntimeError("a rank is lost"), FAULT),
    ],
)
def test_all_trackers_hear_how_a_run_ended(
    error: BaseException | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Noted, name="full"):
        def end(self, status: int, final: Mapping[str, float]) -> None:
            raise UserError("run_dir: no space left")

    trackers = (Noted(), Noted())
    monkeypatch.setattr(Observers, "start", lambda self: self.trackers.extend([trackers[0], Full(), trackers[1]]))
    run_of_rank: Any = SimpleNamespace(folder=RunFolder(tmp_path), world=ALONE)
    with suppress(UserError, KeyboardInterrupt, RuntimeError), open_observers(run_of_rank) as observers:
        if error is not None:
            raise error
        observers.status = DONE
    assert [tracker._status for tracker in trackers] == [status, status]


def test_only_rank_0_writes(service: Service, tmp_path: Path) -> None:
    config = config_of(*SMALL, f"trackers=[{service.package}]")
    world = SimpleNamespace(is_main=False, from_main=lambda value: value, at=lambda doing: None)
    run_of_rank: Any = SimpleNamespace(config=config, world=world)
    with open_observers(run_of_rank) as observers:
        observers.add({"kind": "train", "step": 1, "loss": 1.0})
    assert not service.runs
