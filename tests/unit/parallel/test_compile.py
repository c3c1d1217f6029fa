"""torch.compile in place: the same function and names, few graphs at any depth, evaluation left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from small import batch, gradients, resnet, vit
from torch import nn
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

from pycls_fast import build
from pycls_fast.parallel.parallel_model import StrategySettings
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.parallel.wrap import compile_model, uncompiled, wrap_model
from pycls_fast.speed import Speed
from tests.factories import config_of, step_of

# dynamo asks inputs for a gradient that only leaves have; it is torch's own call.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Compiled so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def filled(name: str, depth: int = 12) -> Any:
    """Twelve narrow blocks, or the layers of a ResNet."""
    return vit(depth=depth, width=16, mlp_width=24, attention="sdpa") if name == "vit" else resnet()


def test_evaluation_runs_uncompiled() -> None:
    model, (images, _), calls = filled("vit").eval(), batch(), []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    model.blocks[0].compile(backend=backend)
    with torch.no_grad(), uncompiled(model):
        model(images)
    assert not calls
    with torch.no_grad():
        model(images)
    assert len(calls) == 1


def test_no_network_of_a_process_goes_back_to_eager_in_silence(counters: Any) -> None:
    """As when `time_net compare=[...]` times many variants: all count against one limit of torch's."""
    networks = [nn.Linear(2, width) for width in range(1, 13)]
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        for network in networks:
            compile_model(network, [("", network)], what="blocks")
        for network in networks:
            network(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == len(networks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_max_pools_are_torch_s(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    # ReLU: ties.
    pool: Any = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 8, 13, 10, generator=generator).to(dtype).contiguous(memory_format=memory_format)
    leaves = [maps.clone().requires_grad_() for _ in range(2)]
    expected = pool(leaves[0])
    weights = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view(expected.shape)
    (expected * weights).sum().backward()
    pool.units = lambda: [("", pool)]
    wrap_model(pool, ALONE, StrategySettings(speed=Speed(compile="blocks")))
    # torch's cache on disk does not know of decompositions.
    with fresh_cache():
        found, codes = run_fw_bw_and_get_code(lambda: pool(leaves[1]) * weights)
    for name in ("max_pool2d_with_indices", "max_pool2d_with_indices_backward"):
        assert any(f"torch.ops.aten.{name}.default(" in code for code in codes)
    assert torch.equal(found, expected * weights)
    assert found.is_contiguous(memory_format=memory_format)
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert torch.equal(leaves[1].grad, leaves[0].grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "depth"),
    [("vit", "blocks", 12), ("resnet", "blocks", 0), ("vit", "model", 3)],
    ids=["vit-blocks", "resnet-blocks", "vit-model"],
)
def test_same_gradients_and_dropped_samples(name: str, what: Any, depth: int) -> None:
    exact = gradients(filled(name, depth).double(), torch.float64)
    plain = gradients(filled(name, depth))
    model = filled(name, depth)
    before = graphs()
    compile_model(model, model.units(), what=what)
    found = gradients(model)
    compiled = graphs() - before
    # A block with drop-path and one without; in the ResNet each of the eight has its shapes or its rate.
    assert compiled == 1 if what == "model" else compiled <= (2 if name == "vit" else 8)
    largest = 0.0
    for key, value in exact.items():
        if key.endswith("key.bias"):
            continue
        own = float((plain[key].double() - value).norm() / value.norm())
        error = float((found[key].double() - value).norm() / value.norm())
        largest = max(largest, own)
        assert error <= max(4 * own, 2e-6), key
    assert 0 < largest < 1e-3


SMALL = ["model.width=32", "model.mlp_width=36", "data.image_size=8", "model.drop_path=0.3", "speed.compile=blocks"]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """dynamo's, with a backend that compiles nothing."""
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
    counters.clear()
    return counters


AMP = ["precision=amp_bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        *((strategy, AMP) for strategy in ("single", "ddp", "fsdp")),
        ("single", [*AMP, "speed.recompute=selective"]),
        ("fsdp", [*AMP, "speed.recompute=full"]),
        ("fsdp", [*AMP, "speed.recompute=budget"]),
        ("fsdp", ["precision=fp16_master"]),
        ("single", ["precision=fp32", "model.drop_path_rule=constant"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_two_graphs_at_any_depth(world: World, counters: Any, strategy: str, overrides: list[str]) -> None:
    """One for the first block, which drops nothing, and one for all others, whose rates differ."""
    found = []
    for depth in (3, 5):
        torch._dynamo.reset()
        counters.clear()
        config = config_of(*SMALL, f"parallel={strategy}", f"model.depth={depth}", *overrides)
        step = step_of(config, world)
        narrow = build.level(config).weights != "float32"
        images = torch.randn(2, 3, 8, 8, dtype=build.compute_dtype(config) if narrow else torch.float32)
        for _ in range(2):
            with step.wrapped.exchange(True), step.autocast():
                step.wrapped.forward(images).sum().backward()
        assert not counters["graph_break"]
        found.append(counters["stats"]["unique_graphs"])
    assert found == ([1, 1] if "model.drop_path_rule=constant" in overrides else [2, 2])


def test_triton_is_told_to_fuse() -> None:
    """Else it warns, which is an error here, and is printed in each compilation for CUDA."""
    language = pytest.importorskip("triton").knobs.language
    assert language.fp_fusion_enabled(None)
