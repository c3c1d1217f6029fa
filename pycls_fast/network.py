"""The interface of every model: all that the code that shards, compiles, loads and trains it knows about it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from pycls_fast.errors import UserError, did_you_mean

Units = Sequence[tuple[str, nn.Module]]
Division = Literal["tokens", "heads", "branch", "whole", "outputs", "inputs"]
"""How several ranks share a module: each has some of the "tokens" or of the "heads" (dimension 1 of its input), all of
its parameters; a "branch" sees all tokens, and a "whole" one gives all of them too; each has some of a linear layer's
"outputs", or of its "inputs"."""


class Network(nn.Module):
    """A model that names its parts. `forward(images_BCHW)` gives logits (B, K)."""

    @property
    def head_name(self) -> str:
        """Qualified name of the linear layer that gives the logits: the last one, if this is not replaced."""
        return ["", *(name for name, module in self.named_modules() if isinstance(module, nn.Linear))][-1]

    def last_layer(self) -> nn.Linear:
        layer = self.get_submodule(self.head_name)
        assert isinstance(layer, nn.Linear)
        return layer

    @property
    def first_conv_name(self) -> str | None:
        """Qualified name of the convolution that sees the image, or None if there is not exactly one."""
        return None

    def units(self) -> Units:
        """The repeated blocks with their qualified names, in forward order, if there are any."""
        return []

    def divisions(self, unit: nn.Module) -> Mapping[str, Division]:
        """How ranks share one of `units()`, by the names of modules within it; empty if they cannot."""
        return {}

    def draws(self) -> list[int]:
        """How often each of `units()` draws a number for each image from the host's generator, in training."""
        return [0 for _ in self.units()]

    taught = False
    """Whether a teacher has a part in the loss: a network may then give, with gradients, logits (B, 2, K), of which the
    first are compared with the labels and the second with the teacher."""
    batch_dim = 0
    """The dimension of features that holds the images."""
    skips_parameters = False
    """Whether a step may leave some parameters out (mask tokens, say), which ddp then has to look for."""

    def enter(self, images_BCHW: Tensor) -> Tensor:
        """What `units()` begin with; with them and `leave`, all of `forward`."""
        raise NotImplementedError

    def leave(self, features: Tensor) -> Tensor:
        """What the last one's output becomes."""
        raise NotImplementedError

    def ends(self) -> tuple[list[str], list[str]]:
        """Names of the modules that `enter` and `leave` use; none if the network cannot be cut between units."""
        return [], []

    def experts(self) -> Sequence[tuple[nn.Module, nn.Module, nn.Module]]:
        """Each mixture of experts, with its first and its last layer: their parameters, and what goes in and comes out,
        have an expert for each index of the first dimension, and tokens along the second. The first one's parameters
        have its outputs as the second dimension, the last one's matrices their inputs as the third."""
        return []

    def auxiliary_loss(self, units: Iterable[nn.Module] | None = None) -> Tensor | None:
        """What the last forward pass adds to the mean loss of its microbatch, if anything (routers of experts): all of
        it, or the part of some of `units()`."""
        return None

    def facts(self) -> Mapping[str, Tensor]:
        """Numbers about the last forward pass in training, for the metrics: tensors of one element, on the device. Of
        a network that was cut, those of its stages are to be added."""
        return {}

    def layers(self) -> Units:
        """The blocks by which parameters are grouped, as in `units`; more if some of them take several arguments."""
        return self.units()

    def embedding_names(self) -> set[str]:
        """Parameters that are embeddings (tokens, positions)."""
        return set()

    def scale_names(self) -> set[str]:
        """Parameters that are layer scales, belong to norms that are none of torch's, or are biases by another name: as
        in timm (`timm.optim.param_groups_weight_decay`) those of one dimension, as types do not tell them."""
        return {name for name, p in self.named_parameters() if p.ndim <= 1 and name.rpartition(".")[2] != "bias"}

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module that owns values, in the order of the random draws, with the function that fills it.

        Each function reads and writes only its own module, so that a module can be filled, sharded and dropped before
        the next one takes memory. If this is not replaced, every rank builds the whole network, whose constructor
        draws them.
        """
        raise NotImplementedError

    def initialise(self) -> None:
        """Set every parameter and buffer.

        Draws from the default generator of the parameters' device. The same seed gives the same values whether the
        model was built with memory, or on the meta device followed by `to_empty`.
        """
        for module, fill in self.initialisers():
            fill(module)


HEAD = "head"


def named_parts(network: nn.Module, pattern: str, *, head: str) -> list[str]:
    """Qualified names of the modules and parameters that match: a name, with * for any part of it, or "head"."""
    names = [name for name, _ in network.named_modules() if name]
    names += [name for name, _ in network.named_parameters()]
    wanted = head if pattern == HEAD else pattern
    return [name for name in names if fnmatch.fnmatchcase(name, wanted)]


def is_inside(name: str, parts: list[str]) -> bool:
    """Whether a module or parameter is one of the parts or within one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def unknown_part(key: str, pattern: str, network: nn.Module, *, what: str, words: tuple[str, ...]) -> UserError:
    """The error for a key's pattern that "names" `what`; the key takes these words besides names."""
    names = [name for name, _ in network.named_modules() if name]
    near = did_you_mean(pattern, [*words, *names], cutoff=0.5)
    top = ", ".join(name for name, _ in network.named_children())
    return UserError(
        f"{key}: {pattern} names {what}{near}; use {', '.join(words)}, or names of its parts ({top}), with * for any "
        "part of a name"
    )
