"""What float16 would lose in a real training: gradients below its range, updates below its resolution.

The figures are those of Micikevicius et al., Mixed Precision Training, ICLR 2018: the histogram of the gradients'
exponents (figures 2b and 3), the share that loss scaling recovers (section 3.2), and the updates that vanish
when they are added to a float16 weight (section 3.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import DONE, UserError
from pycls_fast.files import timestamp
from pycls_fast.network import Network
from pycls_fast.train.display import Display
from pycls_fast.train.environment import environment_command, provenance
from pycls_fast.train.folder import write_json
from pycls_fast.train.short import short_training

LOW, HIGH = -60, 16
"""Exponents of the histogram: values below 2^LOW count as 2^LOW, those from 2^HIGH up as 2^HIGH."""
SMALLEST_NORMAL, SMALLEST_SUBNORMAL, LARGEST = -14, -24, 65504.0
"""float16: exponents of its smallest normal and subnormal numbers, and its largest number (IEEE 754, binary16)."""


@dataclass
class LayerCounts:
    """Counts of one layer's values over steps, on the device; `scale` is the loss scale to try."""

    scale: float
    exponents: Tensor
    """Number of values by floor(log2 |g|), LOW..HIGH."""
    sums: Tensor
    """[values, zeros, flushed, flushed scaled, overflowed scaled, subnormal, subnormal scaled, updates, lost in
    float16, lost in bfloat16]."""

    @classmethod
    def empty(cls, scale: float, device: torch.device) -> LayerCounts:
        """Counts of zero."""
        return cls(
            scale,
            torch.zeros(HIGH - LOW + 1, dtype=torch.int64, device=device),
            torch.zeros(10, dtype=torch.int64, device=device),
        )

    def add_gradient(self, gradient: Tensor) -> None:
        """Count a gradient, in float32 or wider and without the loss scale."""
        size = gradient.abs().flatten()
        nonzero = size > 0
        exponent = torch.frexp(size).exponent.long() - 1
        inside = exponent.clamp(LOW, HIGH) - LOW
        self.exponents.scatter_add_(0, inside, nonzero.long())
        scaled = size * self.scale
        self.sums[:7] += torch.stack(
            [
                torch.ones_like(nonzero).sum(),
                (~nonzero).sum(),
                (nonzero & (size.half() == 0)).sum(),
                (nonzero & (scaled.half() == 0)).sum(),
                (scaled > LARGEST).sum(),
                (nonzero & (size < 2.0**SMALLEST_NORMAL)).sum(),
                (nonzero & (scaled < 2.0**SMALLEST_NORMAL)).sum(),
            ]
        )

    def add_update(self, before: Tensor, after: Tensor) -> None:
        """Count weights that an update moves in float32 but would not move in a 16-bit format."""
        change = after - before
        moved = change != 0
        lost = [moved & (_without_master(before, change, dtype) == 0) for dtype in (torch.float16, torch.bfloat16)]
        self.sums[7:] += torch.stack([moved.sum(), *(each.sum() for each in lost)])

    def record(self) -> dict[str, Any]:
        """Counts and shares for JSON; shares of gradients are of those that are not zero in float32."""
        counts = self.sums.tolist()
        values, zeros, flushed, scaled, over, subnormal, subnormal_scaled, updates, lost, lost_bf16 = counts
        some, moved = max(values - zeros, 1), max(updates, 1)
        return {
            "gradients": values,
            "zero": zeros,
            "exponents": {str(LOW + i): n for i, n in enumerate(self.exponents.tolist()) if n},
            "below_subnormal": flushed / some,
            "below_subnormal_scaled": scaled / some,
            "below_normal": subnormal / some,
            "below_normal_scaled": subnormal_scaled / some,
            "overflow_scaled": over / some,
            "updates": updates,
            "updates_lost_float16": lost / moved,
            "updates_lost_bfloat16": lost_bf16 / moved,
        }

    def __add__(self, other: LayerCounts) -> LayerCounts:
        return LayerCounts(self.scale, self.exponents + other.exponents, self.sums + other.sums)


def _without_master(before: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a weight of this format moves when the sum is rounded to the format."""
    weight = before.to(dtype)
    return (weight.float() + change).to(dtype) - weight


@dataclass
class Watch:
    """Counts every layer's gradients after each microbatch's backward pass, and the optimizer's updates."""

    network: Network
    scale: float
    counts: dict[str, LayerCounts] = field(default_factory=dict)

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """Count backward passes, and steps of this optimizer, inside the context."""
        before: dict[str, Tensor] = {}

        @torch.no_grad()
        def first(*_: Any) -> None:
            for name, parameter in self._trained():
                before[name] = parameter.detach().clone()

        @torch.no_grad()
        def then(*_: Any) -> None:
            for name, parameter in self._trained():
                self._of(name, parameter).add_update(before.pop(name), parameter)

        # Gradients are counted before clipping, which works on float32 gradients at every precision.
        hooks: list[Any] = [
            parameter.register_hook(partial(self._add_gradient, name))
            for name, parameter in self.network.named_parameters()
            if parameter.requires_grad
        ]
        hooks += [optimizer.register_step_pre_hook(first), optimizer.register_step_post_hook(then)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        self._of(name, gradient).add_gradient(gradient)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.network.named_parameters() if p.grad is not None]

    def _of(self, name: str, parameter: Tensor) -> LayerCounts:
        layer = name.rpartition(".")[0] or name
        if layer not in self.counts:
            self.counts[layer] = LayerCounts.empty(self.scale, parameter.device)
        return self.counts[layer]

    def layers(self) -> dict[str, dict[str, Any]]:
        """Records by layer, in the network's order (`counts` has that of the backward pass)."""
        order = {name.rpartition(".")[0] or name: None for name, _ in self.network.named_parameters()}
        return {name: self.counts[name].record() for name in order if name in self.counts}

    def total(self) -> LayerCounts:
        """The sum over all layers."""
        first, *others = self.counts.values()
        return sum(others, first)


def count_gradients(config: RunConfig, *, steps: int, warmup_steps: int, loss_scale: float, output: str | None) -> int:
    """Train, count, write the numbers as JSON and draw a PNG beside it; returns the exit status.

    Args:
        config: an experiment in float32 or under autocast, so that its gradients and weights are float32.
        steps: training steps to count.
        warmup_steps: training steps before them.
        loss_scale: tried on the gradients; the training itself is not scaled.
        output: the JSON file; None for one in `run_dir` if that is set, else in `gradients/`.

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
    if output is None:
        started = Path("gradients") / f"{config.config_name}-{timestamp()}.json"
        output = str(started if config.run_dir is None else Path(config.run_dir) / "gradients.json")
    with short_training(config, steps=warmup_steps + steps, output=output) as training:
        parts, world = training.parts, training.world
        if parts.speed.cuda_graphs == "on":
            raise UserError("speed.cuda_graphs: on replays steps without Python, which counts; use off")
        watch = Watch(parts.network, loss_scale)
        for _ in range(warmup_steps):
            training.step()
        for _ in range(steps):
            with watch.around(parts.step.optimizer):
                training.step()
        loss = training.metrics.read(world)["loss"]
    record = {
        "kind": "gradients",
        "config_name": config.config_name,
        "time": time.time(),
        "command": environment_command(),
        "steps": steps,
        "warmup_steps": warmup_steps,
        "loss_scale": loss_scale,
        "clip_norm": parts.config.optim.clip_norm,
        "parameters": parts.complexity.parameters,
        "loss": loss,
        **provenance(world.device, world.size),
        "total": watch.total().record(),
        "layers": watch.layers(),
        "config": parts.config.model_dump(mode="json"),
    }
    file = training.file
    write_json(file, record)
    _print(training.display, record)
    print(f"written to {file}")
    return DONE


def _print(display: Display, record: Mapping[str, Any]) -> None:
    total, scale = record["total"], record["loss_scale"]

    def percent(key: str) -> str:
        return f"{100 * total[key]:.3g}%"

    display.table(
        f"{record['config_name']}: {record['steps']} steps after {record['warmup_steps']}",
        [
            ("gradients that are zero in float16", percent("below_subnormal")),
            (f"the same, loss x {scale:g}", percent("below_subnormal_scaled")),
            ("gradients subnormal or zero in float16", percent("below_normal")),
            (f"the same, loss x {scale:g}", percent("below_normal_scaled")),
            (f"gradients above float16's largest number, loss x {scale:g}", percent("overflow_scaled")),
            ("updates lost without a float32 master, float16", percent("updates_lost_float16")),
            ("updates lost without a float32 master, bfloat16", percent("updates_lost_bfloat16")),
        ],
    )
