"""Features: what a network's last linear layer gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from pycls_fast.network import Network


@contextmanager
def head_inputs(network: Network) -> Iterator[list[Tensor]]:
    """A list that receives the last layer's input of each forward pass in the context, float32 (B, D), on the CPU."""
    seen: list[Tensor] = []
    handle = network.last_layer().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()
