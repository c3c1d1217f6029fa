"""Attention backends, layouts and compilation on a GPU against float64 on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.layers import ATTENTION
from pycls_fast.parallel.wrap import compile_model, uncompiled
from tests.factories import check_rounding, draw, nudge, small_vit

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "reference"])
@pytest.mark.parametrize("head_width", [64, 80])
@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
def test_backends(name: str, head_width: int, layout: str) -> None:
    weights, *values = (draw(4, 4, 197, head_width, seed=seed).cuda() for seed in range(4))
    if layout == "batch_second":
        # (B, H, N, E) over memory in the order N, B, H, E
        values = [each.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for each in values]

    def results(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [each.to(dtype).detach().requires_grad_() for each in values]
        out = ATTENTION[kernel](*inputs)
        (out * weights.to(dtype)).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    exact = results("reference", torch.float64)
    check_rounding(results("reference", torch.bfloat16), results(name, torch.bfloat16), exact)


def gradients(model: nn.Module, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    batch = draw(8, 3, 32, 32, seed=1).cuda().to(next(model.parameters()).dtype)
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(batch)
    logits.double().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not n.endswith("key.bias")}


def vit(**changes: Any) -> nn.Module:
    sizes = {"patch_size": 4, "width": 64, "depth": 4, "heads": 2, "mlp_width": 128, "attention": "sdpa"}
    torch.manual_seed(0)
    model = small_vit(**{**sizes, **changes})
    nudge(model)
    return model.cuda()


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "batch_second"},
        {"qkv": "fused"},
        {"layout": "batch_second", "qkv": "fused"},
        {"sequence_padding": 8},
        {"sequence_padding": 64, "layout": "batch_second"},
        {"sequence_padding": 8, "attention": "reference"},
        {"sequence_padding": 8, "attention": "sdpa_cudnn"},
        *({"compile": mode} for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")),
    ],
    ids=str,
)
def test_the_model_in_bfloat16(change: dict[str, Any]) -> None:
    exact = gradients(vit(attention="reference").double(), dtype=None)
    plain = gradients(vit(), dtype=torch.bfloat16)
    mode: Any = change.get("compile")
    model: Any = vit(**{key: value for key, value in change.items() if key != "compile"})
    if mode is not None:
        compile_model(model, model.units(), what="blocks", mode=mode)
    for _ in range(3):
        # CUDA graphs are recorded in the second pass and replayed in the third.
        model.zero_grad(set_to_none=True)
        found = {name: value.clone() for name, value in gradients(model, dtype=torch.bfloat16).items()}
    worst = max(float((plain[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact)
    for name in exact:
        assert float((found[name].double() - exact[name]).norm() / exact[name].norm()) <= 4 * worst, name
    with torch.no_grad(), uncompiled(model), torch.autocast("cuda", torch.bfloat16):
        assert model.eval()(draw(3, 3, 32, 32, seed=2).cuda().float()).shape == (3, 7)
