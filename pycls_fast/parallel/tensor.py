"""Blocks and experts that ranks divide among them.

Tensor parallelism with sequence parallelism, of ranks that see the same images: Shoeybi et al., Megatron-LM, 2019,
section 3: queries, keys, values and an MLP's first layer are divided by their outputs (whole heads), the layers after
them by their inputs, so that a branch needs no exchange inside. Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022, section 4.2.2: between branches each rank holds a part of the tokens;
a branch begins with an all-gather and ends with a reduce-scatter.

Expert parallelism, of ranks that see different images: Lepikhin et al., GShard, 2021, section 3; Rajbhandari et al.,
DeepSpeed-MoE, 2022. In training each expert has the same capacity for every rank, so one all-to-all sends tokens to
their experts and another one sends them back. In evaluation a rank may have fewer images than others, so weights are
sent instead. Ranks that see the same images route them alike and divide each expert by its hidden width, as any MLP.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
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

    Parameters keep their names and become DTensors. Every rank computes what is outside the blocks, and routers;
    `divide_experts` divides the experts.

    Args:
        blocks: their numbers of tokens and heads, and the MLPs' width, are multiples of the number of ranks.
        mesh: the ranks that compute the blocks together, which see the same images.
    """
    for block in blocks:
        frozen = [name for name, parameter in block.named_parameters() if not parameter.requires_grad]
        parallelize_module(block, mesh, {name: _STYLES[kind] for name, kind in network.divisions(block).items()})
        for name in frozen:
            # torch makes new parameters of norms, which are trained (2.15).
            block.get_parameter(name).requires_grad_(False)

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
    """Whether each of the ranks that compute the model together has a different part of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and isinstance(parameter.placements[names.index("tensor")], Shard)


# Features are (X, S, D): each rank has its own tokens for all experts, or all ranks' tokens for its own experts.
_OWN_TOKENS, _OWN_EXPERTS = Shard(1), Shard(0)


def divide_experts(network: Network, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Divide the network's experts over a mesh as `divide` does blocks.

    Args:
        network: its number of experts is a multiple of the ranks of "expert", their hidden width of those of "tensor".
        mesh: with the dimensions "expert" (ranks that see different images) and "tensor" (ranks that see the same
            ones), or one of the two.
        compute: the format of the experts' products, if it is not that of their parameters.
    """
    # FSDP warns of views, which must not be changed in place; nothing changes an expert's output in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .*ExpertLinear")

    names = mesh.mesh_dim_names or ()

    def placed(expert: Placement, tensor: Placement) -> list[Placement]:
        return [{"expert": expert, "tensor": tensor}[name] for name in names]

    # The experts' gradients are sums over these ranks, where those of all other weights are means. (torch's own factor,
    # `set_gradient_divide_factor`, divides twice if one rank has all shards; 2.15.)
    ranks = mesh["expert"].size() if "expert" in names else 1
    own_tokens, own_experts = placed(_OWN_TOKENS, Replicate()), placed(_OWN_EXPERTS, Replicate())

    def send(layer: nn.Module, inputs: tuple[Tensor]) -> DTensor:
        rows_XSD = inputs[0]
        if rows_XSD.requires_grad:
            rows_XSD.register_hook(lambda gradient: gradient * ranks)
        return DTensor.from_local(rows_XSD, mesh, own_tokens, run_check=False).redistribute(mesh, own_experts)

    def send_back(layer: nn.Module, inputs: Any, rows_XSD: DTensor) -> Tensor:
        rows = rows_XSD.redistribute(mesh, own_tokens).to_local()
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient / ranks)
        return rows

    for mixture, first, last in network.experts():
        # The first layer is divided by its outputs, the last one by its inputs, which only its matrices have.
        for layer, hidden in ((first, 1), (last, 2)):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                within = Shard(hidden) if hidden < parameter.dim() else Replicate()
                part = distribute_tensor(parameter.data, mesh, placed(_OWN_EXPERTS, within), src_data_rank=None)
                layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        first.register_forward_pre_hook(send)
        last.register_forward_hook(send_back)
        _evaluate_whole(mixture, (first, last), compute)


def _evaluate_whole(mixture: nn.Module, layers: Sequence[nn.Module], compute: torch.dtype | None) -> None:
    """Outside training, hide the sharded parameters behind whole tensors, as attributes of the same names."""
    parts = [(layer, name) for layer in layers for name, _ in layer.named_parameters(recurse=False)]

    def gather(mixture: nn.Module, inputs: Any) -> None:
        for layer, name in () if mixture.training else parts:
            part: Any = getattr(layer, name)
            vars(layer)[name] = part.full_tensor().to(compute or part.dtype)

    def free(mixture: nn.Module, inputs: Any, output: Any) -> None:
        for layer, name in () if mixture.training else parts:
            del vars(layer)[name]

    mixture.register_forward_pre_hook(gather)
    mixture.register_forward_hook(free)
