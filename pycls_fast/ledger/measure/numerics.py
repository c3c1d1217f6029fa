"""What number formats lose in a training: rounding against float64, and gradients and updates too small for 16 bits.

After a full training, two settings differ by chance amplification of their first rounding difference; here the rounding
itself is measured, before training and after some steps. The reference has the same weights (the float32 masters, if
any), the same images, float64 and the reference value of every switch. A head that starts at zero passes no gradient to
the other layers, whose errors would not be seen: before training, it has small random weights for the measurement.

The counts of gradients are those of Micikevicius et al., Mixed Precision Training, ICLR 2018: the histogram of the
gradients' exponents (figures 2b and 3), the share that loss scaling recovers (section 3.2), and the updates that vanish
when they are added to a float16 weight (section 3.1).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.errors import DONE, UserError
from pycls_fast.losses import LossFunction, Targets
from pycls_fast.network import Network
from pycls_fast.speed import Speed
from pycls_fast.train.assemble import short_training
from pycls_fast.train.environment import provenance
from pycls_fast.train.folder import new_file, write_json
from pycls_fast.train.step import Step

_HEAD_STD = 0.02
CHUNK = 8
"""Images per pass of the float64 network: with explicit attention each may take gigabytes."""


def measure_numerics(config: RunConfig, *, steps: int, output: str | None) -> int:
    """Write the errors at step 0 and after `steps` steps of training as JSON; returns the exit status.

    Raises:
        UserError: several ranks, an `output` that cannot be written, or anything that training would refuse.
    """
    with short_training(config, steps=steps + 1, output=output or new_file(config, "numerics")) as training:
        config, network, step = training.config, training.network, training.step
        device = training.world.device
        classes = build.num_classes(config, training.sources["train"])
        exact = build.model(config, classes, Speed()).double().to(device)
        # Frozen parts have no gradients to compare.
        build.freeze(config, exact)
        # No step trains on it, so that its errors are not those of learned images.
        probe = next(training.batches)
        list(islice(training.batches, config.optim.microbatches - 1))
        with random_head(step, network):
            records = [{"step": 0, **errors(step, network, exact, probe)}]
        for _ in range(steps):
            training.train_step()
        records.append({"step": steps, **errors(step, network, exact, probe)})
        weights = _digest(step.weights.live())
    about = {"kind": "numerics", "config_name": config.config_name, **provenance(device, 1)}
    write_json(training.file, {**about, "errors": records, "weights": weights})
    return DONE


def _digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the trained weights: two settings with the same one have computed the same bits."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def random_head(step: Step, network: Network) -> Iterator[None]:
    """Give a head whose weight is all zeros small normal ones inside the context, the same for every setting."""
    name = f"{network.head_name}.weight"
    weights = [network.get_parameter(name), step.weights.live()[name]]
    if any(bool(weight.any()) for weight in weights):
        yield
        return
    drawn_KD = torch.randn(weights[0].shape, generator=torch.Generator().manual_seed(0)) * _HEAD_STD
    with torch.no_grad():
        torch._foreach_copy_(weights, [drawn_KD.to(weight) for weight in weights])
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_zero_(weights)


def errors(step: Step, network: nn.Module, exact: nn.Module, probe: Batch) -> dict[str, Any]:
    """`logit_error` and `gradient_error`: norm of the difference from float64 over float64's norm; None if that is 0.

    The network is put in evaluation mode (stored BatchNorm statistics, no drop-path), so that both compute the same
    function; a compiled network is compiled again for it. All gradients are None afterwards.
    """
    exact.load_state_dict(step.weights.state_dict())
    images_BCHW, labels_B = step.prepare(probe), step.labels(probe)
    was_training = network.training
    network.eval()
    exact.eval()
    try:
        exact_logits_BK = _exact_pass(exact, step.loss, images_BCHW, labels_B)
        # Compiled if the step is, unlike other evaluations: the compiler's rounding belongs to the setting.
        with step.autocast():
            logits_BK = network(images_BCHW)
        step.scaler.scale(step.loss(logits_BK, Targets(labels_B))).backward()
    finally:
        network.train(was_training)
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    gradients = _gradients(network, 1 / scale)
    return {
        "logit_error": _relative_error([logits_BK], [exact_logits_BK]),
        "gradient_error": _relative_error(gradients, _gradients(exact, 1.0)),
    }


def _exact_pass(exact: nn.Module, loss: LossFunction, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Logits (B, K) in float64; accumulates the gradients of the mean loss in the parameters.

    Chunks are independent: in evaluation mode only the mean loss combines several images.
    """
    chunks = []
    for images, labels in zip(images_BCHW.split(CHUNK), labels_B.split(CHUNK), strict=True):
        logits = exact(images.double())
        (loss(logits, Targets(labels)) * (len(labels) / len(labels_B))).backward()
        chunks.append(logits.detach())
    return torch.cat(chunks)


def _gradients(network: nn.Module, factor: float) -> list[Tensor]:
    """Each parameter's gradient times `factor`, in float64; the parameters' gradients are set to None."""
    found = []
    for parameter in network.parameters():
        gradient = parameter.grad
        found.append(torch.zeros_like(parameter).double() if gradient is None else gradient.double() * factor)
        parameter.grad = None
    return found


@torch.no_grad()
def _relative_error(values: list[Tensor], exact: list[Tensor]) -> float | str | None:
    """The norm of all differences over the norm of all exact values; None if that is zero."""
    off = sum(float((v.double() - e).square().sum()) for v, e in zip(values, exact, strict=True))
    norm = sum(float(e.square().sum()) for e in exact)
    if norm == 0:
        return None
    error = (off / norm) ** 0.5
    return error if math.isfinite(error) else "not finite"


LOW, HIGH = -60, 16
"""Exponents of the histogram: values below 2^LOW count as 2^LOW, those from 2^HIGH up as 2^HIGH."""
SMALLEST_SUBNORMAL = -24
"""The exponent of float16's smallest number (IEEE 754, binary16)."""


# What is counted of a layer's values; "scaled" with the loss scale that is tried.
_COUNTED = (
    "gradients", "zero", "below_subnormal", "below_subnormal_scaled",
    "updates", "updates_lost_float16", "updates_lost_bfloat16",
)  # fmt: skip


class LayerCounts:
    """Counts of one layer's values over steps, on the device; `scale` is the loss scale to try."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self.scale = scale
        # Number of values by floor(log2 |g|), LOW..HIGH.
        self.exponents = torch.zeros(HIGH - LOW + 1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(_COUNTED), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor) -> None:
        """Count a gradient, in float32 or wider and without the loss scale."""
        size = gradient.abs().flatten()
        nonzero = size > 0
        places = (torch.frexp(size).exponent.long() - 1).clamp(LOW, HIGH) - LOW
        self.exponents.scatter_add_(0, places, nonzero.long())
        lost = [nonzero & (each.half() == 0) for each in (size, size * self.scale)]
        counted = (torch.ones_like(nonzero), ~nonzero, *lost)
        self.sums[:4] += torch.stack([each.sum() for each in counted])

    @torch.no_grad()
    def add_update(self, before: Tensor, after: Tensor) -> None:
        """Count weights that an update moves in float32 but would not move in a 16-bit format."""
        change = after - before
        moved = change != 0
        # Without a master, the sum is rounded to the format.
        narrow = [before.to(dtype) for dtype in (torch.float16, torch.bfloat16)]
        lost = [moved & ((weight.float() + change).to(weight.dtype) == weight) for weight in narrow]
        self.sums[4:] += torch.stack([moved.sum(), *(each.sum() for each in lost)])

    def record(self) -> dict[str, Any]:
        """Counts and shares for JSON; shares of gradients are of those that are not zero in float32."""
        found: dict[str, Any] = dict(zip(_COUNTED, self.sums.tolist(), strict=True))
        some, moved = max(found["gradients"] - found["zero"], 1), max(found["updates"], 1)
        shares = {name: n / (moved if "lost" in name else some) for name, n in found.items() if "_" in name}
        exponents = {str(LOW + i): n for i, n in enumerate(self.exponents.tolist()) if n}
        return {**found, "exponents": exponents, **shares}


class Watch:
    """Counts every layer's gradients after each microbatch's backward pass, and the optimizer's updates."""

    def __init__(self, network: nn.Module, scale: float) -> None:
        self._named = list(network.named_parameters())
        self._counts: dict[str, LayerCounts] = {}
        for name, parameter in self._named:
            self._counts.setdefault(_layer(name), LayerCounts(scale, parameter.device))

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """Count backward passes, and steps of this optimizer, inside the context."""
        before: dict[str, Tensor] = {}

        def first(*_: Any) -> None:
            before.update({name: p.detach().clone() for name, p in self._named if p.grad is not None})

        def then(*_: Any) -> None:
            for name, parameter in self._named:
                if name in before:
                    self._counts[_layer(name)].add_update(before.pop(name), parameter)

        # Gradients are counted before clipping, which works on float32 gradients at every precision.
        hooks: list[Any] = [
            parameter.register_hook(self._counts[_layer(name)].add_gradient)
            for name, parameter in self._named
            if parameter.requires_grad
        ]
        hooks += [optimizer.register_step_pre_hook(first), optimizer.register_step_post_hook(then)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def records(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The record of all layers together, and those of trained layers in the network's order."""
        first, *_ = self._counts.values()
        total = LayerCounts(first.scale, first.sums.device)
        for each in self._counts.values():
            total.exponents += each.exponents
            total.sums += each.sums
        layers = {name: each.record() for name, each in self._counts.items()}
        return total.record(), {name: record for name, record in layers.items() if record["gradients"]}


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def count_gradients(config: RunConfig, *, steps: int, warmup_steps: int, loss_scale: float, output: str | None) -> int:
    """Train in float32 or under autocast, so that gradients and weights are float32, count, and write the numbers as
    JSON; returns the exit status. `GradientsVerb` in `commands/measure.py` describes the arguments.

    Raises:
        UserError: a precision that rounds gradients, several ranks, CUDA graphs, an `output` that cannot be written,
            or anything that training would refuse.
    """
    level = build.level(config)
    if level.compute == "float16" or level.weights != "float32":
        raise UserError(
            f"precision: {config.precision.name} rounds gradients before they are counted; use precision=fp32 or "
            "amp_bf16"
        )
    file = output or new_file(config, "gradients")
    with short_training(config, steps=warmup_steps + steps, output=file) as training:
        if training.switches.cuda_graphs == "on":
            raise UserError("speed.cuda_graphs: on replays steps without Python, which counts; use off")
        watch = Watch(training.network, loss_scale)
        for _ in range(warmup_steps):
            training.train_step()
        with watch.around(training.step.optimizer):
            for _ in range(steps):
                training.train_step()
        loss = training.metrics.read(training.world)["loss"]
    total, layers = watch.records()
    record = {
        "kind": "gradients",
        "config_name": config.config_name,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "loss_scale": loss_scale,
        "clip_norm": training.config.optim.clip_norm,
        "parameters": training.complexity.parameters,
        "loss": loss,
        **provenance(training.world.device, training.world.size),
        "total": total,
        "layers": layers,
        "config": training.config.model_dump(mode="json"),
    }
    write_json(training.file, record)
    shown = {
        "gradients that are zero in float16": "below_subnormal",
        f"the same, loss x {loss_scale:g}": "below_subnormal_scaled",
        "updates lost without a float32 master, float16": "updates_lost_float16",
        "updates lost without a float32 master, bfloat16": "updates_lost_bfloat16",
    }
    rows = [(what, f"{100 * total[key]:.3g}%") for what, key in shown.items()]
    training.display.table(f"{config.config_name}: {steps} steps after {warmup_steps}", rows)
    print(f"written to {training.file}")
    return DONE
