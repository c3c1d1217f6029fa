"""One training step: no rank checks, no timing, no printing, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Mixer, Prepare
from pycls_fast.losses import LossFunction, Targets
from pycls_fast.network import Network
from pycls_fast.optim.ema import Ema
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.optim.owned_weights import OwnedWeights, local
from pycls_fast.parallel.parallel_model import ParallelModel
from pycls_fast.seeds import generators, microbatch_seed, seed_generators
from pycls_fast.train.distill import Distillation
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.watchdog import Watchdog


@dataclass
class Step:
    """The parts of a step. `wrapped` is the network under its strategy, `weights` are what the optimizer owns, and
    `parameters` the trainable ones of these."""

    network: Network
    wrapped: ParallelModel
    weights: OwnedWeights
    parameters: Sequence[nn.Parameter]
    prepare: Prepare
    mixer: Mixer | None
    loss: LossFunction
    autocast: Callable[[], AbstractContextManager[None]]
    scaler: torch.amp.GradScaler
    optimizer: Optimizer
    schedule: Callable[[int], float]
    clip_norm: float | None
    clip_foreach: bool
    ema: Ema | None
    seed: int
    rank: int
    accumulation_steps: int = 1
    watchdog: Watchdog | None = None
    distillation: Distillation | None = None
    sets_LK: Tensor | None = None
    """What labels stand for, if images have several (`build.label_sets`)."""

    def __call__(self, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
        """Train on the `accumulation_steps` microbatches of one step, counted from 0.

        Each is taken when its turn comes, so that the next one is loaded while the device computes.
        """
        set_lr(self.optimizer, self.schedule(step))
        self._add_all_gradients(step, microbatches, metrics)
        metrics.add_facts(self._facts())
        grad_norm = self._update()
        if self.ema is not None:
            self.ema.update(step)
        metrics.add_step(grad_norm)

    def _add_all_gradients(self, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
        parts = self.accumulation_steps
        for position, batch in zip(range(parts), microbatches, strict=True):
            images_BCHW, targets = self.inputs(step, position, batch)
            is_last = position == parts - 1
            loss = self._add_gradients(images_BCHW, targets, parts=parts, is_last=is_last)
            if self.watchdog is not None:
                self.watchdog.check(step, loss)
            self._take_gradients(is_last)
            metrics.add_loss(loss)

    def _add_gradients(self, images_BCHW: Tensor, targets: Targets, *, parts: int = 1, is_last: bool = True) -> Tensor:
        """Forward and backward pass of one of `parts` microbatches; returns its share of the loss."""
        with self.wrapped.exchange(is_last):
            with self.autocast():
                logits_BK = self.wrapped.forward(images_BCHW)
            loss = self._loss(logits_BK, targets, images_BCHW, self.network.auxiliary_loss()) / parts
            self.scaler.scale(loss).backward()
        return loss

    def _loss(self, logits_BK: Tensor, targets: Targets, images_BCHW: Tensor, auxiliary: Tensor | None) -> Tensor:
        own_BK, taught_BK = logits_BK.unbind(1) if logits_BK.ndim == 3 else (logits_BK, logits_BK)
        loss = self.loss(own_BK, targets)
        if self.distillation is not None:
            loss = self.distillation(loss, taught_BK, images_BCHW)
        return loss if auxiliary is None else loss + auxiliary

    def _facts(self) -> Mapping[str, Tensor]:
        return self.network.facts()

    def _take_gradients(self, is_last: bool = True) -> None:
        if is_last or self.wrapped.taken_every_microbatch:
            self.weights.take_gradients()

    def _update(self) -> Tensor:
        """Update the weights and free the gradients; returns the gradients' norm."""
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.wrapped.clip(self.parameters, self.clip_norm, foreach=self.clip_foreach)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.weights.copy_to_model()
        return grad_norm

    def labels(self, batch: Batch) -> Tensor:
        """A microbatch's labels as `Targets` has them: where images have several, one value per class."""
        return batch.labels_B if self.sets_LK is None else self.sets_LK[batch.labels_B]

    def inputs(self, step: int, position: int, batch: Batch) -> tuple[Tensor, Targets]:
        """A microbatch as the network and the loss get it; the same each time that it is called."""
        # Drop-path, mixing and erasing depend on where in the run they happen, not on what ran before.
        seed = microbatch_seed(self.seed, step=step, position=position, rank=self.rank)
        seed_generators(seed, batch.labels_B.device)
        images_BCHW = self.prepare(batch, seed)
        lam = batch.lam
        if lam is None and self.mixer is not None:
            images_BCHW, lam = self.mixer(images_BCHW, seed)
        labels_B = self.labels(batch)
        if lam is None or lam == 1.0:
            return images_BCHW, Targets(labels_B)
        return images_BCHW, Targets(labels_B, labels_B.roll(1, 0), lam)

    def persistent_tensors(self) -> list[Tensor]:
        """The tensors that stay from step to step: weights, masters, buffers, average, optimizer state."""
        average = {} if self.ema is None else self.ema.values
        state = tree_leaves([dict(self.optimizer.state), dict(average), self.weights.live()])
        tensors = (*self.network.parameters(), *self.network.buffers(), *state)
        parts = (local(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        return [part for part in parts if type(part) in (Tensor, nn.Parameter)]


@dataclass
class PipelinedStep(Step):
    """A `Step` whose microbatches travel through `parallel.pipeline.Pipeline`. Every stage prepares all of them: the
    first one needs the images, the last one the targets."""

    def _add_all_gradients(self, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
        pipeline = self.wrapped.pipeline
        assert pipeline is not None
        inputs, states = [], []
        for position, batch in zip(range(self.accumulation_steps), microbatches, strict=True):
            images_BCHW, targets = self.inputs(step, position, batch)
            if not pipeline.takes_images and self.distillation is None:
                # Of a later stage only the shape is asked for.
                images_BCHW = images_BCHW.new_zeros(()).expand(images_BCHW.shape)
            inputs.append((images_BCHW, targets))
            states.append([(each, each.get_state()) for each in generators(batch.labels_B.device)])
        images = [images_BCHW for images_BCHW, _ in inputs]
        losses = torch.zeros(len(images), dtype=torch.get_default_dtype(), device=images[0].device)

        # A scaler begins with its first loss, which only the last stage has.
        self.scaler.scale(losses)

        def loss_of(logits_BK: Tensor, auxiliary: Tensor | None, position: int) -> Tensor:
            images_BCHW, targets = inputs[position]
            loss = self._loss(logits_BK, targets, images_BCHW, auxiliary) / self.accumulation_steps
            losses[position] = loss.detach()
            return self.scaler.scale(loss)

        if pipeline.run(images, loss_of, states, self.autocast) and self.watchdog is not None:
            self.watchdog.forget()
        for loss in pipeline.from_last(losses):
            if self.watchdog is not None:
                self.watchdog.check(step, loss)
            metrics.add_loss(loss)
        self._take_gradients()

    def _facts(self) -> Mapping[str, Tensor]:
        assert self.wrapped.pipeline is not None
        return {name: self.wrapped.pipeline.sum(value) for name, value in self.network.facts().items()}
