"""Compiled blocks share their code under every strategy: few graphs at any depth, and none that breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.parallel import World, place_model, start_world
from pycls_fast.parallel.compile import _WithBudget
from pycls_fast.train.assemble import make_step

# dynamo asks inputs for a gradient that only leaves have; it is torch's own call.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

CPU = torch.device("cpu")
SMALL = ["model.width=32", "model.mlp_width=36", "data.image_size=8", "model.drop_path=0.3", "speed.compile=blocks"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with start_world(device="cpu", backend="gloo", timeout_seconds=60, strategy="fsdp") as made:
        yield made


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """dynamo's, with a backend that compiles nothing."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    compile_module = nn.Module.compile

    def traced(self: nn.Module, *, dynamic: bool | None, backend: Any = "aot_eager", **_: Any) -> None:
        compile_module(self, dynamic=dynamic, backend=backend)

    def untouched(graph: Any, inputs: Any, config_patches: Any) -> Any:
        return aot_eager(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", untouched)
    monkeypatch.setattr(nn.Module, "compile", traced)
    monkeypatch.setattr(build.network, "need_compiler", lambda *_: None)
    torch._dynamo.reset()
    yield counters
    torch._dynamo.reset()


AMP = ["precision=amp_bf16"]
CASES = [
    *((strategy, [*AMP, f"speed.recompute={how}"]) for strategy, how in (("single", "selective"), ("fsdp", "full"))),
    ("fsdp", [*AMP, "speed.recompute=budget"]),
    ("fsdp", ["precision=fp16_master"]),
    ("single", ["precision=fp32", "model.drop_path_rule=constant"]),
]


@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        *((strategy, AMP) for strategy in ("single", "ddp", "fsdp")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_two_graphs_at_any_depth(world: World, counters: Any, strategy: str, overrides: list[str]) -> None:
    """One for the first block, which drops nothing, and one for all others, whose rates differ."""
    found = []
    for depth in (3, 5):
        torch._dynamo.reset()
        counters.clear()
        config = load_config("vit_digits", [*SMALL, f"parallel={strategy}", f"model.depth={depth}", *overrides])
        switches = build.switches(config, CPU)
        network = build.model(config, 10, switches, empty=build.is_sharded(config, world))
        network = place_model(network, world, memory_format="contiguous")
        step = make_step(config, network, world, switches, steps_per_epoch=4)
        narrow = build.level(config).weights != "float32"
        images = torch.randn(2, 3, 8, 8, dtype=build.compute_dtype(config) if narrow else torch.float32)
        for _ in range(2):
            with step.wrapped.exchange(True), step.autocast():
                step.wrapped.forward(images).sum().backward()
        assert not counters["graph_break"]
        found.append(counters["stats"]["unique_graphs"])
    assert found == ([1, 1] if "model.drop_path_rule=constant" in overrides else [2, 2])


@pytest.mark.slow
@pytest.mark.skipif(not build.has_compiler("cpu"), reason="needs a C++ compiler")
def test_a_budget_keeps_less_and_computes_the_same() -> None:
    """What a linear layer and GELU save for the backward pass, by the bytes that autograd holds."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Cheap to recompute: a chain of element-wise operations between two products.
    layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32))
    inputs = torch.randn(64, 32, requires_grad=True)
    held, gradients = [], []
    for budget in (1.0, 0.3):
        compiled = torch.compile(layers, backend=_WithBudget({}, budget), dynamic=False)
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = compiled(inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, inputs)
        held.append(sum(saved.values()))
        gradients.append(gradient)
        torch._dynamo.reset()
    assert held[1] < held[0]
    torch.testing.assert_close(gradients[0], gradients[1])
