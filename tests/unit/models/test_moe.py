"""Mixtures of experts: capacity and loop against plain references, the losses, one expert as a dense MLP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pycls_fast.models.moe import Experts, ExpertsMlp, Router, positions_in_expert, route
from pycls_fast.models.pretrained import fit, read_weights
from pycls_fast.optim.groups import freeze
from tests.factories import randomise, small_vit

WIDTH, HIDDEN, TOKENS = 8, 12, 40


def layer(**changes: object) -> ExpertsMlp:
    torch.manual_seed(0)
    experts = dataclasses.replace(Experts(count=4, capacity_factor=100.0), **changes)
    made = ExpertsMlp(WIDTH, HIDDEN, experts).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, TOKENS // 2, WIDTH, dtype=torch.float64)


def output_and_gradients(mlp: ExpertsMlp, features: Tensor) -> list[Tensor]:
    features = features.clone().requires_grad_()
    out = mlp(features)
    gradients = torch.autograd.grad(out.square().sum(), [features, *mlp.parameters()])
    return [out.detach(), *gradients]


@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("priority", [False, True])
def test_with_room_for_all_it_equals_the_loop_over_experts(per_token: Literal[1, 2], priority: bool) -> None:
    mlp = layer(per_token=per_token, priority=priority)
    batched, looped = output_and_gradients(mlp.train(), tokens()), output_and_gradients(mlp.eval(), tokens())
    torch.testing.assert_close(batched, looped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_token", [1, 2])
def test_the_loop_is_the_weighted_sum_of_each_tokens_experts(per_token: Literal[1, 2]) -> None:
    mlp = layer(per_token=per_token).eval()
    features = tokens()
    expected = []
    for token in features.flatten(0, 1):
        probabilities = (mlp.router.weight @ token).softmax(0)
        best = probabilities.argsort(descending=True)[:per_token].tolist()
        gates = probabilities[best] / (probabilities[best].sum() if per_token == 2 else 1)
        hidden = [mlp.gelu(mlp.fc1.weight[x] @ token + mlp.fc1.bias[x]) for x in best]
        outs = [mlp.fc2.weight[x] @ h + mlp.fc2.bias[x] for x, h in zip(best, hidden, strict=True)]
        expected.append(sum(gate * out for gate, out in zip(gates, outs, strict=True)))
    torch.testing.assert_close(mlp(features).flatten(0, 1), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_token", [1, 2])
@pytest.mark.parametrize("priority", [False, True])
def test_without_room_the_tokens_are_left_out_that_a_plain_count_leaves_out(
    per_token: Literal[1, 2], priority: bool
) -> None:
    mlp = layer(per_token=per_token, priority=priority, capacity_factor=0.5).train()
    features = tokens().flatten(0, 1)
    logits = mlp.router(features)
    capacity = mlp.experts.capacity(TOKENS)
    expert_kT, _ = route(logits, per_token)
    position_kT = positions_in_expert(expert_kT, logits, priority=priority)
    probabilities = logits.softmax(1)
    order = sorted(range(TOKENS), key=lambda t: -probabilities[t].max().item()) if priority else range(TOKENS)
    used, kept = [0] * 4, set()
    for choice in range(per_token):
        for token in order:
            expert = probabilities[token].argsort(descending=True)[choice].item()
            if used[expert] < capacity:
                used[expert] += 1
                kept.add((choice, token))
    assert kept == {(c, t) for c in range(per_token) for t in range(TOKENS) if position_kT[c, t] < capacity}
    assert 0 < len(kept) < per_token * TOKENS

    out = mlp(features)
    lost = [t for t in range(TOKENS) if not any((c, t) in kept for c in range(per_token))]
    assert not out[lost].any()
    assert mlp.facts["dropped_tokens"].item() == pytest.approx(1 - len(kept) / (per_token * TOKENS))


@pytest.mark.parametrize("token_dim", [0, 1])
def test_padding_takes_no_room_and_gets_zeros(token_dim: int) -> None:
    features, count = tokens(), tokens().shape[token_dim]
    padded = torch.cat([features, torch.full_like(features, 9.0)], token_dim)
    mlp = layer(per_token=2, capacity_factor=0.5).train()
    alone, alone_loss = mlp(features), mlp.loss
    mlp.token_dim, mlp.keys = token_dim, count
    out = mlp(padded)
    assert torch.equal(out.narrow(token_dim, 0, count), alone)
    assert not out.narrow(token_dim, count, count).any()
    assert mlp.loss == alone_loss


def test_an_exported_program_computes_the_same() -> None:
    mlp = layer(per_token=2).eval()
    program = torch.export.export(mlp, (tokens(),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    more = torch.cat([tokens(), 2 * tokens()])
    torch.testing.assert_close(program.module()(more), mlp(more), rtol=1e-12, atol=1e-12)


def test_the_losses_are_those_of_the_papers() -> None:
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        mlp = layer(per_token=1, balance_loss=weights[0], z_loss=weights[1]).train()
        mlp(tokens())
        logits = mlp.router(tokens().flatten(0, 1))
        probabilities = logits.softmax(1)
        first = probabilities.argmax(1)
        balance = 4 * sum((first == x).double().mean() * probabilities[:, x].mean() for x in range(4))
        z = logits.exp().sum(1).log().square().mean()
        expected = weights[0] * balance + weights[1] * z
        torch.testing.assert_close(mlp.loss, expected)
        ours, theirs = (torch.autograd.grad(loss, mlp.router.weight) for loss in (mlp.loss, expected))
        torch.testing.assert_close(ours, theirs)


def test_the_router_stays_in_float32() -> None:
    router = Router(WIDTH, 4)
    router.reset_parameters()
    features = torch.randn(5, WIDTH)
    expected = features @ router.weight.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(features), expected)
    assert router.bfloat16()(features.bfloat16()).dtype == torch.float32


def test_upcycled_from_a_dense_checkpoint_it_begins_as_the_dense_network(tmp_path: Path) -> None:
    dense = randomise(small_vit(depth=4)).float().eval()
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    sparse = small_vit(depth=4, experts=Experts(count=4, per_token=2)).eval()
    fitted = fit(read_weights(str(tmp_path / "dense.safetensors")), sparse)
    sparse.load_state_dict(fitted.tensors, strict=False)
    assert set(sparse.state_dict()) - set(fitted.tensors) == {f"blocks.{b}.mlp.router.weight" for b in (1, 3)}
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(sparse(images), dense(images), rtol=1e-4, atol=1e-5)


def test_training_sums_the_losses_of_the_routers() -> None:
    network = small_vit(depth=4, experts=Experts(count=4))
    network(torch.randn(3, 3, 32, 32))
    layers = [block.mlp for block in network.blocks if isinstance(block.mlp, ExpertsMlp)]  # type: ignore[union-attr]
    assert len(layers) == 2
    loss = network.auxiliary_loss()
    torch.testing.assert_close(loss, layers[0].loss + layers[1].loss)  # type: ignore[operator]
    facts = network.facts()
    assert facts.keys() == {"expert_load", "dropped_tokens"}
    for name, value in facts.items():
        torch.testing.assert_close(value, (layers[0].facts[name] + layers[1].facts[name]) / 2)
    assert facts["expert_load"] > 1
    loss.backward()
    assert layers[0].router.weight.grad is not None


@pytest.mark.parametrize(("trained", "count"), [("head", 0), ("blocks.3", 1)])
def test_frozen_experts_have_no_numbers(trained: str, count: int) -> None:
    network = small_vit(depth=4, experts=Experts(count=4))
    freeze(network, [trained])
    network.train()(torch.randn(3, 3, 32, 32))
    own = [layer.facts for layer in network.modules() if isinstance(layer, ExpertsMlp)][-1]
    assert network.facts() == (own if count else {})
    assert (network.auxiliary_loss() is None) == (count == 0)
