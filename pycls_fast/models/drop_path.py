"""Stochastic depth: residual branches dropped at random in training, and the blocks' rates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth: in training, zeroes a residual branch for randomly chosen samples.

    Kept samples are divided by the keep probability, so the expectation is the input (Huang et al., Deep
    Networks with Stochastic Depth, 2016; rescaled in training as in Larsson et al., FractalNet, 2017, instead
    of at test time). Identity in evaluation and at rate 0.

    There is a draw for each sample, from the CPU's default generator whatever the input's device: the host then knows
    which samples are kept, and how many, without waiting for the device. Compiled code and modules with
    `draws_on_device` draw from the device's generator instead.

    Args:
        batch_dim: the dimension that holds the samples; the draws are the same for each.
        compute: how `residual` drops. "multiply": the branch is computed for all samples and multiplied by zero for
            some. "skip": it is computed only for the kept samples, as in DINOv2 (Oquab et al. 2023, section 4,
            "Efficient stochastic depth"; DINOv2 keeps a fixed number of samples, this the same samples as "multiply").
            Only for branches that treat every sample separately: no BatchNorm.
    """

    def __init__(self, rate: float, *, batch_dim: int = 0, compute: str = "multiply") -> None:
        super().__init__()
        self.rate = rate
        self.drops = rate > 0.0
        # For compiled code, in which a Python number would be a constant of the graph (a graph for each rate), or an
        # input on the host (no CUDA graphs). Not a buffer: checkpoints, averages and half formats leave it alone.
        self._keep = torch.full((), 1.0 - rate, dtype=torch.float32)
        self.batch_dim = batch_dim
        self.compute = compute
        # Set for steps that are replayed without the host (CUDA graphs).
        self.draws_on_device = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropPath:
        """Follow the network to its device, even from the meta device; stay in float32."""
        super()._apply(fn, recurse)
        device = fn(self._keep).device
        self._keep = torch.full((), 1.0 - self.rate, dtype=torch.float32, device=device)
        return self

    def forward(self, branch: Tensor) -> Tensor:
        """Any shape with the samples in `batch_dim`; returns the same shape and dtype."""
        if not self.drops or not self.training:
            return branch
        if torch.compiler.is_compiling():
            return self._compiled(branch)
        kept_B = self._draw(branch.shape[self.batch_dim], branch.device if self.draws_on_device else "cpu")
        return self._multiply(branch, _to(branch.device, kept_B))

    def residual(self, features: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """features + what drop-path leaves of branch(features), by the method `compute`; all methods draw alike."""
        if self.compute == "multiply" or not self.drops or not self.training:
            return features + self(branch(features))
        # Drawn and indexed on the host.
        kept_B = self._draw(features.shape[self.batch_dim])
        indices = kept_B.nonzero().squeeze(1)
        if len(indices) in (0, len(kept_B)):
            # If no sample is kept, the branch's parameters still get (zero) gradients, and no kernel sees an empty
            # batch.
            return features + self._multiply(branch(features), _to(features.device, kept_B))
        indices = _to(features.device, indices)
        part = branch(features.index_select(self.batch_dim, indices)) / (1.0 - self.rate)
        dtype = torch.promote_types(features.dtype, part.dtype)
        return features.to(dtype).index_add(self.batch_dim, indices, part.to(dtype))

    def _draw(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        # Drawn in float32 whatever the branch's dtype, so that runs in different precisions drop the same samples.
        return torch.rand(count, device=device, dtype=torch.float32) < 1.0 - self.rate

    def _multiply(self, branch: Tensor, kept_B: Tensor) -> Tensor:
        shape = [1] * branch.ndim
        shape[self.batch_dim] = -1
        # Not branch * (kept / keep): 1 / keep rounded to bfloat16 would scale every kept sample wrongly.
        return branch * kept_B.view(shape) / (1.0 - self.rate)

    def _compiled(self, branch: Tensor) -> Tensor:
        """`_multiply` with the rate in a tensor. Divides in float32, which costs nothing where operations are fused."""
        kept_B = torch.rand(branch.shape[self.batch_dim], device=branch.device, dtype=torch.float32) < self._keep
        shape = [1] * branch.ndim
        shape[self.batch_dim] = -1
        wide = torch.promote_types(branch.dtype, torch.float32)
        return ((branch * kept_B.view(shape)).to(wide) / self._keep).to(branch.dtype)


def _to(device: torch.device, host: Tensor) -> Tensor:
    """Copy a small host tensor to the device without waiting for the device (CUDA reads it before it returns)."""
    return host.to(device, non_blocking=True)


def drop_path_rates(rate: float, depth: int, rule: str = "linear") -> list[float]:
    """One rate per block; the last block's is `rate`.

    `rule` is "linear": rising from 0 in the first, the decay rule of Huang et al. 2016 (section 3), started at 0 as in
    timm's models; a single block gets 0. "constant": the same in each, as in DeiT III (Touvron et al. 2022,
    `models_v2.py` of its code).
    """
    if rule == "constant":
        return [rate] * depth
    return [rate * index / max(depth - 1, 1) for index in range(depth)]
