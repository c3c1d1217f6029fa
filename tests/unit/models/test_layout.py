"""Layout, joined products and padding of tokens: the same function of the images, the same checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pycls_fast.models.complexity import complexity
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.saved_activations import save_activation_memory
from pycls_fast.parallel.wrap import compile_model
from pycls_fast.speed import Speed
from tests.factories import assert_same_bits, draw, randomise

BATCH, SIDE, WIDTH = 6, 4, 16
KINDS = list(itertools.product(("token", "pooled"), ("learned", "sincos2d")))
# The other parts, each of them in one of these.
FAMILY: dict[str, dict[str, Any]] = {
    "conv-stem": {"stem": "conv", "stem_widths": (8, 12), "stem_strides": (2, 2), "layer_scale": 0.3},
    "distilled": {"distillation_token": True, "position_tokens": "patches", "registers": 2},
    "registers": {"registers": 3, "qk_norm": True, "classifier": "pooled", "class_token": True, "pre_logits": 12},
    "map": {"classifier": "map", "registers": 2, "position_tokens": "patches", "drop_path_rule": "constant"},
    "map-after": {"classifier": "map", "classifier_norm": "after_pool", "positions": "sincos2d", "class_token": True},
    "before": {"classifier": "pooled", "classifier_norm": "before_pool", "position_tokens": "patches", "registers": 1},
}
OTHERS: list[dict[str, Any]] = [
    {"layout": "batch_second"},
    {"qkv": "fused"},
    {"layout": "batch_second", "qkv": "fused"},
]
SWITCHES: list[dict[str, Any]] = [
    {"layout": "batch_second", "attention": "sdpa"},
    {"qkv": "fused", "attention": "sdpa_math"},
    {"layout": "batch_second", "qkv": "fused", "attention": "sdpa_flash"},
    {"drop_path_compute": "skip"},
    {"layout": "batch_second", "qkv": "fused", "attention": "products", "linear": "products", "patches": "product"},
    {"drop_path_compute": "skip", "layout": "batch_second", "qkv": "fused", "attention": "sdpa"},
]
# 9 patches, or 10 tokens: 16 or 64 with padding.
SMALL = {"image_size": 12, "drop_path": 0.3}
PADDED = [
    (
        {**SMALL, "classifier": classifier, "layout": layout},
        {"attention": attention, "sequence_padding": n, "qkv": "fused"},
    )
    for attention in ("reference", "sdpa", "sdpa_math", "sdpa_flash", "products")
    for layout in ("batch_first", "batch_second")
    for classifier in ("token", "pooled")
    for n in (8, 64)
]
# A model, and what its twin has otherwise.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        ({"classifier": classifier, "positions": positions, "attention": attention, "drop_path": 0.6}, other)
        for (classifier, positions), attention, other in itertools.product(KINDS, ("reference", "sdpa"), OTHERS)
    ),
    *(({**FAMILY[name], "drop_path": 0.6}, switches) for name in FAMILY for switches in SWITCHES),
    *PADDED,
]


def vit(**kwargs: Any) -> VisionTransformer:
    sizes = {"image_size": 16, "patch_size": 4, "width": WIDTH, "depth": 3, "heads": 2, "mlp_width": 24}
    return VisionTransformer(**{**sizes, "num_classes": 5, **kwargs})


def train_once(
    kind: dict[str, Any], dtype: torch.dtype = torch.float64, *, bf16: bool = False, prepare: Any = None
) -> dict[str, Tensor]:
    """Logits and all gradients of a forward and backward pass with a fixed seed."""
    model: Any = randomise(vit(**kind)).to(dtype).train()
    if prepare is not None:
        prepare(model)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(draw(BATCH, 3, *model.image_size, seed=1).to(dtype))
    (logits * draw(*logits.shape, seed=2).to(logits.dtype)).sum().backward()
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


@pytest.mark.parametrize(("kind", "switches"), PAIRS)
def test_same_function_gradients_and_dropped_samples_in_float64(kind: dict[str, Any], switches: dict[str, Any]) -> None:
    exact, found = train_once(kind), train_once(kind | switches)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [*FAMILY.values(), {"attention": "sdpa", "drop_path_compute": "skip"}])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_of_every_part_is_exact(kind: dict[str, Any], recompute: Any) -> None:
    kind = {**kind, "drop_path": 0.6}
    exact = train_once(kind)
    switches = Speed(recompute=recompute)
    found = train_once(kind, prepare=lambda model: save_activation_memory(model, model.units(), switches))
    assert_same_bits(found, exact)


@pytest.mark.parametrize("switches", [*OTHERS, {"sequence_padding": 64}, {"patches": "product", "linear": "products"}])
def test_same_checkpoint_same_initial_values_same_parameters(switches: dict[str, Any]) -> None:
    torch.manual_seed(3)
    plain = vit()
    torch.manual_seed(3)
    other = vit(**switches)
    assert list(plain.state_dict()) == list(other.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in other.named_parameters()]
    assert_same_bits(other.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        *(({}, other) for other in OTHERS),
        ({"drop_path": 0.6}, {"drop_path_compute": "skip"}),
        *(({**SMALL, "attention": attention}, {"sequence_padding": 8}) for attention in ("reference", "sdpa")),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_rounding_error_is_no_larger_than_four_times_the_plain_one(
    kind: dict[str, Any], switches: dict[str, Any], bf16: bool
) -> None:
    exact = train_once(kind)
    plain, other = (error(train_once(kind | more, torch.float32, bf16=bf16), exact) for more in ({}, switches))
    assert max(plain.values()) > 1e-8
    for name, value in other.items():
        assert value <= 4 * max(plain[name], max(plain.values()) / 4), name


def test_features_travel_in_the_layout() -> None:
    """Blocks see (N, B, D), with as many samples as tokens too, where a mistaken dimension keeps the shape."""
    model = randomise(vit(layout="batch_second", classifier="pooled"))
    shapes = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))  # type: ignore[union-attr, operator]
    batch = torch.randn(SIDE * SIDE, 3, 16, 16, dtype=torch.float64)
    logits = model(torch.cat([batch, batch[:3]]))
    assert shapes == [(SIDE * SIDE, SIDE * SIDE + 3, WIDTH)]
    torch.testing.assert_close(model(batch), logits[: len(batch)], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("chosen", "tokens"), [({"sequence_padding": 8}, 16), ({"sequence_padding": 64}, 64)])
def test_blocks_see_padded_tokens(chosen: dict[str, Any], tokens: int) -> None:
    model = vit(**SMALL, **chosen)
    seen: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))  # type: ignore[union-attr, operator]
    model(torch.randn(BATCH, 3, 12, 12))
    assert seen == [tokens]
    # A number that fits is left alone.
    assert vit(classifier="pooled", sequence_padding=8).padding == 0
    # The operations that are reported come from a model without padding; this one has more.
    padded, plain = (complexity(network, image_size=12).forward_flops for network in (model, vit(**SMALL)))
    assert padded > plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_compiled(what: Any, attention: str) -> None:
    kind = {**SMALL, "attention": attention, "sequence_padding": 8}
    found = train_once(kind, torch.float32, prepare=lambda model: compile_model(model, model.units(), what=what))
    assert max(error(found, train_once(SMALL)).values()) < 1e-5
    torch._dynamo.reset()
