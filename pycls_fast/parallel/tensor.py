"""Tensor parallelism with sequence parallelism: neighbouring ranks compute each block together.

Shoeybi et al., Megatron-LM, 2019, section 3: queries, keys, values and an MLP's first layer are divided by their
outputs (whole heads), the layers after them by their inputs, so that a branch needs no exchange inside. Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2: between branches each rank
holds a part of the tokens; a branch begins with an all-gather and ends with a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pycls_fast.network import Division, Network

# Features are (B, N, D): tokens are dimension 1. Attention works on plain tensors, its own heads.
_TOKENS, _HEADS = Shard(1), 1
_STYLES: dict[Division, ParallelStyle] = {
    "tokens": SequenceParallel(sequence_dim=1, use_local_output=True),
    "heads": SequenceParallel(sequence_dim=_HEADS, use_local_output=True),
    "branch": PrepareModuleInput(input_layouts=_TOKENS, desired_input_layouts=Replicate()),
    "whole": PrepareModuleInputOutput(
        input_layouts=_TOKENS,
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=_TOKENS,
    ),
    "outputs": ColwiseParallel(),
    "inputs": RowwiseParallel(output_layouts=_TOKENS),
}


def divide(network: Network, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Divide neighbouring blocks over a mesh of one dimension, in place; they may be on the meta device.

    Parameters keep their names and become DTensors. What is outside the blocks is computed by every rank alike, as are
    routers; `divide_experts` divides what is behind these.

    Args:
        network: says how (`divisions`).
        blocks: their number of tokens is a multiple of the ranks, as are their heads and the MLPs' width.
        mesh: the ranks that compute the blocks together, which see the same images.
    """
    for block in blocks:
        parallelize_module(block, mesh, {name: _STYLES[kind] for name, kind in network.divisions(block).items()})

    def own_tokens(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return _placed(inputs[0], mesh, Replicate(), _TOKENS)

    def all_tokens(module: nn.Module, inputs: Any, features_BND: Tensor) -> Tensor:
        # A copy: FSDP warns of views.
        return _placed(features_BND, mesh, _TOKENS, Replicate()).clone()

    blocks[0].register_forward_pre_hook(own_tokens)
    blocks[-1].register_forward_hook(all_tokens)


def _placed(tensor: Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> Tensor:
    whole: DTensor = DTensor.from_local(tensor, mesh, [before], run_check=False)
    return whole.redistribute(mesh, [after]).to_local()


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether each of the ranks that compute the model together has another part of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and isinstance(parameter.placements[names.index("tensor")], Shard)
