"""Sharding by FairScale's FullyShardedDataParallel (0.4.13), with one flat parameter per optimizer group.

Parameters, gradients and optimizer state are sharded over the ranks, as in ZeRO-3 (Rajbhandari et al. 2020, arXiv
1910.02054). Each repeated unit is one wrapper, and so is the rest of the network around them. FairScale's own
flattening makes one tensor of a whole wrapper, which can have only one weight decay; here a wrapper has one flat tensor
for each optimizer group in it: FairScale's FlattenParamsWrapper inside a wrapper that flattens nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.optim import BATCH_NORM, NORMS, CastOutput, cast_buffers
from pycls_fast.parallel.flat import Flat, FlatShards
from pycls_fast.parallel.materialise import is_empty
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrapped import StrategySettings, Wrapped


def shard(network: Network, world: World, settings: StrategySettings) -> Wrapped:
    """Wrap the network unit by unit; afterwards a rank holds its shard of each flat parameter, in float32.

    Weights are gathered in `settings.compute`; gradients are reduced in float32. Under a half format, batch norms (with
    `settings.wide_norms`: all norms) get their own wrappers, which stay float32.

    Args:
        network: on the device, or on the meta device: then each unit, before it is sharded, gets the values of a direct
            build on the CPU with torch's current seed, and no rank ever holds more than one whole unit and the rest
            around the units.
        world: the ranks, with their mesh.
        settings: with the optimizer's `groups`.

    Raises:
        UserError: no CUDA device, or FairScale is not installed.
    """
    wrap = _Wrapping(world, settings)
    waiting = dict(network.units())
    for module, fill in _empty_parts(network):
        module.to_empty(device="cpu")
        fill(module)
        module.to(world.device)
        for name in [name for name, unit in waiting.items() if not is_empty(unit)]:
            _replace(network, name, wrap(name, waiting.pop(name)))
    for name, unit in waiting.items():
        _replace(network, name, wrap(name, unit))
    root: Any = wrap("", network)
    # FairScale would cast float32 images to float16, whatever the compute format.
    root.register_forward_pre_hook(_Cast(settings.compute or torch.float32))
    free_gathered = partial(_free, root)
    assert world.mesh is not None
    weights = FlatShards(list(_flats(root)), _buffers(network), settings.groups, world.mesh, free_gathered)

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        # ZeRO-3 reduces after every microbatch, so that no rank holds whole gradients, and accumulates in float32.
        return nullcontext() if is_last or settings.reshard_after_forward else root.no_sync()

    return Wrapped(
        forward=root,
        evaluated=root,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=settings.reshard_after_forward,
        forward_is_collective=True,
        shard_group=world.mesh.get_group(),
        free_gathered=free_gathered,
        weights=weights,
    )


class _Wrapping:
    """Makes FairScale's wrappers, from the inside out."""

    def __init__(self, world: World, settings: StrategySettings) -> None:
        try:
            from fairscale.nn.data_parallel import FullyShardedDataParallel
            from fairscale.nn.misc import FlattenParamsWrapper
        except ImportError as error:
            raise UserError(
                "parallel.name: fairscale_fsdp needs FairScale, which is not installed; pip install fairscale, or use "
                "parallel=fsdp"
            ) from error
        _accept_old_names()
        self._fsdp, self._flatten = FullyShardedDataParallel, FlattenParamsWrapper
        self._group_of = {name: index for index, group in enumerate(settings.groups) for name in group["params"]}
        self._compute, self._wide_norms = settings.compute, settings.wide_norms
        narrow = settings.compute is not None
        compute = settings.compute or torch.float32
        self._common: dict[str, Any] = {
            "process_group": dist.group.WORLD,
            # A separate group, so that gradients are reduced while weights are gathered.
            "process_group_reduce_scatter": dist.new_group(timeout=world.timeout),
            "compute_device": world.device,
            "flatten_parameters": False,
            "reshard_after_forward": settings.reshard_after_forward,
            "mixed_precision": narrow,
            "fp32_reduce_scatter": narrow,
            "compute_dtype": compute,
            "buffer_dtype": compute,
        }
        self._wide: dict[str, Any] = self._common | {
            # Small enough to keep; and a wrapper inside a recomputed unit must not gather again.
            "reshard_after_forward": False,
            "mixed_precision": False,
            "fp32_reduce_scatter": False,
            "compute_dtype": torch.float32,
            "buffer_dtype": torch.float32,
        }

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        """Wrap the module that is called `name` in the network; norms that stay float32 get their own wrappers."""
        if self._compute is not None:
            for inner_name, inner in list(module.named_modules()):
                # Skip what is inside a wrapper already.
                if isinstance(inner, NORMS) and plain_name(f"{inner_name}.") == f"{inner_name}.":
                    path = f"{name}.{inner_name}".strip(".")
                    if isinstance(inner, BATCH_NORM):
                        # Takes half-precision maps as they are, with float32 weights and statistics.
                        _replace(module, inner_name, self._wrap(path, inner, self._wide))
                    elif self._wide_norms:
                        inner.register_forward_pre_hook(_Cast(torch.float32))
                        norm = self._wrap(path, inner, self._wide)
                        norm.register_forward_hook(CastOutput(self._compute))
                        _replace(module, inner_name, norm)
            # FairScale would do this in the first forward pass; done here, buffers stay the same tensors from now on.
            cast_buffers(module, self._compute)
        return self._wrap(name, module, self._common)

    def _wrap(self, name: str, module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
        found: dict[int, list[nn.Parameter]] = {}
        for inner, parameter in module.named_parameters(prefix=name):
            # Skip the parameters of inner wrappers.
            if plain_name(inner) == inner:
                found.setdefault(self._group_of.get(inner, -1), []).append(parameter)
        if found:
            module = self._flatten(module, param_list=[found[group] for group in sorted(found)])
        made: nn.Module = self._fsdp(module, **settings)
        return made


class _Cast:
    """A pre-hook that casts floating-point inputs (an object, not a closure, so that a model can be copied)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(self._dtype) for x in inputs)


def _empty_parts(network: Network) -> Sequence[Any]:
    """Modules of a network on the meta device, with their initialisers, in the order of their random draws."""
    return list(network.initialisers()) if is_empty(network) else []


def _flats(root: nn.Module) -> Iterator[Flat]:
    from fairscale.nn.misc import FlattenParamsWrapper

    for path, module in root.named_modules():
        for flat in module.flat_params if isinstance(module, FlattenParamsWrapper) else ():
            names, shapes, _ = flat.metadata()
            prefix = plain_name(f"{path}.")
            yield Flat(flat, tuple(prefix + plain_name(name) for name in names), tuple(shapes))


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, under the network's own names."""
    return {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in network.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _free(root: nn.Module) -> None:
    """Free all gathered weights, as FairScale itself does after loading shards."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and any(hasattr(p, "_fp32_shard") for p in module.params):
            module._free_full_params()


def plain_name(name: str) -> str:
    """A wrapped network's qualified name without the wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)


def _accept_old_names() -> None:
    """Silence torch's warnings about deprecated names in FairScale, which no user can change."""
    for text in ("TypedStorage is deprecated", r".*torch\.distributed\._.*_base"):
        warnings.filterwarnings("ignore", message=text, module=r"fairscale\..*")
    # Compiled units read weights that are views of a flat parameter.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", module="torch.*")
