"""Mixtures of experts in place of a block's MLP (Riquelme et al., Scaling Vision with Sparse Mixture of Experts, 2021,
arXiv 2106.05974).

Shape letters: T tokens of all images of a microbatch, D width, X experts, M hidden width of an expert, S capacity of an
expert (the most tokens that it takes), k experts of a token.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.cpu_kernels import GELU

FACTS = ("expert_load", "dropped_tokens")


@dataclass(frozen=True)
class Experts:
    """How many experts there are and how tokens are routed to them: X is `count`, k `per_token`; see `ViTModel`.

    The output of a token's one expert is multiplied by its probability (Fedus et al., Switch Transformers, 2022);
    those of two by their probabilities, divided by their sum (Lepikhin et al., GShard, 2021). The capacity is that of
    training; in evaluation it is unlimited: the prediction for an image does not depend on the images beside it.
    """

    count: int
    per_token: int = 2
    capacity_factor: float = 1.25
    priority: bool = True
    balance_loss: float = 1e-2
    z_loss: float = 1e-3

    def capacity(self, tokens: int) -> int:
        """S for a microbatch of this many tokens."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.per_token / self.count))


class Router(nn.Module):
    """A linear layer from tokens to experts, in float32 at least: rounding the logits can change the first choice."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        """Returns logits_TX."""
        wide = torch.promote_types(tokens_TD.dtype, torch.float32)
        # The meta device, where work is only counted, has no autocast.
        with nullcontext() if tokens_TD.is_meta else torch.autocast(tokens_TD.device.type, enabled=False):
            return F.linear(tokens_TD.to(wide), self.weight.to(wide))


def route(logits_TX: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """Each token's experts, `expert_kT`, the first choices before the second, and the factors of their outputs,
    `gate_kT`."""
    gate_Tk, expert_Tk = logits_TX.softmax(1).topk(per_token, dim=1)
    if per_token > 1:
        gate_Tk = gate_Tk / gate_Tk.sum(1, keepdim=True)
    return expert_Tk.t(), gate_Tk.t()


def positions_in_expert(expert_kT: Tensor, logits_TX: Tensor, *, priority: bool) -> Tensor:
    """Each token's position in its expert's queue, `position_kT`: all first choices come before any second choice."""
    count = logits_TX.shape[1]
    if not priority:
        return _occurrences(expert_kT, count)
    order_T = logits_TX.softmax(1).amax(1).argsort(descending=True, stable=True)
    return torch.empty_like(expert_kT).index_copy(1, order_T, _occurrences(expert_kT[:, order_T], count))


def _occurrences(expert_kT: Tensor, count: int) -> Tensor:
    """How often the same expert occurs before each element, in the order of memory."""
    chosen_nX = F.one_hot(expert_kT.flatten(), count)
    return (chosen_nX.cumsum(0) * chosen_nX).sum(1).sub(1).view(expert_kT.shape)


class ExpertLinear(nn.Module):
    """A linear layer for each expert: weight (X, out, in), bias (X, out)."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(count, outputs))

    def forward(self, rows_XSI: Tensor) -> Tensor:
        """(X, S, in) -> (X, S, out)."""
        return torch.baddbmm(self.bias.unsqueeze(1).to(rows_XSI.dtype), rows_XSI, self.weight.transpose(1, 2))


class ExpertsMlp(nn.Module):
    """MLPs of which a router chooses one or two for each token.

    Args:
        gelu: how GELU is computed, a key of `cpu_kernels.GELU`.
        token_dim: the input's dimension of tokens.
        keys: the number of an image's tokens, after which there is padding; None: there is no padding.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        experts: Experts,
        *,
        gelu: str = "torch",
        token_dim: int = 1,
        keys: int | None = None,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.token_dim, self.keys = token_dim, keys
        self.gelu = GELU[gelu]
        self.router = Router(width, experts.count)
        self.fc1 = ExpertLinear(experts.count, width, hidden_width)
        self.fc2 = ExpertLinear(experts.count, hidden_width, width)
        self.loss: Tensor | None = None
        self.facts: dict[str, Tensor] = {}

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        for layer in (self.fc1, self.fc2):
            for matrix in layer.weight:
                nn.init.xavier_uniform_(matrix)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        """(..., D) -> (..., D), zeros for padding.

        In training this also sets `loss`, the router's addition to the loss of this microbatch, and `facts`, numbers
        (0-dimensional tensors) about the load.
        """
        padding = 0
        if self.keys is not None:
            padding = features.shape[self.token_dim] - self.keys
            features = features.narrow(self.token_dim, 0, self.keys)
        tokens_TD = features.flatten(0, -2)
        logits_TX = self.router(tokens_TD)
        expert_kT, gate_kT = route(logits_TX, self.experts.per_token)
        if self.training:
            capacity = self.experts.capacity(tokens_TD.shape[0])
            position_kT = positions_in_expert(expert_kT, logits_TX.detach(), priority=self.experts.priority)
            self._record_loss(logits_TX, expert_kT, position_kT, capacity)
            out_TD = self.within_capacity(tokens_TD, expert_kT, gate_kT, position_kT, capacity)
        elif torch.compiler.is_exporting():
            out_TD = self.every_expert(tokens_TD, expert_kT, gate_kT)
        else:
            out_TD = self.expert_by_expert(tokens_TD, expert_kT, gate_kT)
        out = out_TD.view(features.shape)
        return F.pad(out, (0, 0) * (features.dim() - 1 - self.token_dim) + (0, padding)) if padding else out

    def within_capacity(
        self, tokens_TD: Tensor, expert_kT: Tensor, gate_kT: Tensor, position_kT: Tensor, capacity: int
    ) -> Tensor:
        """The experts' outputs from batched products over (X, S, ...): shapes do not depend on the routing, so the host
        never waits for the device. Tokens beyond the capacity get zeros."""
        count = self.experts.count
        # The last row is for all tokens beyond the capacity.
        slot_n = (expert_kT * capacity + position_kT).masked_fill(position_kT >= capacity, count * capacity).flatten()
        sent_nD = tokens_TD.repeat(self.experts.per_token, 1)
        rows = tokens_TD.new_zeros(count * capacity + 1, tokens_TD.shape[1]).index_copy(0, slot_n, sent_nD)
        out_XSD = self.fc2(self.gelu(self.fc1(rows[:-1].unflatten(0, (count, capacity)))))
        out_nD = F.pad(out_XSD.flatten(0, 1), (0, 0, 0, 1))[slot_n]
        return (out_nD.unflatten(0, expert_kT.shape) * gate_kT.unsqueeze(2).to(out_nD.dtype)).sum(0)

    def expert_by_expert(self, tokens_TD: Tensor, expert_kT: Tensor, gate_kT: Tensor) -> Tensor:
        """The same without a limit, one expert after the other; the host waits to learn how many tokens each has."""
        count = self.experts.count
        order_n = expert_kT.flatten().argsort(stable=True)
        if tokens_TD.is_meta:
            # Operations are only counted, as for an even load.
            shares = [len(order_n) * (x + 1) // count - len(order_n) * x // count for x in range(count)]
        else:
            shares = expert_kT.flatten().bincount(minlength=count).tolist()
        token_n = order_n % tokens_TD.shape[0]
        layers = zip(self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, strict=True)
        outs = [
            F.linear(self.gelu(F.linear(part, w1, b1)), w2, b2)
            for part, (w1, b1, w2, b2) in zip(tokens_TD[token_n].split(shares), layers, strict=True)
        ]
        out_nD = torch.cat(outs)
        gate_n1 = gate_kT.flatten()[order_n].unsqueeze(1).to(out_nD.dtype)
        return torch.zeros_like(tokens_TD, dtype=out_nD.dtype).index_add(0, token_n, out_nD * gate_n1)

    def every_expert(self, tokens_TD: Tensor, expert_kT: Tensor, gate_kT: Tensor) -> Tensor:
        """The same with every expert applied to every token, for exported programs, whose shapes are fixed."""
        gate_TX = gate_kT.new_zeros(tokens_TD.shape[0], self.experts.count).scatter(1, expert_kT.t(), gate_kT.t())
        out_XTD = self.fc2(self.gelu(self.fc1(tokens_TD.expand(self.experts.count, -1, -1))))
        return (out_XTD * gate_TX.t().unsqueeze(2).to(out_XTD.dtype)).sum(0)

    def _record_loss(self, logits_TX: Tensor, expert_kT: Tensor, position_kT: Tensor, capacity: int) -> None:
        count = self.experts.count
        first_X = F.one_hot(expert_kT[0], count).to(logits_TX.dtype).mean(0)
        balance = count * (first_X * logits_TX.softmax(1).mean(0)).sum()
        z = logits_TX.logsumexp(1).square().mean()
        loss = self.experts.balance_loss * balance + self.experts.z_loss * z
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            # Not what is computed again in the backward pass: it would keep the activations that led to it.
            self.loss = loss
        # The load of the fullest expert, where 1 is an even load; and the share of the choices beyond the capacity.
        load = count * F.one_hot(expert_kT.flatten(), count).to(logits_TX.dtype).mean(0).amax()
        dropped = (position_kT >= capacity).to(logits_TX.dtype).mean()
        self.facts = dict(zip(FACTS, (load, dropped), strict=True))
