"""The whole training step as one CUDA graph: recorded once, replayed without the host.

After NVIDIA and PyTorch, Accelerating PyTorch with CUDA Graphs (2021): the graph reads fixed memory, into which each
step's images, labels, mixing share, learning rate and EMA share are written before it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError, first_line
from pycls_fast.losses import Targets
from pycls_fast.models import DropPath
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.parallel import World
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.step import Step

WARM_UP = 3
"""Steps that run without the graph, so that libraries choose kernels, code compiles and optimizer state is made."""

Action = Callable[[], None]


class CudaRecorder:
    """A CUDA graph, recorded on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, action: Action) -> None:
        """Run the function on the stream on which it will be recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            action()
        current.wait_stream(self._stream)

    def record(self, action: Action) -> None:
        """Call the function to capture its kernels; nothing is computed.

        Raises:
            UserError: something in the step cannot be recorded.
        """
        failure: BaseException | None = None
        try:
            # Only this thread is captured: the loader's pinning thread allocates meanwhile.
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    action()
                except BaseException as error:
                    failure = error
                    raise
        except RuntimeError as error:
            # After a failure, ending the capture fails too, with a message that hides the cause.
            cause = failure or error
            if isinstance(cause, torch.OutOfMemoryError) or not isinstance(cause, RuntimeError):
                raise cause from None
            raise UserError(
                f"speed.cuda_graphs: this step cannot be recorded ({first_line(cause)}); use speed.cuda_graphs=off"
            ) from cause

    def replay(self) -> None:
        """Run what was recorded."""
        self._graph.replay()


def make_recordable(network: nn.Module, world: World) -> None:
    """Let the network draw on the device: a replayed graph cannot draw on the host.

    Raises:
        UserError: there are several ranks.
    """
    if world.size > 1:
        raise UserError(f"speed.cuda_graphs: on is for one rank, not for {world.size}; use speed.cuda_graphs=off")
    for module in network.modules():
        if isinstance(module, DropPath):
            module.draws_on_device = True


@dataclass
class Tape:
    """The fixed memory that a recorded step reads, and the number of steps so far."""

    images_BCHW: Tensor
    labels_B: Tensor
    mixed_B: Tensor | None
    lam: Tensor
    ema_share: Tensor
    metrics: TrainMetrics
    steps: int = 0

    @classmethod
    def like(cls, images_BCHW: Tensor, targets: Targets, metrics: TrainMetrics, *, mixes: bool) -> Tape:
        """Allocate memory for inputs of these shapes; `mixes` says whether later batches may be mixed."""
        device = images_BCHW.device
        return cls(
            images_BCHW=torch.empty_like(images_BCHW),
            labels_B=torch.empty_like(targets.labels_B),
            mixed_B=torch.empty_like(targets.labels_B) if mixes else None,
            lam=torch.ones(targets.lam.shape if isinstance(targets.lam, Tensor) else (), device=device),
            ema_share=torch.zeros((), device=device),
            metrics=metrics,
        )

    def take(self, images_BCHW: Tensor, targets: Targets) -> None:
        """Write a step's inputs where the graph reads them.

        Raises:
            ValueError: inputs of a different shape, or mixed inputs although `mixes` was False.
        """
        if images_BCHW.shape != self.images_BCHW.shape:
            raise ValueError(f"recorded with images {tuple(self.images_BCHW.shape)}; got {tuple(images_BCHW.shape)}")
        self.images_BCHW.copy_(images_BCHW)
        self.labels_B.copy_(targets.labels_B)
        if self.mixed_B is not None:
            # An unmixed batch has its labels in both places, with a share of 1 on the first.
            self.mixed_B.copy_(targets.labels_B if targets.mixed_B is None else targets.mixed_B)
            if isinstance(targets.lam, Tensor):
                self.lam.copy_(targets.lam)
            else:
                self.lam.fill_(targets.lam)
        elif targets.mixed_B is not None:
            raise ValueError("a mixed batch for a step that was recorded without mixing")

    def targets(self) -> Targets:
        """The targets, as views of the memory that the recorded step reads."""
        return Targets(self.labels_B, self.mixed_B, self.lam if self.mixed_B is not None else 1.0)


@dataclass
class GraphedStep(Step):
    """A `Step` that is replayed from the fourth call on. One microbatch of one shape; the optimizer is capturable.

    Preparing and mixing a batch, which draw random numbers per step, happen before the replay, as in `Step`.

    Attributes:
        tape: what the recorded step reads; None before the first call.
    """

    recorder: CudaRecorder = field(kw_only=True)
    tape: Tape | None = field(default=None, init=False)

    def __call__(self, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
        """Train on the one microbatch of a step, counted from 0."""
        (batch,) = microbatches
        set_lr(self.optimizer, self.schedule(step))
        images_BCHW, targets = self._inputs(step, 0, batch)
        if self.tape is None:
            self.tape = Tape.like(images_BCHW, targets, metrics, mixes=self.mixer is not None)
        tape = self.tape
        if metrics is not tape.metrics:
            raise ValueError("the recorded step adds to the metrics that it was recorded with")
        tape.take(images_BCHW, targets)
        if self.ema is not None:
            tape.ema_share.fill_(self.ema.share(step))
        if tape.steps < WARM_UP:
            self.recorder.warm_up(lambda: self._recorded(tape))
        else:
            if tape.steps == WARM_UP:
                self.recorder.record(lambda: self._recorded(tape))
            self.recorder.replay()
        tape.steps += 1

    def _recorded(self, tape: Tape) -> None:
        loss = self._add_gradients(tape.images_BCHW, tape.targets())
        self._take_gradients()
        tape.metrics.add_loss(loss)
        grad_norm = self._update()
        if self.ema is not None:
            self.ema.update_by(tape.ema_share)
        tape.metrics.add_step(grad_norm)
