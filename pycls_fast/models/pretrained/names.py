"""Other projects' names for tensors, as tables of (theirs, ours), and the recognition of whose names a file has.

`{}` in a name stands for a number; each row holds for a tensor of that name and for those of a layer (`.weight` and so
on). Several names of ours in a row: theirs is these concatenated along dimension 0. A table works in both directions.
Tensors are renamed, reshaped, split or joined; nothing is computed (except the mean of DeiT's two biases). They may
share memory with the input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Row = tuple[str, ...]

TIMM_VIT = "timm vision transformer"
TORCHVISION_VIT = "torchvision vision transformer"
PYCLS_VIT = "pycls vision transformer"
JAX_VIT = "Google's vision transformer"
VITS = (TIMM_VIT, TORCHVISION_VIT, PYCLS_VIT, JAX_VIT)
RESNET = "torchvision resnet"
PYCLS_RESNET = "pycls resnet"
RESNETS = (RESNET, PYCLS_RESNET)
OURS = "pycls_fast"
TRANSFORMERS = "transformers"
OTHER = "unknown"

_KINDS = r"(\.(?:weight|bias|running_mean|running_var|num_batches_tracked))?"
# The number of dimensions of size 1 in theirs, one of them the batch: all of these are (1, N, D) or (N, 1, D).
_LEADING_ONES = {
    **dict.fromkeys(("class_token.value", "distillation_token.value", "pooling.probe"), 2),
    **dict.fromkeys(("registers.value", "positions.value"), 1),
}


def read_names(state: State) -> tuple[str, dict[str, Tensor], list[str]]:
    """The layout, the tensors in our names, and the names without one of ours (all of them for an unknown layout)."""
    if any(f"{prefix}embedding/kernel" in state for prefix in _JAX_PREFIXES):
        return JAX_VIT, *_translate(_flax_in_torch_form(state), _jax_vit())
    if "encoder.block_0.ln_1.weight" in state:
        return PYCLS_VIT, *_translate(state, _PYCLS_VIT, _PYCLS_VIT_SPELLINGS)
    if "s1.b1.f.a.weight" in state:
        # Their blocks are counted from 1.
        spelled = {re.sub(r"(s\d\.b)(\d+)", lambda m: f"{m[1]}{int(m[2]) - 1}", name): t for name, t in state.items()}
        return PYCLS_RESNET, *_translate(spelled, _pycls_resnet())
    if "conv_proj.weight" in state:
        return TORCHVISION_VIT, *_translate(state, _TORCHVISION_VIT, _TORCHVISION_VIT_SPELLINGS)
    # Swin's patches have the same names, but not its blocks.
    if {"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= state.keys():
        norm = "fc_norm" if "fc_norm.weight" in state else "norm"
        names = [*_timm_vit(norm), ("pre_logits.fc", "pre_logits")]
        return TIMM_VIT, *_translate(_join_heads(state), names, _DEIT3)
    if "bn1.weight" in state and "layer1.0.conv1.weight" in state:
        return RESNET, *_translate(state, _resnet("conv1.0.weight" in state, resnet_shortcut(state)))
    # Other projects' names begin with `stem.`, `blocks.` and `stages.`, too.
    own_block = "stages.0.0.conv1.weight" in state or any(name.startswith("blocks.0.attention.") for name in state)
    if own_block or any(name.startswith("network.") for name in state):
        return OURS, dict(state), []
    parts = {part for name in state for part in name.split(".")}
    if "embeddings" in parts and parts & {"encoder", "layer"}:
        return TRANSFORMERS, {}, list(state)
    return OTHER, {}, list(state)


def resnet_shortcut(state: State) -> str:
    """The way a ResNet's shortcuts downsample; timm counts the mean before the convolution, which has no tensors."""
    return "pool" if any(name.endswith(".downsample.2.weight") for name in state) else "conv"


def to_timm_vit(state: State, *, norm: str) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors that timm's vision transformer has, in the names of its version 1.0, and our names of the rest.

    Our names do not show where the final norm is: timm's `fc_norm` is classifier_norm="after_pool", `norm`
    "before_pool" (with a class token the same function).

    Args:
        state: ours; fixed positions have to be in it, too.
        norm: timm's name of the final norm.
    """
    theirs, rest = _translate_back(state, _timm_vit(norm))
    if "distillation_token.value" in state and "head.weight" in theirs:
        for name, weight in zip(_HEADS, theirs["head.weight"].chunk(2, dim=1), strict=True):
            theirs |= {f"{name}.weight": weight, f"{name}.bias": theirs["head.bias"]}
    return theirs, rest


# Those of the class token and of the distillation token.
_HEADS = ("head", "head_dist")


def _join_heads(state: State) -> State:
    """DeiT's two heads as our one, with the weights side by side and the mean of the biases: the same output."""
    if "head.weight" not in state or "head_dist.weight" not in state:
        return state
    rest = {name: value for name, value in state.items() if not name.startswith("head_dist.")}
    weight_K2D = torch.cat([state["head.weight"], state["head_dist.weight"]], dim=1)
    return {**rest, "head.weight": weight_K2D, "head.bias": (state["head.bias"] + state["head_dist.bias"]) / 2}


def to_resnet(state: State, *, shortcut: str = "conv") -> dict[str, Tensor]:
    """Our ResNet in timm's names, which are torchvision's for `shortcut="conv"`."""
    return _translate_back(state, _resnet("stem.deep.0.conv.weight" in state, shortcut))[0]


def _translate(
    state: State, table: Sequence[Row], spellings: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of `state` that are in the table, in our names, and the names of the rest, also of those whose shape
    shows that they belong to another model with the same names (SAM's positions are a map).

    `spellings` are regular expressions and what replaces them, in this order.
    """
    rows = [(_pattern(theirs), ours) for theirs, *ours in table]
    found: dict[str, Tensor] = {}
    rest = []
    for name in state:
        spelled = name
        for spelling, replacement in spellings:
            spelled = re.sub(spelling, replacement, spelled)
        match, ours = next(((m, ours) for pattern, ours in rows if (m := pattern.fullmatch(spelled))), (None, []))
        if match is None:
            rest.append(name)
            continue
        *numbers, kind = match.groups(default="")
        names = [part.format(*numbers) + kind for part in ours]
        tensor = state[name]
        ones = _LEADING_ONES.get(names[0], 0)
        if tensor.shape[:1].numel() % len(names) or (ones and (tensor.ndim != 3 or tensor.shape[:2].count(1) < ones)):
            rest.append(name)
            continue
        if ones:
            tensor = tensor[0, 0] if ones == 2 else tensor.flatten(0, 1)
        found |= zip(names, tensor.chunk(len(names)) if len(names) > 1 else [tensor], strict=True)
    return found, rest


def _translate_back(state: State, table: Sequence[Row]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of ours that are in the table, in their names, and our names of the rest."""
    rows = [(_pattern(ours[0]), theirs, ours) for theirs, *ours in table]
    theirs: dict[str, Tensor] = {}
    known: set[str] = set()
    for name in state:
        for pattern, their_name, ours in rows:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            *numbers, kind = match.groups(default="")
            names = [part.format(*numbers) + kind for part in ours]
            if all(part in state for part in names):
                parts = [state[part] for part in names]
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                theirs[their_name.format(*numbers) + kind] = (
                    joined.reshape(1, -1, joined.shape[-1]) if name in _LEADING_ONES else joined
                )
                known.update(names)
            break
    return theirs, [name for name in state if name not in known]


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d+)") + _KINDS)


def _joined(theirs: str, ours: str, parts: Sequence[str] = ("query", "key", "value")) -> Row:
    return (theirs, *(f"{ours}.{part}" for part in parts))


def _timm_vit(norm: str) -> list[Row]:
    """timm's names, also of DeiT, DeiT III and MAE, whose models are older versions of timm's."""
    return [
        ("cls_token", "class_token.value"),
        ("dist_token", "distillation_token.value"),
        ("reg_token", "registers.value"),
        ("pos_embed", "positions.value"),
        ("patch_embed.proj", "stem.projection"),
        ("blocks.{}.norm{}", "blocks.{}.norm{}"),
        _joined("blocks.{}.attn.qkv", "blocks.{}.attention"),
        ("blocks.{}.attn.q_norm", "blocks.{}.attention.query_norm"),
        ("blocks.{}.attn.k_norm", "blocks.{}.attention.key_norm"),
        ("blocks.{}.attn.proj", "blocks.{}.attention.projection"),
        ("blocks.{}.mlp.fc{}", "blocks.{}.mlp.fc{}"),
        ("blocks.{}.ls{}.gamma", "blocks.{}.scale{}.value"),
        ("attn_pool.latent", "pooling.probe"),
        ("attn_pool.q", "pooling.attention.query"),
        _joined("attn_pool.kv", "pooling.attention", ("key", "value")),
        ("attn_pool.proj", "pooling.attention.projection"),
        ("attn_pool.norm", "pooling.norm"),
        ("attn_pool.mlp.fc{}", "pooling.mlp.fc{}"),
        (norm, "norm"),
        ("head", "head"),
    ]


_DEIT3 = ((r"gamma_(\d)", r"ls\1.gamma"),)

_TORCHVISION_VIT: list[Row] = [
    ("class_token", "class_token.value"),
    ("encoder.pos_embedding", "positions.value"),
    ("conv_proj", "stem.projection"),
    ("encoder.layers.encoder_layer_{}.ln_{}", "blocks.{}.norm{}"),
    _joined("encoder.layers.encoder_layer_{}.self_attention.in_proj", "blocks.{}.attention"),
    ("encoder.layers.encoder_layer_{}.self_attention.out_proj", "blocks.{}.attention.projection"),
    ("encoder.layers.encoder_layer_{}.mlp.0", "blocks.{}.mlp.fc1"),
    ("encoder.layers.encoder_layer_{}.mlp.3", "blocks.{}.mlp.fc2"),
    ("encoder.ln", "norm"),
    ("heads.head", "head"),
]
# The MLPs: before version 0.13.
_TORCHVISION_VIT_SPELLINGS = (
    (r"in_proj_", "in_proj."),
    (r"\.mlp\.linear_1\.", ".mlp.0."),
    (r"\.mlp\.linear_2\.", ".mlp.3."),
)


def _resnet(deep: bool, shortcut: str) -> list[Row]:
    """torchvision's names, and timm's of ResNet-C and -D."""
    table: list[Row] = [("conv1.6" if deep else "conv1", "stem.conv"), ("bn1", "stem.norm"), ("fc", "head")]
    for index, number in ((0, 0), (1, 3)) if deep else ():
        table.append((f"conv1.{number}", f"stem.deep.{index}.conv"))
        table.append((f"conv1.{number + 1}", f"stem.deep.{index}.norm"))
    first = int(shortcut == "pool")
    for stage in range(4):
        theirs, ours = f"layer{stage + 1}.{{}}", f"stages.{stage}.{{}}"
        table += [(f"{theirs}.conv{{}}", f"{ours}.conv{{}}"), (f"{theirs}.bn{{}}", f"{ours}.norm{{}}")]
        table.append((f"{theirs}.downsample.{first}", f"{ours}.shortcut.conv"))
        table.append((f"{theirs}.downsample.{first + 1}", f"{ours}.shortcut.norm"))
    return table


# `ViT` of pycls' branches main and vitconfigs.
_PYCLS_VIT: list[Row] = [
    ("class_token", "class_token.value"),
    ("pos_embedding", "positions.value"),
    ("stem.patchify", "stem.projection"),
    ("stem.cstem{}_conv", "stem.convs.{}"),
    ("stem.cstem{}_bn", "stem.norms.{}"),
    ("stem.cstem_last_conv", "stem.projection"),
    ("encoder.block_{}.ln_{}", "blocks.{}.norm{}"),
    _joined("encoder.block_{}.self_attention.in_proj", "blocks.{}.attention"),
    ("encoder.block_{}.self_attention.out_proj", "blocks.{}.attention.projection"),
    ("encoder.block_{}.mlp_block.linear_{}", "blocks.{}.mlp.fc{}"),
    ("encoder.ln", "norm"),
    ("head.head_fc", "head"),
]
# main has torch's attention in a `block`, vitconfigs its own; earlier versions used torch's directly.
_PYCLS_VIT_SPELLINGS = ((r"\.self_attention\.block\.", ".self_attention."), (r"in_proj_|attn_proj\.", "in_proj."))


def _pycls_resnet() -> list[Row]:
    """pycls' `ResNet` for ImageNet, and `anynet` with the same blocks."""
    table: list[Row] = [("stem.conv", "stem.conv"), ("stem.bn", "stem.norm"), ("head.fc", "head")]
    for stage in range(4):
        theirs, ours = f"s{stage + 1}.b{{}}", f"stages.{stage}.{{}}"
        for number, letter in enumerate("abc", start=1):
            table.append((f"{theirs}.f.{letter}", f"{ours}.conv{number}"))
            table.append((f"{theirs}.f.{letter}_bn", f"{ours}.norm{number}"))
        table += [(f"{theirs}.proj", f"{ours}.shortcut.conv"), (f"{theirs}.bn", f"{ours}.shortcut.norm")]
    return table


_JAX_PREFIXES = ("opt/target/", "params/img/", "params/", "")


def _jax_vit() -> list[Row]:
    """Google's original files, AugReg's, and big_vision's, with the names of modules joined by dots."""
    block, attention = "Transformer.encoderblock_{}", "MultiHeadDotProductAttention_{}"
    table: list[Row] = [
        ("cls", "class_token.value"),
        ("pos_embedding", "positions.value"),
        ("Transformer.posembed_input.pos_embedding", "positions.value"),
        ("embedding", "stem.projection"),
        ("Transformer.encoder_norm", "norm"),
        ("pre_logits", "pre_logits"),
        ("head", "head"),
        (f"{block}.LayerNorm_0", "blocks.{}.norm1"),
        (f"{block}.LayerNorm_1", "blocks.{}.norm2"),
        # The second norm has number 2 if attention and MLP are counted with the norms.
        (f"{block}.LayerNorm_2", "blocks.{}.norm2"),
        (f"{block}.MlpBlock_{{}}.Dense_0", "blocks.{}.mlp.fc1"),
        (f"{block}.MlpBlock_{{}}.Dense_1", "blocks.{}.mlp.fc2"),
        ("MAPHead_0.probe", "pooling.probe"),
        ("MAPHead_0.LayerNorm_0", "pooling.norm"),
        ("MAPHead_0.MlpBlock_{}.Dense_0", "pooling.mlp.fc1"),
        ("MAPHead_0.MlpBlock_{}.Dense_1", "pooling.mlp.fc2"),
    ]
    for theirs, ours in (("query", "query"), ("key", "key"), ("value", "value"), ("out", "projection")):
        table.append((f"{block}.{attention}.{theirs}", f"blocks.{{}}.attention.{ours}"))
        table.append((f"MAPHead_0.{attention}.{theirs}", f"pooling.attention.{ours}"))
    return table


def jax_heads(arrays: State) -> int | None:
    """The number of attention heads, from the shape (in, heads, width of one head) of the queries' kernels."""
    name = next((n for n in arrays if re.search(r"encoderblock.*Attention_\d/query/kernel$", n)), None)
    return None if name is None or arrays[name].ndim < 3 else arrays[name].shape[-2]


def _flax_in_torch_form(arrays: State) -> dict[str, Tensor]:
    """Arrays of Flax with the shapes and dotted names of torch, without their prefix and the optimizer's state.

    Flax stores kernels of dense layers as (in, out), of attention as (in, heads, width of one head) and (heads, width,
    out), of convolutions as (height, width, in, out). big_vision stacks the blocks if it scans over them.
    """
    prefix = next(prefix for prefix in _JAX_PREFIXES if f"{prefix}embedding/kernel" in arrays)
    found: dict[str, Tensor] = {}
    for name, array in arrays.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own.startswith(("opt/", "opt_state/")):
            continue
        if "encoderblock/" in own:
            for index, row in enumerate(array):
                found |= [_torch_form(own.replace("encoderblock/", f"encoderblock_{index}/"), row)]
        else:
            found |= [_torch_form(own, array)]
    return found


def _torch_form(name: str, array: Tensor) -> tuple[str, Tensor]:
    *modules, kind = name.split("/")
    if kind == "kernel":
        if array.ndim == 3:
            # (D, H, E) -> (D, H * E), or (H, E, D) -> (H * E, D)
            array = array.flatten(0, 1) if modules[-1] == "out" else array.flatten(1)
        if array.ndim in (2, 4):
            array = array.permute((1, 0) if array.ndim == 2 else (3, 2, 0, 1)).contiguous()
    elif kind == "bias":
        array = array.reshape(-1)
    return ".".join([*modules, {"kernel": "weight", "scale": "weight"}.get(kind, kind)]), array
