"""One training step. No rank checks, no timing, no printing, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.counter import counter_seed
from pycls_fast.data import Batch, ElementMixer, Mixer, Prepare
from pycls_fast.losses import Loss, Targets
from pycls_fast.optim import Ema, MasterWeights, Schedule, set_lr
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.watchdog import Watchdog


@dataclass(frozen=True)
class Step:
    """The parts of a step. `forward` is the wrapped model, `parameters` are what the optimizer owns."""

    forward: nn.Module
    parameters: Sequence[nn.Parameter]
    prepare: Prepare
    mixer: Mixer | ElementMixer | None
    loss: Loss
    autocast: Callable[[], AbstractContextManager[None]]
    scaler: torch.amp.GradScaler
    optimizer: Optimizer
    schedule: Schedule
    clip_norm: float | None
    clip_foreach: bool
    ema: Ema | None
    seed: int
    rank: int
    masters: MasterWeights | None = None
    watchdog: Watchdog | None = None

    def __call__(self, step: int, microbatches: Sequence[Batch], metrics: TrainMetrics) -> None:
        """Train on the microbatches of one step, counted from 0."""
        set_lr(self.optimizer, self.schedule(step))
        for position, batch in enumerate(microbatches):
            is_last = position == len(microbatches) - 1
            # Drop-path, mixing and erasing depend on where in the run they happen, not on what ran before.
            seed = counter_seed(self.seed, step, position, self.rank)
            torch.manual_seed(seed)
            images_BCHW, targets = self._inputs(batch, seed)
            with self._reduce_gradients(is_last):
                with self.autocast():
                    logits_BK = self.forward(images_BCHW)
                loss = self.loss(logits_BK, targets) / len(microbatches)
                self.scaler.scale(loss).backward()
            if self.watchdog is not None:
                self.watchdog.check(step, loss)
            if self.masters is not None and self._is_reduced(is_last):
                self.masters.take_gradients()
            metrics.add_loss(loss)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not None:
            self.masters.copy_to_model()
        if self.ema is not None:
            self.ema.update(step)
        metrics.add_step(grad_norm)

    def _inputs(self, batch: Batch, seed: int) -> tuple[Tensor, Targets]:
        images_BCHW = self.prepare(batch)
        if self.mixer is None:
            return images_BCHW, Targets(batch.labels_B)
        images_BCHW, mixed = self.mixer(images_BCHW, seed)
        labels_B, mixed_B, lam = mixed.labels(batch.labels_B)
        is_mixed = isinstance(lam, Tensor) or lam < 1.0
        return images_BCHW, Targets(labels_B, mixed_B if is_mixed else None, lam)

    def _reduce_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        """Ranks exchange gradients once a step, with the last microbatch."""
        no_sync = getattr(self.forward, "no_sync", None)
        return nullcontext() if is_last or no_sync is None else no_sync()

    def _is_reduced(self, is_last: bool) -> bool:
        """Whether the gradients are final: one rank adds up microbatches in the masters' format, several in their own,
        because they exchange what has been added up."""
        return is_last or not hasattr(self.forward, "no_sync")

    def _clip(self) -> Tensor:
        """Scale the gradients to `clip_norm` at most; returns their norm before that."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=self.clip_foreach)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm, foreach=self.clip_foreach)
        return norm
