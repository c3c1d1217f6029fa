"""Weights that no test can pass with by accident."""

from __future__ import annotations

import torch
from torch import nn


def randomise(model: nn.Module) -> nn.Module:
    """Random values in every saved tensor, such that activations stay of order 1 and no tensor is at its
    start."""
    torch.manual_seed(0)
    for name, tensor in model.double().state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(int(torch.randint(1, 100, ())))
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.ndim >= 2 and "pos_embed" not in name:
            tensor.normal_(std=1.5 / tensor[0].numel() ** 0.5)
        else:
            tensor.normal_(mean=float(name.endswith("weight")), std=0.4)
    return model
