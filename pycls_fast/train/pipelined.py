"""The training step of a network that is cut into stages: all microbatches run together, in a schedule's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pycls_fast.data.batch import Batch
from pycls_fast.seeds import generators
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.step import Step


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
            if not pipeline.takes_images and self.teacher is None:
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
