"""The interface of every model: all that the code that shards, compiles, loads and trains it knows about it."""

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

    def last_layer(self) -> nn.Linear:
        """The final linear layer."""
        layer = self.get_submodule(self.head_name)
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def first_conv_name(self) -> str | None:
        """Qualified name of the layer that sees the image, or None if there is not exactly one."""
        raise NotImplementedError

    def units(self) -> Units:
        """The repeated blocks with their qualified names, in forward order."""
        raise NotImplementedError

    def layers(self) -> Units:
        """The blocks by which parameters are grouped, as in `units`; more if some of them take several arguments."""
        return self.units()

    def embedding_names(self) -> set[str]:
        """Parameters that are embeddings (tokens, positions), if that cannot be recognised by their owner's type."""
        return set()

    def scale_names(self) -> set[str]:
        """Parameters that are layer scales or belong to norms, if that cannot be recognised by their owner's type."""
        return set()

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module that owns values, in the order of the random draws, with the function that fills it.

        Each function reads and writes only its own module, so that a module can be filled, sharded and dropped before
        the next one takes memory.
        """
        raise NotImplementedError

    def initialise(self) -> None:
        """Set every parameter and buffer.

        Draws from the default generator of the parameters' device. The same seed gives the same values whether the
        model was built with memory, or on the meta device followed by `to_empty`.
        """
        for module, fill in self.initialisers():
            fill(module)
