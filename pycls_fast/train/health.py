"""What ends a run early, as one-line messages: numbers that are not finite, damaged images, too little memory.

The watchdog finds the module that produced the first value that is not finite, forwards or backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pycls_fast import plan
from pycls_fast.config.run import Precision, RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.errors import OUT_OF_MEMORY, UserError, is_out_of_memory
from pycls_fast.files import checkpoints, step_of
from pycls_fast.optim.weights import local
from pycls_fast.parallel import World, plain_name
from pycls_fast.train.display import Display
from pycls_fast.train.environment import device_name
from pycls_fast.train.folder import RunFolder

DAMAGED_IMAGE = "damaged image"
"""The event of an image that the run met first."""


class DamagedImages:
    """The damaged images of a run.

    Attributes:
        noted: those that this rank has met since the last report, and the reasons.
        reported: those that any rank of this process has met before, and the reasons.
    """

    def __init__(self, folder: RunFolder, world: World, display: Display) -> None:
        self.noted: dict[str, str] = {}
        self.reported: dict[str, str] = {}
        self._folder, self._world, self._display = folder, world, display
        # What earlier processes recorded is not recorded again, nor counted (it may have been repaired).
        records = folder.records() if world.is_main else ()
        self._recorded = {record["name"] for record in records if record.get("event") == DAMAGED_IMAGE}

    def note(self, damaged: Iterable[tuple[str, str]]) -> None:
        """Note (name, reason) of images, without those that have been reported."""
        self.noted.update((name, reason) for name, reason in damaged if name not in self.reported)

    def report(self, done: int, epoch: float) -> None:
        """Report what any rank has noted; all ranks call this."""
        new, self.noted = self.noted, {}
        found = {name: reason for part in self._world.gather(new) for name, reason in part.items()}
        for name, reason in found.items():
            if name not in self.reported:
                self.reported[name] = reason
                self._display.warn(f"{name}: {reason}; skipped")
                if self._world.is_main and name not in self._recorded:
                    self._folder.add_record("event", done, epoch, event=DAMAGED_IMAGE, name=name, reason=reason)


def noting_damage(batches: Generator[Batch, None, None], damaged: dict[str, str]) -> Generator[Batch, None, None]:
    """Yield the batches, and add the damaged images to `damaged`, name to reason; for what is not a run."""
    with closing(batches):
        for batch in batches:
            damaged.update(batch.damaged)
            yield batch


def report_damage(
    damaged: Mapping[str, str], limit: int, world: World, display: Display, outcome: str = "skipped"
) -> None:
    """Print a warning for each damaged image that any rank has met, except in a run; all ranks call this.

    Args:
        damaged: name to reason, this rank's or all ranks'.

    Raises:
        UserError: there are more than `limit`.
    """
    everyone = {name: reason for part in world.gather(damaged) for name, reason in sorted(part.items())}
    if len(everyone) > limit:
        raise too_many_damaged(everyone, limit)
    for name, reason in everyone.items():
        display.warn(f"{name}: {reason}; {outcome}")


def too_many_damaged(damaged: Mapping[str, str], limit: int) -> UserError:
    """The error for more than `data.max_damaged` images (name to reason) that cannot be read."""
    return UserError(
        f"data.max_damaged: {len(damaged)} images cannot be read, more than {limit}:",
        *(f"{name}: {reason}" for name, reason in damaged.items()),
    )


class Watchdog:
    """Checks every module's output and its gradient; waits for the device once per microbatch.

    Args:
        network: gets hooks on all its modules; modules inside a compiled part are not seen.
        scaled: the loss is scaled. Overflowing gradients then only lower the scale: they are remembered in `last`, and
            only a non-finite forward pass stops the run.
    """

    def __init__(self, network: nn.Module, *, scaled: bool) -> None:
        self.last: str | None = None
        """The last finding, for the message of the code that stops the run."""
        self._network = network
        self._scaled = scaled
        self._forward: list[tuple[str, Tensor]] = []
        self._backward: list[tuple[str, Tensor]] = []
        for name, module in network.named_modules():
            place = plain_name(name) or "the whole network"
            module.register_forward_hook(self._watch(place, type(module).__name__))

    def check(self, step: int, loss: Tensor) -> None:
        """Check the values of a microbatch of `step` (from 0), after its backward pass.

        Raises:
            UserError: names the first module whose output (or gradient, if the loss is not scaled) is not finite.
        """
        forward = [*self._forward, ("the loss", _finite(loss))]
        weights = [
            (f"the gradient of the weight {plain_name(name)}", _finite(p.grad))
            for name, p in self._network.named_parameters()
            if p.grad is not None
        ]
        backward = [*self._backward, *weights]
        self._forward, self._backward = [], []
        found = _first_bad([*forward, *backward])
        if found is None:
            return
        place = [*forward, *backward][found][0]
        is_forward = found < len(forward)
        way = "forward" if is_forward else "backward"
        self.last = f"the first value that is not finite in the {way} pass of step {step + 1} is in {place}"
        if is_forward or not self._scaled:
            raise UserError(
                f"runtime.watchdog: {self.last}; lower optim.lr, set optim.clip_norm, or keep that part in a wider "
                "format with another precision"
            )

    def _watch(self, name: str, kind: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A forward pass that is recomputed within the backward pass was checked before.
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._forward.append((f"the output of {name} ({kind})", _finite(value)))
                    if value.requires_grad:
                        value.register_hook(self._gradient(name, kind))

        return hook

    def _gradient(self, name: str, kind: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._backward.append((f"the gradient that reaches the output of {name} ({kind})", _finite(gradient)))

        return hook


def _finite(value: Tensor) -> Tensor:
    """Whether this rank's values are all finite, as a flag on the device."""
    return torch.isfinite(local(value.detach())).all()


def _first_bad(flags: list[tuple[str, Tensor]]) -> int | None:
    finite = torch.stack([flag for _, flag in flags]).tolist()
    return finite.index(False) if False in finite else None


# A constant loss scale is too high if whole log intervals with at least this many steps in total are skipped.
_SKIPPED_LIMIT = 20


class DivergenceCheck:
    """Checks the numbers of each log interval of a run, and what it saves.

    Args:
        values: gives the weights and buffers that are saved.
        checkpoints: the run's folder of them.
        saved_step: the newest one of this run, if there is one.
    """

    def __init__(
        self,
        precision: Precision,
        scaler: torch.amp.GradScaler,
        watchdog: Watchdog | None,
        values: Callable[[], Iterable[Tensor]],
        world: World,
        checkpoints: Path,
        saved_step: int | None,
    ) -> None:
        self._precision, self._scaler, self._watchdog, self._values = precision, scaler, watchdog, values
        self._world, self._checkpoints, self._saved_step = world, checkpoints, saved_step
        self._skipped_in_a_row = 0
        # Of the latest interval, and since the latest checkpoint.
        self._loss, self._weights_changed = 0.0, saved_step is None

    def check(self, done: int, loss: float, skipped: int, steps: int) -> None:
        """Check an interval's numbers, which are the same on all ranks.

        Args:
            skipped: its steps whose gradients were not finite.

        Raises:
            UserError: they are not finite, or with loss scaling not at any scale that is allowed.
        """
        precision, scaler = self._precision, self._scaler
        self._loss, self._weights_changed = loss, self._weights_changed or skipped < steps
        self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
        scale, dynamic = scaler.get_scale(), precision.loss_scale == "dynamic"
        if not scaler.is_enabled():
            if not math.isfinite(loss) or skipped:
                raise self._error(
                    f"optim.lr: the loss or a gradient is not finite at step {done} (loss {loss:g}); lower optim.lr, "
                    "lengthen schedule.warmup_epochs or set optim.clip_norm"
                )
        elif dynamic and scale < precision.loss_scale_floor:
            raise self._error(
                f"precision.loss_scale_floor: the loss scale fell to {scale:g} at step {done}: gradients are not "
                "finite at any scale; lower optim.lr, set optim.clip_norm, or use precision=amp_bf16"
            )
        elif not dynamic and self._skipped_in_a_row >= _SKIPPED_LIMIT:
            raise self._error(
                f"precision.loss_scale: the {self._skipped_in_a_row} steps up to step {done} had gradients that are "
                f"not finite at the constant scale {scale:g}; lower it or use precision.loss_scale=dynamic"
            )

    def not_worth_saving(self, *, evaluated: bool = False) -> str | None:
        """Why the state after the interval checked last should not replace older checkpoints; None if it may.

        A loss scaler skips steps for a while before it gives up. Until then the state is the one that diverged.

        Args:
            evaluated: the state has been evaluated with a finite loss, so it has not diverged: an image overflowed.
        """
        if not (evaluated or math.isfinite(self._loss)):
            return "the loss is not finite"
        return None if self._weights_changed else "every step since the last checkpoint was skipped"

    def check_weights(self, done: int) -> None:
        """Check the weights and buffers that are about to be saved after `done` steps; all ranks call this.

        Raises:
            UserError: one is not finite, so that no later step can be better: batch norm's statistics stay so, too.
        """
        if not all(self._world.gather(all(map(_is_finite, self._values())))):
            raise self._error(
                f"optim.lr: weights or batch norm's statistics are not finite after step {done}, which is not saved; "
                "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm"
            )

    def saved(self, done: int) -> None:
        """Note that the run's state after `done` steps is saved."""
        self._weights_changed, self._saved_step = False, done

    def _error(self, line: str) -> UserError:
        """The error, the checkpoint before the newest one, which may be of a bad step, too, and where it began."""
        lines, newest = [], self._saved_step
        if newest is not None:
            line += "; earlier checkpoints are kept"
            saved = checkpoints(self._checkpoints)
            # The same on all ranks: a mistake of all of them is printed once.
            before = self._world.from_main(next((path for path in saved if step_of(path) < newest), None))
            if before is not None:
                lines.append(f"resume: if step {newest} has diverged, too, go back with resume={before}")
        if self._watchdog is None:
            lines.append("runtime.watchdog: with true the resumed run names the module that overflows first")
        elif self._watchdog.last is not None:
            lines.append(f"runtime.watchdog: {self._watchdog.last}")
        return UserError(line, *lines)


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    share = local(values.detach())
    # The extremes are NaN if any number is; `isfinite` would allocate tensors of the size of the weights.
    return share.numel() == 0 or all(bool(extreme.isfinite()) for extreme in torch.aminmax(share))


@contextmanager
def enough_memory(key: str, device: torch.device, what: str, *, cpu: str = "", ranks: str = "") -> Iterator[None]:
    """Turn torch's out-of-memory error into a `UserError` of one line, which contains `OUT_OF_MEMORY`.

    Args:
        key: the key to change.
        what: with what the device is out of memory, and the way out.
        cpu: a key that chooses the CPU instead, if that is a way out, too.
        ranks: "8 x " for several devices.

    Raises:
        UserError: out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        other = f", or {cpu}=cpu" if cpu and device.type != "cpu" else ""
        raise UserError(f"{key}: {ranks}{device_name(device)} is {OUT_OF_MEMORY} with {what}{other}") from error


@contextmanager
def enough_to_train(config: RunConfig, world: World) -> Iterator[None]:
    """`enough_memory` for training, and images enough for batch norm."""
    per_rank = config.data.global_batch_size // world.data_size
    steps = next((n for n in plan.divisors(per_rank) if n > config.optim.microbatches), None)
    smaller = "" if steps is None else f"use optim.accumulation_steps={steps} (the same result in smaller parts), or "
    what = (
        f"{config.data.global_batch_size}; {smaller}use parallel=fsdp on more ranks, speed.recompute=full, a smaller "
        "batch or model; earlier checkpoints are kept"
    )
    try:
        with enough_memory("data.global_batch_size", world.device, what, ranks=f"{world.size} x "):
            yield
    except ValueError as error:
        # Whether one image is too few depends on the size of the network's smallest maps.
        if "Expected more than 1 value per channel when training" not in str(error):
            raise
        raise UserError(
            "data.global_batch_size: batch norm cannot train on one image whose maps shrink to one pixel; use at least "
            "2 images per rank and microbatch (optim.accumulation_steps), or a larger data.image_size"
        ) from error


def enough_to_score(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """`enough_memory` for scoring a network (`config` comes from `build.for_scoring`)."""
    what = f"{config.data.eval_batch_size} images at a time; use a smaller one"
    return enough_memory("data.eval_batch_size", world.device, what, cpu="runtime.device")
