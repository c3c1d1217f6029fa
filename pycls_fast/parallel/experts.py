"""Expert parallelism: ranks divide the experts of a model among them and exchange tokens, or divide each expert.

Lepikhin et al., GShard, 2021, section 3; Rajbhandari et al., DeepSpeed-MoE, 2022. The ranks see different images. In
training every rank has room for as many tokens at each expert, so that one all-to-all takes them to their experts and
another one back. In evaluation a rank may have fewer images than others, so there the weights travel.

Under tensor parallelism (`tensor`) ranks that see the same images route them alike and divide each expert by its hidden
width, as any MLP.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pycls_fast.network import Network

# Features are (X, S, D): each rank has its own tokens for all experts, or all ranks' tokens for its own experts.
_OWN_TOKENS, _OWN_EXPERTS = Shard(1), Shard(0)


def divide_experts(network: Network, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Divide the network's experts over a mesh, in place; the network may be on the meta device.

    Parameters keep their names and become DTensors.

    Args:
        network: its number of experts is a multiple of the ranks of "expert", their hidden width of those of "tensor".
        mesh: of the dimensions "expert", ranks that see different images, and "tensor", ranks that see the same ones;
            or of one of them.
        compute: the format of the experts' products, if it is not that of their parameters.
    """

    # On a CPU, gloo gathers instead.
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    # Nothing changes what leaves an expert in place.
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
    """Outside training hide the parts of the parameters behind whole tensors, as attributes of the same name."""
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
