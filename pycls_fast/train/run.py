"""A training run: its parts, their state, and the checkpoints of these."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pycls_fast import build
from pycls_fast.errors import UserError
from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.parallel import World, floating_buffers, plain_name
from pycls_fast.train import checkpoint
from pycls_fast.train.building import TrainingParts
from pycls_fast.train.display import Display
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.saving import Saver
from pycls_fast.train.state import State, split


@dataclass(kw_only=True)
class Run(TrainingParts):
    """Everything that training reads and changes."""

    world: World
    folder: RunFolder
    display: Display
    saver: Saver
    total_steps: int
    start_step: int = 0
    saved_step: int | None = None
    damaged: dict[str, str] = field(default_factory=dict)
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
        """See `build.names_id`; takes 2 s for 14 million images."""
        return build.names_id(self.sources["train"])

    def epoch(self, step: int) -> float:
        """A number of steps in epochs."""
        return step / self.steps_per_epoch

    def sync_buffers(self) -> None:
        """Average BatchNorm statistics over the ranks, those of the weight average included."""
        buffers = floating_buffers(self.network)
        if self.step.ema is not None:
            found = {id(buffer) for buffer in buffers}
            # FairScale's wrappers add prefixes to the names; the average has plain names.
            names = {plain_name(name) for name, buffer in self.network.named_buffers() if id(buffer) in found}
            buffers += [value for name, value in self.step.ema.values.items() if name in names]
        self.world.average_buffers(buffers)

    def state(self) -> State:
        """Everything that the next step depends on: tensors under the network's names in their logical shapes,
        replicated or as DTensors, sharing memory with the tensors that training changes where possible.

        All ranks call this: the compression error is averaged over them.
        """
        compression, weights, ema = self.step.wrapped.compression, self.step.weights, self.step.ema
        return {
            "model": dict(weights.state_dict()),
            "ema": None if ema is None else weights.split(ema.values),
            "optimizer": weights.optimizer_state(self.step.optimizer),
            "loss_scaler": self.step.scaler.state_dict(),
            "compression": compression.carried() if compression is not None else {},
        }

    def save(self, step: int) -> None:
        """Start writing a checkpoint, after any that is still being written; all ranks call this.

        Raises:
            UserError: the previous one could not be written.
        """
        self.finish_saving()
        if step == self.saved_step:
            return
        self.sync_buffers()
        state = {
            "step": step,
            "epoch": self.epoch(step),
            **self.state(),
            "classes": list(self.classes),
            "train_images": len(self.sources["train"]),
            "train_names": self.train_names,
            "order": build.order_name(self.config, self.sources["train"]),
            "config": self.config.model_dump(mode="json"),
            "seconds": self.seconds(),
            "world_size": self.world.size,
        }
        self.saver.save(state, step)
        self.saved_step = step
        if not self.config.runtime.checkpoint_async and not self.saver.failed:
            self.finish_saving()

    def finish_saving(self) -> bool:
        """Wait for the checkpoint that is being written and record it; returns whether there was one.

        Raises:
            UserError: it could not be written; the same on all ranks.
        """
        saved = self.saver.finish()
        if saved is not None and saved.path is not None and self.world.is_main:
            self.folder.add_record(
                "checkpoint",
                saved.step,
                self.epoch(saved.step),
                path=str(saved.path.relative_to(self.folder.path)),
                blocked_seconds=round(saved.blocked_seconds, 4),
                seconds=round(saved.seconds, 4),
            )
        return saved is not None

    def complete_saving(self, step: int, check: Callable[[int], None]) -> bool:
        """`finish_saving`; if that fails, write the state of this step instead, and wait for it.

        One write that fails on one of many ranks, for example while a file server is restarted, does not end the run.

        Args:
            step: steps done.
            check: called with the step before its state is written; raises if that should not be.

        Raises:
            UserError: that failed, too; the same on all ranks.
        """
        try:
            return self.finish_saving()
        except UserError as error:
            self.display.warn(f"{error}; saving step {step:,} instead")
            self.saved_step = None
            check(step)
            self.save(step)
            self.finish_saving()
            return True

    def seconds(self) -> float:
        """Wall time since the run began, without the time between processes."""
        return self.seconds_before + time.monotonic() - self.started

    def load_state(self, opened: checkpoint.Checkpoint) -> None:
        """Restore model, average, optimizer and loss scale in place; any number of ranks may have saved them."""
        own = {**self.state(), "optimizer": {}, "compression": {}}
        into, _ = split(own)
        optimizer = self.step.optimizer
        # FairScale's OSS has the one that updates its share inside.
        on_host = any(isinstance(each, HostOptimizer) for each in (optimizer, getattr(optimizer, "optim", None)))
        into |= opened.like(own["model"], host_optimizer=on_host)
        opened.check_fits(into)
        opened.read(into)
        state = opened.state(into)
        weights = self.step.weights
        weights.load_state_dict(state["model"])
        if self.step.ema is not None:
            self.step.ema.load(weights.join(state["ema"]))
        # Parameter groups keep this run's settings (decay, implementation); only the state tensors are loaded.
        weights.load_optimizer_state(self.step.optimizer, state["optimizer"])
        if state["loss_scaler"] and self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(state["loss_scaler"])
        if self.step.wrapped.compression is not None:
            self.step.wrapped.compression.load(state["compression"], state["step"])
