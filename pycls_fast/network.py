"""What every model offers to the parts that shard, compile, load and train it, which know no model's class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

Units = Sequence[tuple[str, nn.Module]]


class Network(nn.Module):
    """A model that names its parts. `forward(images_BCHW)` gives logits (B, K)."""

    @property
    def head_name(self) -> str:
        """Qualified name of the final linear layer."""
        raise NotImplementedError

    @property
    def first_conv_name(self) -> str | None:
        """Qualified name of the one layer that sees the image, where there is one."""
        raise NotImplementedError

    def units(self) -> Units:
        """The repeated blocks with their qualified names, in forward order."""
        raise NotImplementedError

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module that owns values, in the order of the draws, and what fills it.

        A part reads and writes its own module alone, so that each can be filled, cut over ranks and dropped before the
        next one takes memory.
        """
        raise NotImplementedError

    def initialise(self) -> None:
        """Set every parameter and buffer.

        Draws from the default generator of the parameters' device: the same seed gives the same values, on a
        model just built as on one that was built on the meta device and given memory with `to_empty`.
        """
        for module, fill in self.initialisers():
            fill(module)
