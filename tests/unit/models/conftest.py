"""What the tests of the models share."""

from __future__ import annotations

import torch
from torch import nn


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fill_random(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values in every saved tensor, such that activations stay of order 1 and no tensor is at its
    start."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(int(torch.randint(1, 100, (), generator=generator)))
        elif name.endswith("running_var"):
            tensor.copy_(0.5 + normal(tensor).abs())
        elif tensor.ndim >= 2 and not name.startswith(("positions", "registers")):
            tensor.copy_(1.5 * normal(tensor) / tensor[0].numel() ** 0.5)
        elif "norm" in name and name.endswith("weight"):
            tensor.copy_(1 + 0.3 * normal(tensor))
        else:
            tensor.copy_(0.5 * normal(tensor))
    return model
