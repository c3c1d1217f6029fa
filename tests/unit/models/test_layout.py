"""Layout, joined products and padding of tokens: the same function of the images, the same checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models import VisionTransformer
from pycls_fast.models.complexity import complexity
from pycls_fast.parallel import compile_model
from pycls_fast.parallel.memory import recompute_units
from tests.unit.models.conftest import fill_random

BATCH, SIDE, WIDTH = 6, 4, 16
KINDS = list(itertools.product(("token", "pooled"), ("learned", "sincos2d")))
# The other parts, each of them in one of these.
FAMILY: dict[str, dict[str, Any]] = {
    "conv-stem": {"stem": "conv", "stem_widths": (8, 12), "stem_strides": (2, 2), "layer_scale": 0.3},
    "registers": {"registers": 3, "qk_norm": True, "classifier": "pooled", "class_token": True, "pre_logits": 12},
    "map": {"classifier": "map", "registers": 2, "position_tokens": "patches", "drop_path_rule": "constant"},
    "map-after": {"classifier": "map", "classifier_norm": "after_pool", "positions": "sincos2d", "class_token": True},
    "before": {"classifier": "pooled", "classifier_norm": "before_pool", "position_tokens": "patches", "registers": 1},
}
OTHERS = [("batch_second", "separate"), ("batch_first", "fused"), ("batch_second", "fused")]


def vit(**kwargs: Any) -> VisionTransformer:
    sizes = {"image_size": 16, "patch_size": 4, "width": WIDTH, "depth": 3, "heads": 2, "mlp_width": 24}
    return VisionTransformer(**{**sizes, "num_classes": 5, **kwargs})


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)


def train_once(model: nn.Module, batch: Tensor, *, bf16: bool = False) -> dict[str, Tensor]:
    """Logits and all gradients of a forward and backward pass with a fixed seed."""
    model.train()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(batch)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)
    (logits * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return {"logits": logits.detach(), **grads}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative error per tensor; the key bias has no effect on the softmax and is left out."""
    return {
        name: float((found[name].double() - exact[name]).norm() / exact[name].norm())
        for name in exact
        if not name.endswith("key.bias")
    }


@pytest.mark.parametrize(("layout", "qkv"), OTHERS)
@pytest.mark.parametrize(("classifier", "positions"), KINDS)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_same_function_gradients_and_dropped_samples_in_float64(
    layout: str, qkv: str, classifier: str, positions: str, attention: str
) -> None:
    kind = {"classifier": classifier, "positions": positions, "attention": attention, "drop_path": 0.6}
    plain = fill_random(vit(**kind).double())
    other = fill_random(vit(**kind, layout=layout, qkv=qkv).double())
    exact, found = train_once(plain, images()), train_once(other, images())
    assert list(found) == list(exact)
    for name in exact:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(
    "switches",
    [
        {"layout": "batch_second", "attention": "sdpa"},
        {"qkv": "fused", "attention": "sdpa_math"},
        {"layout": "batch_second", "qkv": "fused", "attention": "sdpa_flash"},
        {"drop_path_compute": "skip"},
        {"drop_path_compute": "skip", "layout": "batch_second", "qkv": "fused", "attention": "sdpa"},
    ],
    ids=lambda switches: "-".join(switches.values()),
)
def test_switches_of_every_part_in_float64(name: str, switches: dict[str, str]) -> None:
    plain = fill_random(vit(**FAMILY[name], drop_path=0.6).double())
    other = fill_random(vit(**FAMILY[name], drop_path=0.6, **switches).double())
    exact, found = train_once(plain, images()), train_once(other, images())
    assert list(found) == list(exact)
    for key in exact:
        torch.testing.assert_close(found[key], exact[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_of_every_part_is_exact(name: str, recompute: Any) -> None:
    plain, other = (fill_random(vit(**FAMILY[name], drop_path=0.6).double()) for _ in range(2))
    recompute_units(other.units(), recompute=recompute)  # type: ignore[operator]
    exact, found = train_once(plain, images()), train_once(other, images())
    assert all(torch.equal(found[key], exact[key]) for key in exact)


@pytest.mark.parametrize(("layout", "qkv"), OTHERS)
def test_same_checkpoint_same_initial_values_same_parameters(layout: str, qkv: str) -> None:
    torch.manual_seed(3)
    plain = vit()
    torch.manual_seed(3)
    other = vit(layout=layout, qkv=qkv)
    assert list(plain.state_dict()) == list(other.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in other.named_parameters()]
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(("layout", "qkv"), OTHERS)
@pytest.mark.parametrize("bf16", [False, True])
def test_rounding_error_is_no_larger_than_four_times_the_plain_one(layout: str, qkv: str, bf16: bool) -> None:
    exact = train_once(fill_random(vit().double()), images())
    plain = error(train_once(fill_random(vit()), images(torch.float32), bf16=bf16), exact)
    other = error(train_once(fill_random(vit(layout=layout, qkv=qkv)), images(torch.float32), bf16=bf16), exact)
    assert max(plain.values()) > 1e-8
    for name, value in other.items():
        assert value <= 4 * max(plain[name], max(plain.values()) / 4), name


def test_features_travel_in_the_layout() -> None:
    """Blocks see (N, B, D), with as many samples as tokens too, where a mistaken dimension keeps the shape."""
    model = fill_random(vit(layout="batch_second", classifier="pooled").double())
    shapes = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))  # type: ignore[union-attr, operator]
    batch = torch.randn(SIDE * SIDE, 3, 16, 16, dtype=torch.float64)
    logits = model(torch.cat([batch, batch[:3]]))
    assert shapes == [(SIDE * SIDE, SIDE * SIDE + 3, WIDTH)]
    torch.testing.assert_close(model(batch), logits[: len(batch)], rtol=1e-10, atol=1e-12)


def padded_vit(**kwargs: Any) -> VisionTransformer:
    """9 patches, or 10 tokens: 16 or 64 with padding."""
    sizes = {"image_size": 12, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "mlp_width": 24}
    return VisionTransformer(**{**sizes, "num_classes": 5, "drop_path": 0.3, **kwargs})


def small_images(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 12, 12, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("attention", ["reference", "sdpa", "sdpa_math", "sdpa_flash", "products"])
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
@pytest.mark.parametrize("classifier", ["token", "pooled"])
@pytest.mark.parametrize("padding", [8, 64])
def test_same_function_and_gradients_in_float64(attention: str, layout: str, classifier: str, padding: int) -> None:
    kind = {"classifier": classifier, "layout": layout}
    exact = train_once(fill_random(padded_vit(**kind).double()), small_images(torch.float64))
    padded = fill_random(padded_vit(**kind, attention=attention, sequence_padding=padding, qkv="fused").double())
    seen: list[int] = []
    padded.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1 - padded.batch_dim])
    )  # type: ignore[union-attr]
    found = train_once(padded, small_images(torch.float64))
    assert seen == [{8: 16, 64: 64}[padding]]
    assert list(found) == list(exact)
    for name in exact:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("bf16", [False, True])
def test_errors_are_those_of_rounding(attention: str, bf16: bool) -> None:
    exact = train_once(fill_random(padded_vit().double()), small_images(torch.float64))
    plain = error(
        train_once(fill_random(padded_vit(attention=attention)), small_images(torch.float32), bf16=bf16), exact
    )
    model = fill_random(padded_vit(attention=attention, sequence_padding=8))
    found = error(train_once(model, small_images(torch.float32), bf16=bf16), exact)
    assert max(plain.values()) > 0
    for name, size in found.items():
        assert size <= 4 * max(plain[name], max(plain.values()) / 4), name


def test_a_number_that_fits_is_left_alone_and_the_parameters_are_the_same() -> None:
    assert padded_vit(classifier="pooled", image_size=16, sequence_padding=8).padding == 0
    assert padded_vit(sequence_padding=8).padding == 6
    torch.manual_seed(2)
    plain = padded_vit().state_dict()
    torch.manual_seed(2)
    padded = padded_vit(sequence_padding=64).state_dict()
    assert list(padded) == list(plain)
    assert all(torch.equal(padded[name], plain[name]) for name in plain)
    # The operations that are reported come from a model without padding; this one has more.
    assert (
        complexity(padded_vit(sequence_padding=64), image_size=12).forward_flops
        > complexity(padded_vit(), image_size=12).forward_flops
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_compiled(what: Any, attention: str) -> None:
    exact = train_once(fill_random(padded_vit().double()), small_images(torch.float64))
    model: Any = fill_random(padded_vit(attention=attention, sequence_padding=8))
    compile_model(model, model.units(), what=what)
    assert max(error(train_once(model, small_images(torch.float32)), exact).values()) < 1e-5
    torch._dynamo.reset()
