"""A training run: its parts, their state, and the checkpoints of these."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from pycls_fast.data.sampling import order_of
from pycls_fast.errors import refusing
from pycls_fast.files import STATE, step_of
from pycls_fast.network import Network
from pycls_fast.optim.optimizers import HostOptimizer
from pycls_fast.parallel.fairscale import plain_name
from pycls_fast.parallel.world import World, floating_buffers
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import State, split
from pycls_fast.train.display import Display
from pycls_fast.train.evaluate import DamagedImages, Scorer
from pycls_fast.train.folder import DAMAGED_IMAGE, RunFolder
from pycls_fast.train.resolving import Resolved
from pycls_fast.train.saving import Saver
from pycls_fast.train.step import Step


@dataclass
class Parts(Resolved):
    """What training needs, built."""

    step: Step
    new_head: bool
    """Whether the weights left the head without values."""

    @property
    def network(self) -> Network:
        return self.step.network

    @property
    def fits_head(self) -> bool:
        """Whether training begins by fitting a new head to features."""
        return self.config.begins_with_probe and self.new_head


@dataclass(kw_only=True)
class Run(Parts):
    """Everything that training reads and changes."""

    world: World
    folder: RunFolder
    display: Display
    saver: Saver
    total_steps: int
    start_step: int = 0
    saved_step: int | None = None
    # Wall time of earlier processes of this run.
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the model's outputs."""
        return self.sources["train"].classes

    @property
    def finished(self) -> bool:
        """Whether the folder already held the last step: then its settings and records stay as they are."""
        return self.saved_step is not None and self.start_step >= self.total_steps

    def settings(self) -> dict[str, Any]:
        """The values of `config.yaml`: the configuration with the switches that are used and the run's folder."""
        values = {**self.config.model_dump(mode="json"), "run_dir": str(self.folder.path)}
        values["speed"] = self.switches.model_dump()
        return values

    @cached_property
    def train_names(self) -> str:
        """See `Images.names_id`."""
        return self.sources["train"].names_id()

    @cached_property
    def damaged(self) -> DamagedImages:
        return DamagedImages(self.config.data.max_damaged, self.world, self.display, self._record_damaged)

    def _record_damaged(self, step: int, name: str, reason: str) -> None:
        # An earlier process may have.
        if self.world.is_main and name not in self.folder.damaged_images():
            self.add_record("event", step, event=DAMAGED_IMAGE, name=name, reason=reason)

    def scorer(self, after_batch: Callable[[], None]) -> Scorer:
        return Scorer(
            config=self.config,
            wrapped=self.step.wrapped,
            world=self.world,
            switches=self.switches,
            display=self.display,
            damaged=self.damaged,
            after_batch=after_batch,
        )

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch

    def add_record(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """`RunFolder.add_record` with the step's epoch; on the main rank."""
        return self.folder.add_record(kind, step, self.epoch(step), **values)

    def saved_weights(self) -> list[Tensor]:
        """This rank's part of the weights and buffers that are saved."""
        return [*self.network.parameters(), *self.step.weights.live().values()]

    def sync_buffers(self) -> None:
        """Average BatchNorm statistics over the ranks, those of the weight average included."""
        buffers = floating_buffers(self.network)
        if (ema := self.step.ema) is not None:
            found = {id(buffer) for buffer in buffers}
            # FairScale's wrappers add prefixes to the names; the average has plain names.
            names = {plain_name(name) for name, buffer in self.network.named_buffers() if id(buffer) in found}
            buffers += [value for name, value in ema.values.items() if name in names]
        self.world.average_buffers(buffers)

    def state(self) -> State:
        """Everything that the next step depends on: tensors under the network's names in their logical shapes,
        replicated or as DTensors, sharing memory with the tensors that training changes where possible.

        All ranks call this.
        """
        step, weights = self.step, self.step.weights
        return {
            "model": dict(weights.state_dict()),
            "ema": None if step.ema is None else weights.split(step.ema.values),
            "optimizer": weights.optimizer_state(step.optimizer),
            "loss_scaler": step.scaler.state_dict(),
        }

    def save(self, step: int) -> None:
        """Start writing a checkpoint; `saver.finish` has been called for the one before. All ranks call this."""
        self.sync_buffers()
        state = {
            "step": step,
            "epoch": self.epoch(step),
            **self.state(),
            "classes": list(self.classes),
            "train_images": len(self.sources["train"]),
            "train_names": self.train_names,
            "order": order_of(self.sources["train"], self.config.data)[0],
            "config": self.config.model_dump(mode="json"),
            "seconds": self.seconds(),
            "world_size": self.world.size,
        }
        self.saver.save(state, step)
        self.saved_step = step

    def record_saved(self, path: Path) -> None:
        """Record a checkpoint that is written; on the main rank."""
        if self.world.is_main:
            self.add_record("checkpoint", step_of(path), path=str(path.relative_to(self.folder.path)))

    def seconds(self) -> float:
        """Wall time since the run began, without the time between processes."""
        return self.seconds_before + time.monotonic() - self.started

    def load_state(self, saved: checkpoint.Checkpoint) -> None:
        """Restore model, average, optimizer and loss scale in place; any number of ranks may have saved them."""
        step = self.step
        own = {**self.state(), "optimizer": {}}
        into, _ = split(own)
        # FairScale's OSS has the one that updates its share inside.
        optimizers = (step.optimizer, getattr(step.optimizer, "optim", None))
        on_host = any(isinstance(each, HostOptimizer) for each in optimizers)
        into |= saved.empty_optimizer_state(own["model"], on_host=on_host)
        saved.check_fits(into, self.world)
        saved.read(into)
        what = f"{saved.path}: the checkpoint is damaged, its {STATE}"
        with refusing(what, AttributeError, LookupError, TypeError, ValueError, use="take another one"):
            state = saved.state(into)
            step.weights.load_state_dict(state["model"])
            if step.ema is not None:
                step.ema.load(step.weights.join(state["ema"]))
            # Parameter groups keep this run's settings (decay, implementation); only the state tensors are loaded.
            # What is of another stage of a pipeline is not here.
            here = {name: values for name, values in state["optimizer"].items() if name in own["model"]}
            step.weights.load_optimizer_state(step.optimizer, here)
            step.scaler.load_state_dict(state["loss_scaler"])
