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
from pycls_fast.errors import UserError, refusing
from pycls_fast.losses import Targets
from pycls_fast.models.drop_path import DropPath
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.parallel.world import World
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
        """Call the function to capture its kernels; nothing is computed."""
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
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            what = "speed.cuda_graphs: this step cannot be recorded"
            with refusing(what, RuntimeError, use="use speed.cuda_graphs=off"):
                raise cause from None

    def replay(self) -> None:
        self._graph.replay()


def make_recordable(network: nn.Module, world: World) -> None:
    """Let the network draw on the device, as a replayed graph cannot draw on the host; a `UserError` on several
    ranks."""
    if world.size > 1:
        raise UserError(f"speed.cuda_graphs: on is for one rank, not for {world.size}; use speed.cuda_graphs=off")
    for module in network.modules():
        if isinstance(module, DropPath):
            module.draws_on_device = True


@dataclass
class GraphedStep(Step):
    """A `Step` that is replayed from the fourth call on. One microbatch of one shape; the optimizer is capturable.

    Preparing and mixing a batch, which draw random numbers per step, happen before the replay, as in `Step`. `fixed` is
    the memory that the recorded step reads.
    """

    recorder: CudaRecorder = field(kw_only=True)
    fixed: dict[str, Tensor] = field(default_factory=dict, init=False)
    _done: int = field(default=0, init=False)

    def __call__(self, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
        """Train on the one microbatch of a step, counted from 0; `metrics` are those of the first call."""
        (batch,) = microbatches
        set_lr(self.optimizer, self.schedule(step))
        self._write(step, *self.inputs(step, 0, batch))
        if self._done < WARM_UP:
            self.recorder.warm_up(lambda: self._recorded(metrics))
        else:
            if self._done == WARM_UP:
                self.recorder.record(lambda: self._recorded(metrics))
            self.recorder.replay()
        self._done += 1
        # Of tensors that the replay writes; what it would add to is not among the fixed ones.
        metrics.add_facts(self._facts())

    def _write(self, step: int, images_BCHW: Tensor, targets: Targets) -> None:
        """Write a step's inputs where the graph reads them; a ValueError for images of another shape than the first."""
        inputs = {"images_BCHW": images_BCHW, "labels_B": targets.labels_B}
        if self.mixer is not None:
            # An unmixed batch has its labels in both places, with a share of 1 on the first.
            inputs["mixed_B"] = targets.labels_B if targets.mixed_B is None else targets.mixed_B
            inputs["lam"] = _on_device(targets.lam, images_BCHW.device)
        if self.ema is not None:
            inputs["ema_share"] = _on_device(self.ema.share(step), images_BCHW.device)
        if not self.fixed:
            self.fixed = {name: torch.empty_like(value) for name, value in inputs.items()}
        if images_BCHW.shape != self.fixed["images_BCHW"].shape:
            raise ValueError(f"recorded with images {tuple(self.fixed['images_BCHW'].shape)}; got {images_BCHW.shape}")
        for name, value in inputs.items():
            self.fixed[name].copy_(value)

    def _recorded(self, metrics: TrainMetrics) -> None:
        fixed = self.fixed
        targets = Targets(fixed["labels_B"], fixed.get("mixed_B"), fixed.get("lam", 1.0))
        loss = self._add_gradients(fixed["images_BCHW"], targets)
        self._take_gradients()
        metrics.add_loss(loss)
        grad_norm = self._update()
        if self.ema is not None:
            self.ema.update_by(fixed["ema_share"])
        metrics.add_step(grad_norm)


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    # Filled there: a copy from the host would wait.
    return value if isinstance(value, Tensor) else torch.full((), value, device=device)
