"""Errors of a setting's logits and gradients against float64, before training and after some steps.

After a full training, two settings differ by chance amplification of their first rounding difference; here the
rounding itself is measured. The reference has the same weights (the float32 masters, if any), the same images, float64
and the reference value of every switch.

A head that starts at zero passes no gradient to the other layers, whose errors would not be seen: before training, it
has small random weights for the measurement.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.errors import DONE
from pycls_fast.losses import LossFunction, Targets
from pycls_fast.network import Network
from pycls_fast.speed import Speed
from pycls_fast.train.environment import provenance
from pycls_fast.train.folder import write_json
from pycls_fast.train.short import short_training
from pycls_fast.train.step import Step

_HEAD_STD = 0.02
CHUNK = 8
"""Images per pass of the float64 network: with explicit attention each may take gigabytes."""


def measure_numerics(config: RunConfig, *, steps: int, output: str) -> int:
    """Write the errors at step 0 and after `steps` steps of training as JSON; returns the exit status.

    Raises:
        UserError: several ranks, an `output` that cannot be written, or anything that training would refuse.
    """
    with short_training(config, steps=steps + 1, output=output) as training:
        config, network, step = training.parts.config, training.parts.network, training.parts.step
        device = training.world.device
        classes = build.num_classes(config, training.parts.sources["train"])
        exact = build.model(config, classes, Speed()).double().to(device)
        # Frozen parts have no gradients to compare.
        build.freeze(config, exact)
        # No step trains on it, so that its errors are not those of learned images.
        probe = next(training.batches)
        list(islice(training.batches, config.optim.microbatches - 1))
        with random_head(step, network):
            records = [{"step": 0, **errors(step, network, exact, probe)}]
        for _ in range(steps):
            training.step()
        records.append({"step": steps, **errors(step, network, exact, probe)})
        weights = _digest(step.weights.live())
    finite = [{k: v if v is None or math.isfinite(v) else "not finite" for k, v in r.items()} for r in records]
    record = {
        "kind": "numerics",
        "config_name": config.config_name,
        "errors": finite,
        "weights": weights,
        **provenance(device, 1),
    }
    write_json(training.file, record)
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


def errors(step: Step, network: nn.Module, exact: nn.Module, probe: Batch) -> dict[str, float | None]:
    """`logit_error` and `gradient_error`: norm of the difference from float64 over float64's norm; None if that is 0.

    The network is put in evaluation mode (stored BatchNorm statistics, no drop-path), so that both compute the same
    function; a compiled network is compiled again for it. All gradients are None afterwards.
    """
    exact.load_state_dict(step.weights.state_dict())
    images_BCHW = step.prepare(probe)
    was_training = network.training
    network.eval()
    exact.eval()
    try:
        exact_logits_BK = _exact_pass(exact, step.loss, images_BCHW, probe.labels_B)
        # Compiled if the step is, unlike other evaluations: the compiler's rounding belongs to the setting.
        with step.autocast():
            logits_BK = network(images_BCHW)
        step.scaler.scale(step.loss(logits_BK, Targets(probe.labels_B))).backward()
    finally:
        network.train(was_training)
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    gradients = _gradients(network, 1 / scale)
    return {
        "logit_error": relative_error([logits_BK], [exact_logits_BK]),
        "gradient_error": relative_error(gradients, _gradients(exact, 1.0)),
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
def relative_error(values: list[Tensor], exact: list[Tensor]) -> float | None:
    """The norm of all differences over the norm of all exact values; None if that is zero, inf if it is not finite."""
    off = sum(float((v.double() - e).square().sum()) for v, e in zip(values, exact, strict=True))
    norm = sum(float(e.square().sum()) for e in exact)
    if norm == 0:
        return None
    error = (off / norm) ** 0.5
    return error if math.isfinite(error) else math.inf
