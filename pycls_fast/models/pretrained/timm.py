"""Names of timm's vision transformers, and of DeiT, DeiT III and MAE, whose models are older versions of timm's."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pycls_fast.models.pretrained.tables import (
    Entry,
    State,
    depth,
    joined,
    layer,
    to_theirs,
    translate,
    translate_back,
)

Norm = Literal["norm", "fc_norm"]
VIT = "timm vision transformer"


def to_timm_vit(state: State, *, norm: Norm | None = None) -> dict[str, Tensor]:
    """Our vision transformer in timm's names, those of its version 1.0.

    Our names do not show where the final norm is: timm's `fc_norm` is classifier_norm="after_pool", `norm`
    "before_pool" (with a class token the same function).

    Args:
        state: ours; fixed positions are not in it, which is an error.
        norm: timm's name of the final norm; None: "norm" for a model with a class token or a MAP head, else "fc_norm".

    Raises:
        ValueError: missing or unexpected tensors.
    """
    if norm is None:
        norm = "norm" if {"class_token.value", "pooling.probe"} & set(state) else "fc_norm"
    return to_theirs(state, timm_vit(state, norm=norm, ours=True), "vision transformer with learned positions")


def read_timm_vit(state: State) -> tuple[dict[str, Tensor], list[str]]:
    """A vision transformer's tensors in our names, and the names of the rest. The head may be missing."""
    renamed = {name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma"): t for name, t in state.items()}
    table = timm_vit(renamed, norm="fc_norm" if "fc_norm.weight" in renamed else "norm")
    return translate(renamed, [*table, *layer("pre_logits.fc", "pre_logits")], VIT)


def in_timm_names(state: State, *, norm: Norm) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors that timm's vision transformer has, in its names, and our names of the rest."""
    return translate_back(state, timm_vit(state, norm=norm, ours=True))


def timm_vit(state: State, *, norm: Norm, ours: bool = False) -> list[Entry]:
    """The table for the parts found in the state, which has our names or theirs."""

    def has(theirs_name: str, ours_name: str) -> bool:
        return (ours_name if ours else theirs_name) in state

    table = [Entry("cls_token", ("class_token.value",), ones=(0, 1))] if has("cls_token", "class_token.value") else []
    if has("reg_token", "registers.value"):
        table.append(Entry("reg_token", ("registers.value",), ones=(0,)))
    table.append(Entry("pos_embed", ("positions.value",), ones=(0,)))
    table += layer("patch_embed.proj", "stem.projection")
    scaled = has("blocks.0.ls1.gamma", "blocks.0.scale1.value")
    normed = has("blocks.0.attn.q_norm.weight", "blocks.0.attention.query_norm.weight")
    for block in (f"blocks.{index}" for index in range(depth(state, "blocks."))):
        table += layer(f"{block}.norm1", f"{block}.norm1")
        table += joined(f"{block}.attn.qkv.", f"{block}.attention")
        if normed:
            table += layer(f"{block}.attn.q_norm", f"{block}.attention.query_norm")
            table += layer(f"{block}.attn.k_norm", f"{block}.attention.key_norm")
        table += layer(f"{block}.attn.proj", f"{block}.attention.projection")
        table += layer(f"{block}.norm2", f"{block}.norm2")
        table += layer(f"{block}.mlp.fc1", f"{block}.mlp.fc1")
        table += layer(f"{block}.mlp.fc2", f"{block}.mlp.fc2")
        if scaled:
            table += [Entry(f"{block}.ls{n}.gamma", (f"{block}.scale{n}.value",)) for n in (1, 2)]
    if has("attn_pool.latent", "pooling.probe"):
        table.append(Entry("attn_pool.latent", ("pooling.probe",), ones=(0, 1)))
        table += layer("attn_pool.q", "pooling.attention.query")
        table += joined("attn_pool.kv.", "pooling.attention", ("key", "value"))
        table += layer("attn_pool.proj", "pooling.attention.projection")
        for part in ("norm", "mlp.fc1", "mlp.fc2"):
            table += layer(f"attn_pool.{part}", f"pooling.{part}")
    return table + layer(norm, "norm") + layer("head", "head")
