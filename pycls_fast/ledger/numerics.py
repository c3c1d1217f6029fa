"""How far a setting's logits and gradients are from float64's, before training and after some of it.

Trained to the end, two settings differ by what chance makes of the first rounding; here the rounding itself is
measured. The reference has the same weights (the float32 masters, where there are any), the same images, float64 and
the plain twin of every switch.
"""

from __future__ import annotations

import math
from contextlib import closing
from itertools import islice

import torch
from torch import Tensor, nn

from pycls_fast import build, speed
from pycls_fast.config import RunConfig
from pycls_fast.config.command_line import DONE
from pycls_fast.data import Batch, to_device
from pycls_fast.errors import UserError
from pycls_fast.losses import Loss, Targets
from pycls_fast.train.building import build_parts
from pycls_fast.train.display import Display
from pycls_fast.train.environment import provenance
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.output_file import output_file, write_json
from pycls_fast.train.step import Step

CHUNK = 8
"""Images that float64's network computes at a time: with attention written out each takes up to gigabytes."""


def measure_numerics(config: RunConfig, *, steps: int, output: str) -> int:
    """Write the errors at step 0 and after `steps` steps of training as JSON; returns the exit status.

    Raises:
        UserError: several ranks, an `output` that cannot be written, or what training would refuse.
    """
    with build.world(config) as world:
        if world.size > 1:
            raise UserError("mode: numerics are measured by one process; start without torchrun")
        file = output_file(output)
        parts = build_parts(config, world, Display(speaks=True, mode="plain"))
        config, train, network, step = parts.config, parts.sources["train"], parts.network, parts.step
        plain = speed.resolve("reference", {}, "cuda" if world.device.type == "cuda" else "cpu", config.optim.name)
        exact = build.model(config, build.num_classes(config, train), plain).double().to(world.device)
        # A part that is not trained has no gradient that could be wrong.
        build.freeze(config, exact)
        metrics = TrainMetrics(world.device)
        loader = build.train_loader(config, train, world, parts.switches, start_step=0, steps=steps + 1)
        batches = to_device(loader, world.device, mode="blocking")
        with closing(batches):
            # Seen by no step: its errors are not those of images that were learned.
            probe = next(batches)
            list(islice(batches, config.optim.accumulation_steps - 1))
            records = [{"step": 0, **errors(step, network, exact, probe)}]
            for number in range(steps):
                step(number, list(islice(batches, config.optim.accumulation_steps)), metrics)
            records.append({"step": steps, **errors(step, network, exact, probe)})
        finite = [{k: v if v is None or math.isfinite(v) else "not finite" for k, v in r.items()} for r in records]
        record = {
            "kind": "numerics",
            "config_name": config.config_name,
            "errors": finite,
            **provenance(world.device, world.size),
        }
        write_json(file, record)
        return DONE


def errors(step: Step, network: nn.Module, exact: nn.Module, probe: Batch) -> dict[str, float | None]:
    """`logit_error`, `gradient_error`: norm of the difference from float64 over the norm of float64's.

    The network is in evaluation mode (stored BatchNorm statistics, no drop-path), so that both compute the same
    function; what is compiled is compiled for it once more. Its parameters' gradients are left at None. None stands
    for a reference of zeros.
    """
    _copy_weights(step, network, exact)
    images_BCHW = step.prepare(probe)
    was_training = network.training
    network.eval()
    exact.eval()
    try:
        exact_logits_BK = _exact_pass(exact, step.loss, images_BCHW, probe.labels_B)
        # Compiled where the step is, unlike other evaluations: what the compiler rounds belongs to the setting.
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


def _copy_weights(step: Step, network: nn.Module, exact: nn.Module) -> None:
    state = (step.masters or network).state_dict()
    exact.load_state_dict(
        {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
    )


def _exact_pass(exact: nn.Module, loss: Loss, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
    """Logits (B, K) in float64; adds the gradients of the mean loss to the parameters'.

    In chunks that do not know of each other: in evaluation mode nothing is computed over several images but the mean.
    """
    chunks = []
    for images, labels in zip(images_BCHW.split(CHUNK), labels_B.split(CHUNK), strict=True):
        logits = exact(images.double())
        (loss(logits, Targets(labels)) * (len(labels) / len(labels_B))).backward()
        chunks.append(logits.detach())
    return torch.cat(chunks)


def _gradients(network: nn.Module, factor: float) -> list[Tensor]:
    """Each parameter's gradient in float64, taken away from it."""
    found = []
    for parameter in network.parameters():
        gradient = parameter.grad
        found.append(torch.zeros_like(parameter).double() if gradient is None else gradient.double() * factor)
        parameter.grad = None
    return found


@torch.no_grad()
def relative_error(values: list[Tensor], exact: list[Tensor]) -> float | None:
    """The norm of all differences over the norm of all exact values, or None where those are zero; inf stays inf."""
    off = sum(float((v.double() - e).square().sum()) for v, e in zip(values, exact, strict=True))
    norm = sum(float(e.square().sum()) for e in exact)
    if norm == 0:
        return None
    error = (off / norm) ** 0.5
    return error if math.isfinite(error) else math.inf
