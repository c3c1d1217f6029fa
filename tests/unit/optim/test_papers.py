"""LAMB, Lion, Adafactor and Muon against their papers' formulas, written out in float64; 8-bit AdamW near AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.optimizers import compile_step, set_lr
from tests.factories import compiles, make_optimizer

# Factored by Adafactor: (40, 33) and (36, 2, 35), along the two large axes.
SHAPES = [(), (7,), (40, 33), (33, 31), (36, 2, 35), (4, 3, 2, 2)]
DECAYS = [0.3, 0.0, 0.05]
STEPS = 20

State = dict[str, Tensor]
Update = Callable[[Tensor, Tensor, State, float, float, int], Tensor]
Groups = list[dict[str, object]]


def mean_update(state: State, name: str, value: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    return state[name]


def lamb_formula(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
    """You et al. (2020), algorithm 2, with bias correction; no ratio without decay, as NVLAMB."""
    m = mean_update(state, "m", g, 0.8) / (1 - 0.8**t)
    v = mean_update(state, "v", g * g, 0.95) / (1 - 0.95**t)
    u = m / (v.sqrt() + 1e-3) + decay * w
    return w - lr * (w.norm() / u.norm() if decay else 1.0) * u


def lion_formula(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
    """Chen et al. (2023), algorithm 2."""
    before = state.get("m", torch.zeros_like(g))
    mean_update(state, "m", g, 0.95)
    return w - lr * ((0.8 * before + 0.2 * g).sign() + decay * w)


def adafactor_formula(threshold: float | None) -> Update:
    """Shazeer and Stern (2018), algorithm 4, with Zhai et al.'s (2022) momentum and cap; AdamW's decay."""

    def update(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
        beta = min(0.9, 1 - t**-0.8)
        squares = g * g + 1e-30
        large = sorted(range(g.ndim), key=lambda axis: g.shape[axis])[-2:]
        if len(large) == 2 and min(g.shape[axis] for axis in large) >= 32:
            a, b = large
            rows = mean_update(state, "rows", squares.sum(a, keepdim=True), beta)
            columns = mean_update(state, "columns", squares.sum(b, keepdim=True), beta)
            # Equation of section 3: the outer product over the total.
            v = rows * columns / rows.sum(b, keepdim=True)
        else:
            v = mean_update(state, "v", squares, beta)
        u = g / v.sqrt()
        if threshold is not None:
            u = u / max(1.0, (u.square().mean().sqrt() / threshold).item())
        return w - lr * decay * w - lr * mean_update(state, "m", u, 0.8)

    return update


def muon_formula(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
    """Jordan et al. (2024), with Liu et al.'s (2025, equation 4) scale; matrices only, convolutions flattened."""
    m = mean_update(state, "m", g, 0.9)
    x = (0.1 * g + 0.9 * m).flatten(1)
    rows, columns = x.shape
    x = x / x.norm()
    if rows > columns:
        x = x.mT
    for _ in range(4):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    if rows > columns:
        x = x.mT
    return w - lr * decay * w - lr * 0.2 * math.sqrt(max(rows, columns)) * x.reshape(w.shape)


def adamw_formula(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
    m = mean_update(state, "m", g, 0.8) / (1 - 0.8**t)
    v = mean_update(state, "v", g * g, 0.95) / (1 - 0.95**t)
    return w - lr * decay * w - lr * m / (v.sqrt() + 1e-3)


MOMENTS = {"betas": (0.8, 0.95), "eps": 1e-3}
# What the formulas have as numbers.
KEYS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True}, "adamw": MOMENTS, "lamb": MOMENTS, "lion": {"betas": (0.8, 0.95)},
}  # fmt: skip


def classic(name: str, implementation: str) -> Callable[[Groups], Optimizer]:
    return lambda groups: make_optimizer(name, groups, lr=9.0, implementation=implementation, **KEYS[name])


def make_adafactor(threshold: float | None, momentum_dtype: str = "float32") -> Callable[[Groups], Optimizer]:
    return lambda groups: make_optimizer(
        "adafactor", groups, lr=9.0, momentum=0.8, momentum_dtype=momentum_dtype, beta2_decay=0.8, beta2_cap=0.9,
        min_factored=32, clip_threshold=threshold,
    )  # fmt: skip


def make_muon(groups: Groups, eps: float = 1e-3) -> Optimizer:
    # None is timm's own.
    keys: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "newton_schulz_steps": 4, "betas": (0.8, 0.95)}
    return make_optimizer("muon", groups, lr=9.0, eps=eps, **keys)


def errors(
    make: Callable[[Groups], Optimizer],
    formula: Callable[[nn.Parameter], Update],
    dtype: torch.dtype,
    *,
    shapes: list[tuple[int, ...]] = SHAPES,
    after: Callable[[Optimizer], object] | None = None,
) -> float:
    """The largest difference to the formula after random steps, relative to what a parameter moved."""
    generator = torch.Generator().manual_seed(3)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    groups: Groups = []
    own: list[tuple[nn.Parameter, float, float]] = []
    for decay, scale in zip(DECAYS, (1.0, 0.1, 2.0), strict=True):
        for hidden in (True, False):
            parameters = [nn.Parameter(random(s).to(dtype)) for s in shapes if (len(s) >= 2) == hidden]
            groups.append({"params": parameters, "weight_decay": decay, "lr_scale": scale, "hidden": hidden})
            own += [(parameter, decay, scale) for parameter in parameters]
    groups = [group for group in groups if group["params"]]
    start = [parameter.detach().double().clone() for parameter, _, _ in own]
    expected = list(start)
    states: list[State] = [{} for _ in own]
    optimizer = make(groups)
    if after is not None:
        after(optimizer)
    for step in range(STEPS):
        lr = 0.05 * (1 + math.sin(step)) + 1e-3
        set_lr(optimizer, lr)
        for i, (parameter, decay, scale) in enumerate(own):
            gradient = random(tuple(parameter.shape)).to(dtype)
            parameter.grad = gradient
            update = formula(parameter)
            expected[i] = update(expected[i], gradient.double(), states[i], lr * scale, decay, step + 1)
        optimizer.step()
    return max(
        ((parameter.detach().double() - wanted).norm() / (wanted - before).norm()).item()
        for (parameter, _, _), wanted, before in zip(own, expected, start, strict=True)
    )


PRECISIONS = [(torch.float64, 1e-13), (torch.float32, 1e-5)]


@pytest.mark.parametrize("threshold", [None, 0.7])
@pytest.mark.parametrize(
    ("dtype", "momentum_dtype", "tolerance"),
    [(torch.float64, "float32", 1e-6), (torch.float32, "float32", 1e-5), (torch.float32, "bfloat16", 1e-2)],
)
def test_adafactor(threshold: float | None, dtype: torch.dtype, momentum_dtype: str, tolerance: float) -> None:
    made = make_adafactor(threshold, momentum_dtype)
    assert errors(made, lambda _: adafactor_formula(threshold), dtype) < tolerance


def test_muon_on_hidden_groups_and_adamw_on_the_others() -> None:
    """timm iterates in bfloat16, so matrices agree to its rounding, the rest to that of float64."""

    def formula(parameter: nn.Parameter) -> Update:
        return muon_formula if parameter.ndim >= 2 else adamw_formula

    assert errors(make_muon, formula, torch.float64) < 0.03
    assert errors(make_muon, formula, torch.float64, shapes=[(), (7,), (300,)]) < 1e-13
    # And the formula is told from others by more than that.
    assert errors(make_muon, lambda _: adamw_formula, torch.float64) > 0.1


def test_the_eps_of_adamw_does_not_reach_the_matrices() -> None:
    """timm's `eps` is also the least norm in the Newton-Schulz iteration: small gradients would get smaller steps."""
    gradient, ended = 1e-3 * torch.randn(6, 4), []
    for eps in (1e-8, 1.0):
        matrix = nn.Parameter(torch.zeros(6, 4))
        optimizer = make_muon([{"params": [matrix], "hidden": True}], eps)
        matrix.grad = gradient.clone()
        optimizer.step()
        ended.append(matrix.detach())
    assert ended[0].abs().max() > 0.1
    assert torch.equal(*ended)


def sgd_formula(w: Tensor, g: Tensor, state: State, lr: float, decay: float, t: int) -> Tensor:
    g = g + decay * w
    state["b"] = g if t == 1 else 0.9 * state["b"] + g
    return w - lr * (g + 0.9 * state["b"])


FORMULAS = {"sgd": sgd_formula, "adamw": adamw_formula, "lamb": lamb_formula, "lion": lion_formula}
EVERY = [(name, which) for name in FORMULAS for which in Chosen.choices()[name].implementations]
COMPILED = [(name, which) for name in FORMULAS for which in Chosen.choices()[name].compilable]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_formula(name: str, implementation: str, dtype: torch.dtype, tolerance: float) -> None:
    assert errors(classic(name, implementation), lambda _: FORMULAS[name], dtype) < tolerance


@compiles
@pytest.mark.parametrize(("name", "implementation"), COMPILED)
def test_a_compiled_step_is_as_near_to_float64_as_the_loop_and_compiles_once(name: str, implementation: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    formula = FORMULAS[name]
    reference = errors(classic(name, "loop"), lambda _: formula, torch.float32)
    fast = errors(classic(name, implementation), lambda _: formula, torch.float32, after=compile_step)
    # The tensors of the rates are float32.
    assert 0 < fast <= 4 * reference + 1e-7
    # Once to make the state, once to use it; twenty rates do not count.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@compiles
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(("name", "implementation"), [("adamw", "loop"), ("adamw", "foreach"), ("lamb", "loop")])
def test_a_compiled_step_at_a_rate_of_zero_changes_nothing(
    name: str, implementation: str, flushed: bool, request: pytest.FixtureRequest
) -> None:
    """The first step of a warm-up, on a network whose head of zeros gives the weights behind it no gradient; also where
    a library has denormals flushed to zero."""
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor does not flush denormals")
    torch._dynamo.reset()
    weights = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.zeros(5))]
    before = [weight.detach().clone() for weight in weights]
    groups = [{"params": weights, "weight_decay": 0.1}]
    optimizer = make_optimizer(name, groups, lr=9.0, betas=(0.9, 0.999), eps=1e-8, implementation=implementation)
    compile_step(optimizer)
    set_lr(optimizer, 0.0)
    for weight, gradient in zip(weights, (torch.zeros(4, 5), torch.ones(5)), strict=True):
        weight.grad = gradient
    optimizer.step()
    assert all(torch.allclose(a, b, rtol=0, atol=1e-29) for a, b in zip(weights, before, strict=True))


@compiles
@pytest.mark.parametrize(("name", "tolerance"), [("adafactor", 1e-2), ("muon", 3e-2)])
def test_compiled_steps_with_half_precision_inside(name: str, tolerance: float) -> None:
    torch._dynamo.reset()
    make = make_adafactor(None, "bfloat16") if name == "adafactor" else make_muon

    def formula(parameter: nn.Parameter) -> Update:
        if name == "adafactor":
            return adafactor_formula(None)
        return muon_formula if parameter.ndim >= 2 else adamw_formula

    assert errors(make, formula, torch.float32, after=compile_step) < tolerance


@compiles
def test_eight_bits_are_adamw_up_to_their_rounding() -> None:
    pytest.importorskip("torchao")

    def make(groups: Groups) -> Optimizer:
        return make_optimizer("adamw8bit", groups, lr=9.0, betas=(0.8, 0.95), eps=1e-3)

    # Small tensors have float32 moments and follow the formula; large ones have 8 bits.
    assert errors(make, lambda _: adamw_formula, torch.float32) < 1e-5
    assert 1e-4 < errors(make, lambda _: adamw_formula, torch.float32, shapes=[(64, 64), (8192,)]) < 0.1
