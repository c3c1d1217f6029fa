"""Parts of a network by patterns of their names, as in `optim.trainable` and `precision.fp8_skip`."""

from __future__ import annotations

import difflib
import fnmatch

from torch import nn

from pycls_fast.errors import UserError

HEAD = "head"


def named_parts(network: nn.Module, pattern: str, *, head: str) -> list[str]:
    """Qualified names of the modules and parameters that match.

    Args:
        network: any network.
        pattern: a qualified name, with * for any part of it, or "head".
        head: qualified name of the final linear layer.
    """
    names = [name for name, _ in network.named_modules() if name]
    names += [name for name, _ in network.named_parameters()]
    wanted = head if pattern == HEAD else pattern
    return [name for name in names if fnmatch.fnmatchcase(name, wanted)]


def is_inside(name: str, parts: list[str]) -> bool:
    """Whether a module or parameter is one of the parts or within one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def unknown_part(key: str, pattern: str, network: nn.Module, *, what: str, words: tuple[str, ...]) -> UserError:
    """The error for a pattern without a match.

    Args:
        key: the configuration key that has it.
        pattern: the pattern.
        network: the network.
        what: what it should have named, after "names".
        words: what the key takes besides names.
    """
    names = [name for name, _ in network.named_modules() if name]
    near = difflib.get_close_matches(pattern, [*words, *names], n=1, cutoff=0.5)
    top = ", ".join(name for name, _ in network.named_children())
    return UserError(
        f"{key}: {pattern} names {what}{f'; did you mean {near[0]}?' if near else ''}; use {', '.join(words)}, or "
        f"names of its parts ({top}), with * for any part of a name"
    )
