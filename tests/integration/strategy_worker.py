"""Trains a list of cases one after another in the same ranks; what each ends with is written whole by rank 0.

    torchrun --nproc_per_node N tests/integration/strategy_worker.py CASES.json FOLDER cpu|cuda

CASES.json: {name: {"config_name": ..., "overrides": [...], "save": false, "evaluate": true,
"double": false}}. Writes FOLDER/NAME.pt with the parameters, the average, the optimizer's state, losses, gradient norms
and the evaluations; "began" is what a case had before its first step. With "save" a checkpoint is left in
FOLDER/runs/NAME; with "double" all that is float32 is float64. On CUDA steps after the second of a case may not wait
for the device, but for those that ask it whether gradients were finite, as FairScale's optimizer does.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.tensor import DTensor

from pycls_fast import build
from pycls_fast.build.device import DTYPES
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.data.prepare import to_device
from pycls_fast.models import resnet
from pycls_fast.parallel.launch import _grid, divide, start_world
from pycls_fast.parallel.world import World
from pycls_fast.strategies import Parallel
from pycls_fast.train.display import Display
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.observers import Observers
from pycls_fast.train.run_state import Run
from pycls_fast.train.start import start_run
from pycls_fast.train.validation import Evaluations
from tests.integration.fairscale_cpu import play_cuda


def whole(value: Any) -> Any:
    """Nested containers with whole tensors on the CPU in place of shards; all ranks call this."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The stages' states in one, what they have in common from the first rank."""
    first = states[0]
    for key, value in first.items():
        if isinstance(value, dict):
            theirs = [state[key] for state in states]
            first[key] = {name: item for their in reversed(theirs) for name, item in their.items()}
            if key == "began":
                first[key] = merged(theirs)
    return first


def run_case(config: RunConfig, world: World, *, save: bool = False, evaluate: bool = True) -> dict[str, Any]:
    """Train the steps of the configuration and evaluate; the same on all ranks, but for the evaluations."""
    with start_run(config, world, Display(speaks=False, mode="plain")) as run:
        return train_steps(run, save=save, evaluate=evaluate)


def train_steps(run: Run, *, save: bool, evaluate: bool) -> dict[str, Any]:
    """See `run_case`."""
    config, world = run.config, run.world
    began = whole(run.state())
    metrics = TrainMetrics(world.device)
    losses, norms = [], []
    loader = build.train_loader(
        config, run.sources["train"], world, run.switches, start_step=run.start_step, steps=run.total_steps
    )
    on_cuda = world.device.type == "cuda"
    asks = run.step.wrapped.optimizer is not None and run.step.scaler.is_enabled()
    with closing(to_device(loader, world.device, mode="prefetch" if on_cuda else "blocking")) as batches:
        for step in range(run.start_step, run.total_steps):
            microbatches = list(islice(batches, config.optim.microbatches))
            if on_cuda and not asks and step >= run.start_step + 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                run.step(step, microbatches, metrics)
            finally:
                if on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
            numbers = metrics.read(world)
            losses.append(numbers["loss"])
            norms.append(numbers["grad_norm"])
    run.sync_buffers()
    state = {**run.state(), "began": began, "losses": losses, "grad_norms": norms}
    if save:
        run.save(run.total_steps)
        run.saver.finish()
    evaluations = Evaluations(run, Observers(run), after_batch=lambda: None)
    # What was gathered for the average must not be taken for the weights the second time.
    for _ in range(2 * evaluate):
        evaluations.evaluate(run.total_steps)
    state["evaluations"] = list(run.folder.records("eval")) if world.is_main else []
    return whole(state)


_WORLDS: dict[tuple[Any, ...], World] = {}


def divided(world: World, config: RunConfig) -> World:
    """The same ranks with the meshes of a configuration; a process cannot leave and join the same ranks again."""
    own = config.parallel
    degrees = (own.tensor_degree, own.expert_degree, own.pipeline_degree)
    key = (own.facts.has_mesh, *_grid(own, world.size), *degrees)
    if key not in _WORLDS:
        _WORLDS[key] = divide(world, own)
    return _WORLDS[key]


def run_cases(cases: dict[str, Any], folder: Path, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """One after another; the first fault ends the process."""
    torch.set_num_threads(1)
    # Those of another launch, if this is the process of the tests.
    _WORLDS.clear()
    # One rank has a process group only for a strategy that needs one.
    shares = any(f"parallel={name}" in case["overrides"] for case in cases.values() for name in ("ddp", "fsdp", "hsdp"))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        start_world(device, Parallel(name="fsdp" if shares else "auto")) as world,
    ):
        # Two blocks of the ResNet show all that eight do. Undone: with one rank this is the process of the tests.
        monkeypatch.setitem(resnet.LAYOUTS, 18, (resnet.BasicBlock, (1, 1)))
        for name, case in cases.items():
            overrides = [*case["overrides"], f"run_dir={folder / 'runs' / name}"]
            config = load_config(case["config_name"], overrides)
            here = divided(world, config)
            if case.get("double", False):
                monkeypatch.setitem(DTYPES, "float32", torch.float64)
                torch.set_default_dtype(torch.float64)
            try:
                state = run_case(config, here, save=case.get("save", False), evaluate=case.get("evaluate", True))
                if here.pipeline > 1:
                    state = merged(here.gather(state))
            except Exception:  # noqa: BLE001  # the other ranks wait for this one
                print(f"case {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            finally:
                monkeypatch.setitem(DTYPES, "float32", torch.float32)
                torch.set_default_dtype(torch.float32)
            if world.is_main:
                torch.save(state, folder / f"{name}.pt")


if __name__ == "__main__":
    on: Any = sys.argv[3]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if on == "cpu":
            play_cuda(monkeypatch)
        run_cases(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), on)
