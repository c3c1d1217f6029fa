"""Tokens padded to a multiple: the same function of the images, whatever the kernel, layout and classifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pycls_fast.models import VisionTransformer
from pycls_fast.models.complexity import complexity
from pycls_fast.parallel import compile_model
from tests.unit.models.conftest import fill_random
from tests.unit.models.test_layout import error, train_once


def vit(**kwargs: Any) -> VisionTransformer:
    """9 patches, or 10 tokens: 16 or 64 with padding."""
    sizes = {"image_size": 12, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "mlp_width": 24}
    return VisionTransformer(**{**sizes, "num_classes": 5, "drop_path": 0.3, **kwargs})


def images(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 12, 12, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("attention", ["reference", "sdpa", "sdpa_math", "sdpa_flash", "products"])
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
@pytest.mark.parametrize("classifier", ["token", "pooled"])
@pytest.mark.parametrize("padding", [8, 64])
def test_same_function_and_gradients_in_float64(attention: str, layout: str, classifier: str, padding: int) -> None:
    kind = {"classifier": classifier, "layout": layout}
    exact = train_once(fill_random(vit(**kind).double()), images(torch.float64))
    padded = fill_random(vit(**kind, attention=attention, sequence_padding=padding, qkv="fused").double())
    seen: list[int] = []
    padded.blocks[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1 - padded.batch_dim])
    )  # type: ignore[union-attr]
    found = train_once(padded, images(torch.float64))
    assert seen == [{8: 16, 64: 64}[padding]]
    assert list(found) == list(exact)
    for name in exact:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("bf16", [False, True])
def test_errors_are_those_of_rounding(attention: str, bf16: bool) -> None:
    exact = train_once(fill_random(vit().double()), images(torch.float64))
    plain = error(train_once(fill_random(vit(attention=attention)), images(torch.float32), bf16=bf16), exact)
    model = fill_random(vit(attention=attention, sequence_padding=8))
    found = error(train_once(model, images(torch.float32), bf16=bf16), exact)
    assert max(plain.values()) > 0
    for name, size in found.items():
        assert size <= 4 * max(plain[name], max(plain.values()) / 4), name


def test_a_number_that_fits_is_left_alone_and_the_parameters_are_the_same() -> None:
    assert vit(classifier="pooled", image_size=16, sequence_padding=8).padding == 0
    assert vit(sequence_padding=8).padding == 6
    torch.manual_seed(2)
    plain = vit().state_dict()
    torch.manual_seed(2)
    padded = vit(sequence_padding=64).state_dict()
    assert list(padded) == list(plain)
    assert all(torch.equal(padded[name], plain[name]) for name in plain)
    # The operations that are reported come from a model without padding; this one has more.
    assert (
        complexity(vit(sequence_padding=64), image_size=12).forward_flops
        > complexity(vit(), image_size=12).forward_flops
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_compiled(what: Any, attention: str) -> None:
    exact = train_once(fill_random(vit().double()), images(torch.float64))
    model: Any = fill_random(vit(attention=attention, sequence_padding=8))
    compile_model(model, model.units(), what=what)
    assert max(error(train_once(model, images(torch.float32)), exact).values()) < 1e-5
    torch._dynamo.reset()
