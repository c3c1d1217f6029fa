"""torch.compile in place: the same function and names, blocks of a shape compiled once, evaluation left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models import ResNet, VisionTransformer
from pycls_fast.parallel.compile import compile_model, uncompiled

# dynamo asks inputs for a gradient that only leaves have; it is torch's own call.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

MODELS: dict[str, Callable[..., Any]] = {
    "vit": lambda depth=12: VisionTransformer(
        image_size=16,
        patch_size=4,
        width=16,
        depth=depth,
        heads=2,
        mlp_width=24,
        num_classes=5,
        drop_path=0.4,
        attention="sdpa",
    ),
    "resnet": lambda: ResNet(depth=18, num_classes=5, stem="small", drop_path=0.4, zero_init_last_gamma=False),
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    import torch._dynamo

    torch._dynamo.reset()


def graphs() -> int:
    """Compiled so far in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Logits and gradients of a training pass with a fixed seed for drop-path."""
    model.train()
    torch.manual_seed(11)
    logits = model(batch)
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def filled(name: str, **kwargs: Any) -> Any:
    """Random values everywhere: a head of zeros would hide what the blocks do."""
    torch.manual_seed(3)
    model = MODELS[name](**kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("what", ["off", "blocks", "model"])
def test_what_is_compiled_and_how(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["vit"]()
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: found.append((names[id(self)], kwargs)))
    compile_model(model, model.units(), what=what, mode="max-autotune-no-cudagraphs")
    expected = {"off": [], "blocks": [f"blocks.{n}" for n in range(12)], "model": [""]}
    assert [name for name, _ in found] == expected[what]
    for _, kwargs in found:
        assert kwargs["dynamic"] is (None if what == "blocks" else False)
        assert kwargs["options"]["fallback_random"] is True
        assert kwargs["options"]["max_autotune"] is True
        assert "triton.cudagraphs" not in kwargs["options"]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_advice_that_does_not_fit_blocks_is_not_given(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["vit"]()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: None)
    advice = "Unable to hit fast path of CUDAGraphs because of pending, uninvoked backwards. Consider"
    compile_model(model, model.units(), what="blocks", mode="max-autotune-no-cudagraphs")
    with pytest.warns(UserWarning, match="Unable to hit"):
        warnings.warn(advice, stacklevel=1)
    compile_model(model, model.units(), what="blocks", mode=mode)
    warnings.warn(advice, stacklevel=1)


def test_evaluation_runs_uncompiled_and_keys_stay() -> None:
    model = filled("vit").eval()
    keys = list(model.state_dict())
    with torch.no_grad(), uncompiled(model):
        expected = model(images())
    assert expected.any()
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    model.blocks[0].compile(backend=backend)
    assert list(model.state_dict()) == keys
    with torch.no_grad(), uncompiled(model):
        assert torch.equal(model(images()), expected)
        model(images(3))
    assert not calls
    with torch.no_grad():
        torch.testing.assert_close(model(images()), expected)
    assert len(calls) == 1


def test_no_network_of_a_process_goes_back_to_eager_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when `time_net compare=[...]` times many variants: all count against one limit of torch's."""
    import torch._dynamo

    torch._dynamo.reset()
    compiled = []
    compile_module = nn.Module.compile

    def count(self: nn.Module, **kwargs: Any) -> None:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(inputs)
            return graph.forward

        compile_module(self, dynamic=kwargs["dynamic"], backend=backend)

    monkeypatch.setattr(nn.Module, "compile", count)
    networks = [nn.Linear(2, 2) for _ in range(12)]
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        for network in networks:
            compile_model(network, [("", network)], what="blocks")
        for network in networks:
            network(torch.ones(1, 2))
    assert len(compiled) == len(networks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "sizes"),
    [("vit", "blocks", {}), ("resnet", "blocks", {}), ("vit", "model", {"depth": 3})],
    ids=["vit-blocks", "resnet-blocks", "vit-model"],
)
def test_same_gradients_and_dropped_samples(name: str, what: Any, sizes: dict[str, int]) -> None:
    exact = gradients(filled(name, **sizes).double(), images().double())
    plain = gradients(filled(name, **sizes), images())
    model = filled(name, **sizes)
    before = graphs()
    compile_model(model, model.units(), what=what)
    found = gradients(model, images())
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
    with torch.no_grad(), uncompiled(model):
        model.eval()
        model(images(2))
    gradients(model, images())
    assert graphs() - before == compiled
