"""Files in the formats of the projects that publish weights, with their own key names, against those projects' logits.

Random values in every tensor, float64, 1e-9 relative. pycls is not installed where tests run: its networks are
torchvision's and timm's under the names of its checkpoints, and its images have blue first.
"""

from __future__ import annotations

import argparse
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import _registry
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models import pretrained
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.pretrained import Fitted, read
from pycls_fast.models.pretrained.names import read_names
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network
from pycls_fast.values import Size
from tests.factories import randomise, small_vit
from tests.numerics.test_models_peers import relative_error

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 48, 3, 2, 7
POOLED: dict[str, Any] = {"classifier": "pooled", "classifier_norm": "before_pool"}


def small_timm(**kwargs: Any) -> Any:
    """timm's vision transformer with random values in all tensors."""
    sizes = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    model = timm.models.VisionTransformer(**{**sizes, "num_classes": CLASSES, **kwargs})
    return randomise(model).eval()


def small(**kwargs: Any) -> VisionTransformer:
    model = randomise(small_vit(**{"width": WIDTH, "depth": DEPTH, "mlp_width": 4 * WIDTH, **kwargs})).eval()
    with torch.no_grad():
        # Other values than the peer's, so that what is not loaded shows in the logits.
        for parameter in model.parameters():
            parameter.neg_()
    return model


def load(network: nn.Module, source: Path | str, *allow: str) -> Fitted:
    fitted = pretrained.fit(pretrained.read_weights(str(source)), network, allow=allow)
    state = network.state_dict()
    with torch.no_grad():
        for name, tensor in fitted.tensors.items():
            state[name].copy_(tensor)
    return fitted


def refused(network: nn.Module, source: Path | str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load(network, source)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


def saved(theirs: nn.Module | Mapping[str, Any], name: str = "model.pth") -> str:
    """The file of a module's weights, or of what else a project saves."""
    torch.save(dict(theirs.state_dict()) if isinstance(theirs, nn.Module) else theirs, name)
    return name


def assert_same(ours: nn.Module, theirs: Callable[[Tensor], Tensor], size: int | tuple[int, int] = SIZE) -> None:
    batch = torch.randn(3, 3, *Size.of(size), dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(ours(batch), theirs(batch)) < 1e-9


@pytest.mark.slow
def test_torchvision_files_of_today_and_of_before_0_13() -> None:
    theirs = torchvision.models.VisionTransformer(SIZE, PATCH, DEPTH, HEADS, WIDTH, 4 * WIDTH, num_classes=CLASSES)
    randomise(theirs).eval()
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in theirs.state_dict().items()
    }
    for state in (theirs, old):
        ours = small()
        load(ours, saved(state))
        assert_same(ours, theirs)
    resnet = randomise(torchvision.models.resnext50_32x4d(num_classes=CLASSES)).eval()
    without_counters = {k: v for k, v in resnet.state_dict().items() if not k.endswith("num_batches_tracked")}
    ours_resnet = ResNet(depth=50, groups=32, width_per_group=4, num_classes=CLASSES).double().eval()
    load(ours_resnet, saved(without_counters))
    assert_same(ours_resnet, resnet)


def jax_arrays(theirs: Any, *, big_vision: bool, prefix: str = "", stacked: bool = False) -> dict[str, np.ndarray]:
    """The arrays of Google's checkpoint: names of vit_jax `models_vit.py`, or of big_vision `models/vit.py`."""
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    for joined, parts in ((".qkv.", ("query", "key", "value")), (".kv.", ("key", "value"))):
        for name in [name for name in state if joined in name]:
            cut = zip(parts, np.split(state[name], len(parts)), strict=True)
            state |= {name.replace(joined, f".{part}."): array for part, array in cut}

    def module(name: str, theirs_name: str) -> dict[str, np.ndarray]:
        weight, bias, last = state[f"{theirs_name}.weight"], state[f"{theirs_name}.bias"], name.rpartition("/")[2]
        if weight.ndim == 1:
            return {f"{name}/scale": weight, f"{name}/bias": bias}
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        if last in ("query", "key", "value"):
            kernel, bias = kernel.reshape(WIDTH, HEADS, -1), bias.reshape(HEADS, -1)
        return {f"{name}/kernel": kernel.reshape(HEADS, -1, WIDTH) if last == "out" else kernel, f"{name}/bias": bias}

    def modules(names: dict[str, str], prefix: str = "") -> dict[str, np.ndarray]:
        return {key: array for name, own in names.items() for key, array in module(name, prefix + own).items()}

    def attention(number: str, query: str = "query") -> dict[str, str]:
        parts = {"query": query, "key": "key", "value": "value", "out": "proj"}
        return {f"MultiHeadDotProductAttention_{number}/{name}": own for name, own in parts.items()}

    at, mlp, second = ("0", "0", "1") if big_vision else ("1", "3", "2")
    norms, dense = {"LayerNorm_0": "norm1", f"LayerNorm_{second}": "norm2"}, ("Dense_0", "Dense_1")
    names = norms | {f"MlpBlock_{mlp}/{name}": f"mlp.fc{n}" for n, name in enumerate(dense, start=1)}
    names |= {name: f"attn.{own}" for name, own in attention(at).items()}
    blocks = [modules(names, f"blocks.{index}.") for index in range(DEPTH)]
    arrays = modules({"embedding": "patch_embed.proj", "Transformer/encoder_norm": "norm", "head": "head"})
    arrays["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = state["pos_embed"]
    if "cls_token" in state:
        arrays["cls"] = state["cls_token"]
    if stacked:
        arrays |= {f"Transformer/encoderblock/{k}": np.stack([b[k] for b in blocks]) for k in blocks[0]}
    else:
        arrays |= {f"Transformer/encoderblock_{i}/{k}": v for i, block in enumerate(blocks) for k, v in block.items()}
    if "attn_pool.latent" in state:
        head = {"LayerNorm_0": "norm", "MlpBlock_0/Dense_0": "mlp.fc1", "MlpBlock_0/Dense_1": "mlp.fc2"}
        found = {"probe": state["attn_pool.latent"], **modules(head | attention("0", "q"), "attn_pool.")}
        arrays |= {f"MAPHead_0/{name}": array for name, array in found.items()}
    return {prefix + name: array for name, array in arrays.items()}


BEFORE = {"class_token": False, "fc_norm": False}
JAX: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("augreg", {}, {"big_vision": False}, {}),
    ("pre-linen", {}, {"big_vision": False, "prefix": "opt/target/"}, {}),
    (
        "big_vision-gap",
        {**BEFORE, "global_pool": "avg"},
        {"big_vision": True, "prefix": "params/"},
        POOLED,
    ),
    (
        "big_vision-map-stacked",
        {**BEFORE, "global_pool": "map"},
        {"big_vision": True, "prefix": "params/", "stacked": True},
        {"classifier": "map"},
    ),
]


@pytest.mark.parametrize(("name", "theirs_kwargs", "form", "ours_kwargs"), JAX, ids=[row[0] for row in JAX])
def test_google_npz(
    name: str, theirs_kwargs: dict[str, Any], form: dict[str, Any], ours_kwargs: dict[str, Any]
) -> None:
    theirs = small_timm(**theirs_kwargs)
    np.savez("vit.npz", **jax_arrays(theirs, **form))
    # timm reads the file the same way, so that the names are the source's.
    reader: Any = small_timm(**theirs_kwargs)
    nn.init.zeros_(reader.head.weight)
    reader.load_pretrained("vit.npz")
    assert_same(reader, theirs)
    ours = small(**ours_kwargs)
    fitted = load(ours, "vit.npz")
    assert set(fitted.loaded) == set(ours.state_dict())
    assert_same(ours, theirs)


def test_deit_pth_takes_the_average_and_arguments_are_no_code() -> None:
    """As DeiT's main.py saves it: model, optimizer, scheduler, epoch, average, scaler and the parsed arguments."""
    theirs, worse = small_timm(), small_timm()
    nn.init.normal_(worse.head.weight)
    arguments = argparse.Namespace(lr=5e-4, output_dir=Path("runs"), clip_grad=None, data_set="IMNET")
    weights = {"model": worse.state_dict(), "model_ema": theirs.state_dict()}
    others = {"optimizer": {"state": {}, "param_groups": []}, "epoch": 299, "scaler": {}, "best": np.float64(79.8)}
    ours = small()
    assert load(ours, saved({**weights, **others, "args": arguments})).part == "model_ema"
    assert_same(ours, theirs)


def test_a_script_as_in_torchs_tutorial_with_the_state_of_numpys_generator() -> None:
    theirs, ours = small_timm(), small()
    others = {"optimizer_state_dict": {}, "loss": torch.tensor(0.5), "numpy": np.random.get_state()}
    assert load(ours, saved({"epoch": 3, "model_state_dict": theirs.state_dict(), **others})).part == "model_state_dict"
    assert_same(ours, theirs)


def test_deit3_pth() -> None:
    theirs = small_timm(init_values=0.1, no_embed_class=True)
    state = {re.sub(r"ls([12])\.gamma", r"gamma_\1", k): v for k, v in theirs.state_dict().items()}
    assert "blocks.0.gamma_1" in state
    ours = small(layer_scale=1.0, position_tokens="patches")
    assert set(load(ours, saved({"model": state})).loaded) == set(ours.state_dict())
    assert_same(ours, theirs)


def mae_decoder() -> dict[str, Tensor]:
    decoder = {"mask_token": torch.rand(1, 1, 16), "decoder_pos_embed": torch.rand(1, 17, 16)}
    for name in ("decoder_embed", "decoder_blocks.0.attn.qkv", "decoder_norm", "decoder_pred"):
        decoder |= {f"{name}.weight": torch.rand(16, 16), f"{name}.bias": torch.rand(16)}
    return decoder


def test_mae_pth_of_pre_training_and_of_fine_tuning() -> None:
    # Fine-tuned: the mean over the patches, then fc_norm; the class token goes through the blocks.
    theirs = small_timm(global_pool="avg")
    assert "fc_norm.weight" in theirs.state_dict()
    finetuned = saved({"model": theirs.state_dict(), "args": argparse.Namespace(blr=5e-4)})
    kind = {"class_token": True, "classifier": "pooled"}
    ours = small(**kind)
    load(ours, finetuned)
    assert_same(ours, theirs)
    refused(small(), finetuned, r"final norm elsewhere than the model; use model\.classifier=pooled")
    # Pre-trained: no head, a decoder, and a norm that was trained on every token.
    encoder = {k: v for k, v in small_timm().state_dict().items() if not k.startswith("head")}
    torch.manual_seed(0)
    ours = small(**kind)
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    fitted = load(ours, saved({"model": encoder | mae_decoder()}))
    assert fitted.fresh.keys() == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    assert fitted.left_out.keys() == mae_decoder().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name]) == (name in fitted.fresh), name
    table = dict(fitted.table())
    assert table["loaded"] == f"{len(before) - 4} tensors"
    assert [text for what, text in fitted.table() if what == "left fresh"] == [
        f"head.weight, head.bias: {CLASSES} classes, none in the file",
        "norm.weight, norm.bias: the file's is of every token",
    ]


STEM_WIDTHS, STRIDES = (8, 12, 12, 16), (2, 2, 1, 2)
CONV_STEM: dict[str, Any] = {"stem": "conv", "stem_widths": STEM_WIDTHS, "stem_strides": STRIDES}


class PyclsVit(torchvision.models.VisionTransformer):
    """torchvision's, whose blocks are pycls'; without a class token pycls takes the mean of the patches."""

    def __init__(self, *, conv: bool, token: bool) -> None:
        config = torchvision.models.vision_transformer.ConvStemConfig
        stem = [config(width, 3, stride) for width, stride in zip(STEM_WIDTHS, STRIDES, strict=True)] if conv else None
        super().__init__(SIZE, PATCH, DEPTH, HEADS, WIDTH, 96, num_classes=CLASSES, conv_stem_configs=stem)
        self.token = token
        if not token:
            del self.class_token
            self.encoder.pos_embedding = nn.Parameter(self.encoder.pos_embedding[:, 1:].clone())
        randomise(self).eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.token else self.heads(self.encoder(self._process_input(x)).mean(dim=1))

    def state(self) -> dict[str, Tensor]:
        """In the names of pycls' branch main, with tokens before samples."""
        names = {
            r"^conv_proj\.conv_bn_relu_(\d)\.0": r"stem.cstem\1_conv",
            r"^conv_proj\.conv_bn_relu_(\d)\.1": r"stem.cstem\1_bn",
            r"^conv_proj\.conv_last": "stem.cstem_last_conv", r"^conv_proj": "stem.patchify",
            r"^encoder\.pos": "pos", r"layers\.encoder_layer": "block", r"self_attention": "self_attention.block",
            r"mlp\.0": "mlp_block.linear_1", r"mlp\.3": "mlp_block.linear_2", r"^heads\.head": "head.head_fc",
        }  # fmt: skip
        found = {}
        for name, tensor in self.state_dict().items():
            for theirs, ours in names.items():
                name = re.sub(theirs, ours, name)
            found[name] = tensor.transpose(0, 1).contiguous() if name == "pos_embedding" else tensor
        return found


@pytest.mark.parametrize("token", [True, False], ids=["token", "pooled"])
@pytest.mark.parametrize(
    ("stem", "branch"),
    [("patchify", "main"), ("conv", "main"), ("conv", "vitconfigs"), ("conv", "vitconfigs_os")],
)
def test_pycls_vit_pyth(stem: str, branch: str, token: bool) -> None:
    """The other branches' tokens are behind the samples; vitconfigs has its own `MultiheadSelfAttention`."""
    theirs = PyclsVit(conv=stem == "conv", token=token)
    state = theirs.state()
    assert ("stem.patchify.weight" in state, "class_token" in state) == (stem == "patchify", token)
    assert "encoder.block_0.self_attention.block.in_proj_bias" in state
    if branch != "main":
        state["pos_embedding"] = state["pos_embedding"].transpose(0, 1)
    if branch == "vitconfigs":
        for old, new in {".block.in_proj_": ".attn_proj.", ".block.out_proj": ".out_proj"}.items():
            state = {name.replace(old, new): tensor for name, tensor in state.items()}
    worse = {name: tensor + 1 for name, tensor in state.items()}
    checkpoint = {"epoch": 399, "test_err": 20.1, "ema_err": np.float64(19.6), "cfg": "MODEL:\n  TYPE: vit\n"}
    parts = {"model_state": worse, "ema_state": state, "optimizer_state": {"state": {}, "param_groups": []}}
    kind: dict[str, Any] = ({} if token else POOLED) | (CONV_STEM if stem == "conv" else {})
    ours = small(mlp_width=96, **kind)
    fitted = load(ours, saved(checkpoint | parts, "model.pyth"))
    assert fitted.part == "ema_state"
    assert not fitted.fresh
    assert not fitted.left_out
    first = "stem.projection.weight" if stem == "patchify" else "stem.convs.0.weight"
    assert fitted.adapted.pop(first) == "input channels from BGR to RGB"
    assert not fitted.adapted
    assert_same(ours, lambda batch: theirs(batch.flip(1)))
    file = saved(checkpoint | parts | {"ema_err": 21.0, "model_state": state}, "model.pyth")
    assert load(ours, file).part == "model_state"
    if not token:
        after = small(mlp_width=96, **(kind | {"classifier_norm": "after_pool"}))
        refused(after, file, r"final norm elsewhere .* model\.classifier_norm=before_pool")


@pytest.mark.slow
def test_pycls_resnet_pyth() -> None:
    theirs = randomise(torchvision.models.resnext50_32x4d(num_classes=CLASSES)).eval()

    def renamed(name: str) -> str:
        name = re.sub(r"^(conv1|bn1)\.", lambda m: {"conv1": "stem.conv.", "bn1": "stem.bn."}[m[1]], name)
        name = re.sub(r"^layer(\d)\.(\d+)\.", lambda m: f"s{m[1]}.b{int(m[2]) + 1}.", name)
        name = re.sub(r"\.conv([123])\.", lambda m: f".f.{'abc'[int(m[1]) - 1]}.", name)
        name = re.sub(r"(b\d+)\.bn([123])\.", lambda m: f"{m[1]}.f.{'abc'[int(m[2]) - 1]}_bn.", name)
        name = name.replace(".downsample.0.", ".proj.").replace(".downsample.1.", ".bn.")
        return re.sub(r"^fc\.", "head.fc.", name)

    state = {renamed(name): tensor for name, tensor in theirs.state_dict().items()}
    assert {"s1.b1.proj.weight", "s1.b1.bn.weight", "s4.b3.f.c_bn.running_var", "stem.bn.bias"} <= set(state)
    ours = ResNet(depth=50, groups=32, width_per_group=4, num_classes=CLASSES).double().eval()
    fitted = load(ours, saved({"model_state": state, "epoch": 99}, "X-50-32x4d.pyth"))
    assert fitted.adapted == {"stem.conv.weight": "input channels from BGR to RGB"}
    assert {*fitted.loaded, *fitted.adapted} == set(ours.state_dict())
    assert_same(ours, lambda batch: theirs(batch.flip(1)))


@pytest.mark.slow
@pytest.mark.parametrize("classes", [CLASSES, 3])
@pytest.mark.parametrize(
    ("theirs", "needed", "model"),
    [
        ("resnet18", "conv", {"stem": "imagenet", "shortcut": "pool"}),
        ("resnet26d", "pool", {"stem": "deep", "shortcut": "conv"}),
    ],
)
def test_the_other_shortcut_is_told(theirs: str, needed: str, model: dict[str, Any], classes: int) -> None:
    """All names and shapes fit."""
    file = saved(timm.create_model(theirs, num_classes=CLASSES))
    sizes = {**model, "depth": int(theirs[6:8]), "num_classes": classes}
    line = rf"^weights: model\.pth was trained with model\.shortcut={needed} .*; use model\.shortcut={needed}$"
    refused(ResNet(**sizes), file, line)
    fitted = load(ResNet(**{**sizes, "shortcut": needed}), file)
    assert set(fitted.fresh) == (set() if classes == CLASSES else {"head.weight", "head.bias"})


HUB: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("deit_small_patch16_224", {}, {}, ""),
    ("vit_base_patch16_gap_224", {}, {"classifier": "pooled", "classifier_norm": "before_pool"}, ""),
    ("vit_small_patch14_dinov2", {"num_classes": CLASSES}, {"layer_scale": 1e-5}, ""),
    # GELU by tanh is GELU but for its rounding.
    ("vit_base_patch32_siglip_256", {}, {"classifier": "map"}, ""),
    ("vit_small_patch16_rope_ape_224", {}, {"layer_scale": 1e-5}, r"of a model that rotates .* model\.name=vit_small_"),
    ("vit_base_patch16_224", {"act_layer": "quick_gelu"}, {}, r"of a model that has QuickGELU in its MLPs"),
    ("vit_base_patch16_rpn_224", {"qkv_bias": True}, {"classifier": "pooled"}, r"normalises after attention and MLP"),
    (
        "vit_base_patch16_224",
        {"global_pool": "avg", "pool_include_prefix": True},
        {"classifier": "pooled", "class_token": True},
        r"pools over class token and registers, too",
    ),
    (
        "deit_small_patch16_224",
        {},
        {"heads": 6, "norm_eps": 1e-5, "class_token": True, **POOLED},
        r"^weights: .* was trained with model\.heads=3 .* has 6, .*\.heads=3\n"
        r".*model\.norm_eps=1e-06 and the model has 1e-05.*\n.*model\.classifier=token and the model has pooled",
    ),
]


@pytest.mark.parametrize(("name", "theirs_kwargs", "ours_kwargs", "told"), HUB)
def test_what_no_tensor_shows_is_known_of_timms_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, theirs_kwargs: dict[str, Any], ours_kwargs: dict[str, Any], told: str
) -> None:
    sizes = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    theirs = timm.create_model(name, **{**sizes, "num_classes": CLASSES, **theirs_kwargs})
    monkeypatch.setattr(timm, "create_model", lambda name, *, pretrained: theirs)
    # Not all of these have weights.
    monkeypatch.setattr(read, "timm_weights", lambda name: None)
    ours = small(**ours_kwargs).float()
    if told:
        refused(ours, f"timm:{name}", told)
        return
    fitted = load(ours, f"timm:{name}")
    assert set(fitted.loaded) == set(ours.state_dict())
    with torch.no_grad():
        batch = torch.randn(3, 3, SIZE, SIZE)
        assert relative_error(ours(batch), theirs.eval()(batch)) < 1e-2


def own_lite0(**kwargs: Any) -> nn.Module:
    return timm.models.efficientnet_lite0(**kwargs)


@pytest.mark.parametrize(
    ("name", "theirs", "other"),
    [
        (
            "efficientnet_lite0",
            "tf_efficientnet_lite0",
            r"computes conv_stem otherwise .* model\.name=tf_efficientnet",
        ),
        ("vit_tiny_patch16_224", "deit_tiny_patch16_224", ""),
        ("own_lite0", "tf_efficientnet_lite0", ""),
    ],
)
def test_layers_of_timms_other_models_are_compared(
    monkeypatch: pytest.MonkeyPatch, name: str, theirs: str, other: str
) -> None:
    # A user's own model differs on purpose.
    monkeypatch.setitem(_registry._model_entrypoints, "own_lite0", own_lite0)
    ours, made = TimmNetwork(name=name, num_classes=CLASSES), timm.create_model(theirs, num_classes=CLASSES)
    monkeypatch.setattr(timm, "create_model", lambda name, *, pretrained: made)
    monkeypatch.setattr(read, "timm_weights", lambda name: None)
    if other:
        refused(ours, f"timm:{theirs}", other)
    else:
        load(ours, f"timm:{theirs}")


def test_heads_of_googles_files_and_settings_of_pycls_are_known() -> None:
    others = r"trained with model\.heads=3 and the model has 6.*\n.*model\.norm_eps=1e-06 and the model has 1e-05"
    for stacked in (False, True):
        np.savez("vit.npz", **jax_arrays(small_timm(), big_vision=False, stacked=stacked))
        refused(small(heads=6, norm_eps=1e-5), "vit.npz", others)
    settings = "LN:\n  EPS: 1.0e-06\nMODEL:\n  TYPE: vit\nVIT:\n  NUM_HEADS: 3\n"
    saved({"model_state": PyclsVit(conv=False, token=True).state(), "cfg": settings}, "vit.pyth")
    refused(small(mlp_width=96, heads=6, norm_eps=1e-5), "vit.pyth", others)
    load(small(mlp_width=96), "vit.pyth")
    pooled = {"class_token": True, **POOLED}
    for name, width in (("vit.npz", 4 * WIDTH), ("vit.pyth", 96)):
        refused(small(mlp_width=width, **pooled), name, r"model\.classifier=token and the model has pooled")
        assert load(small(mlp_width=width, num_classes=3, **pooled), name).fresh
    settings = "MODEL:\n  TYPE: resnet\nRESNET:\n  STRIDE_1X1: true\n  TRANS_FUN: bottleneck_transform\n"
    file = saved({"model_state": {"s1.b1.f.a.weight": torch.rand(1)}, "cfg": settings}, "resnet.pyth")
    line = r"makes maps smaller in its 1x1 convolutions .*; no model here does; choose"
    refused(ResNet(depth=18, num_classes=CLASSES), file, line)


def test_heads_of_torchvisions_hub_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        state = torchvision.models.vit_b_16().state_dict()
        sizes = {"image_size": 224, "patch_size": 16, "width": 768, "depth": 12, "mlp_width": 3072, "num_classes": 1000}
        ours, other = (VisionTransformer(**sizes, heads=heads) for heads in (12, 16))
    weights = type(torchvision.models.ViT_B_16_Weights.DEFAULT)
    settings: dict[str, bool] = {}
    monkeypatch.setattr(weights, "get_state_dict", lambda self, **kwargs: settings.update(kwargs) or state)
    read = pretrained.read_weights("torchvision:vit_b_16")
    # torch's default runs code of a file that lies in the cache, without comparing its hash.
    assert settings == {"check_hash": True, "weights_only": True}
    assert set(pretrained.fit(read, ours).loaded) == set(ours.state_dict())
    with pytest.raises(UserError, match=r"trained with model\.heads=12 and the model has 16"):
        pretrained.fit(read, other)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module.module."])
def test_timms_files_and_the_names_of_torchs_wrappers(prefix: str) -> None:
    theirs = small_timm()
    state = {f"{prefix}{name}": tensor.clone() for name, tensor in theirs.state_dict().items()}
    if prefix == "module.module.":
        # An `AveragedModel`, as torchvision's train.py has it.
        state["n_averaged"] = torch.tensor(3)
    save_file(state, "wrapped.safetensors")
    for file in (saved(state), "wrapped.safetensors"):
        ours = small()
        fitted = load(ours, file)
        assert (fitted.adapted, fitted.fresh, fitted.left_out) == ({}, {}, {})
        assert set(fitted.loaded) == set(ours.state_dict())
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("theirs_kwargs", "ours_kwargs", "extra"),
    [
        ({}, {}, 1),
        ({"reg_tokens": 3}, {"registers": 3}, 4),
        ({"no_embed_class": True, "reg_tokens": 2}, {"registers": 2, "position_tokens": "patches"}, 0),
        ({"class_token": False, "global_pool": "avg"}, {"classifier": "pooled"}, 0),
    ],
)
@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        ((32, 32), (24, 24), False),
        ((32, 32), (40, 40), False),
        ((32, 32), (24, 48), False),
        # 8 x 2 patches have as many positions as 4 x 4; without a word of their images they are those of squares.
        ((32, 32), (64, 16), True),
        ((64, 16), (32, 32), True),
        ((48, 32), (16, 40), True),
    ],
)
def test_positions_are_interpolated_as_timm_does(
    before: Any, after: Any, known: bool, theirs_kwargs: Any, ours_kwargs: Any, extra: int
) -> None:
    theirs = small_timm(img_size=before, **theirs_kwargs)
    ours, read = small(image_size=after, **ours_kwargs), pretrained.read_weights(saved(theirs))
    fitted = pretrained.fit(read, ours, image_size=Size(*before) if known else None)
    old, new = ([side // PATCH for side in size] for size in (before, after))
    assert fitted.adapted == {"positions.value": f"interpolated from {old[0]} x {old[1]} to {new[0]} x {new[1]}"}
    expected = resample_abs_pos_embed(theirs.pos_embed, new, old, num_prefix_tokens=extra)[0]
    assert torch.equal(fitted.tensors["positions.value"], expected)
    assert torch.equal(expected[:extra], theirs.pos_embed[0, :extra])
    ours.load_state_dict(fitted.tensors)
    theirs.set_input_size(img_size=after)
    assert_same(ours, theirs, after)


def test_positions_of_tokens_move_where_the_other_model_keeps_them() -> None:
    theirs = small_timm(reg_tokens=2)
    ours = small(registers=2, position_tokens="patches")
    fitted = load(ours, saved(theirs))
    assert fitted.adapted.keys() == {"class_token.value", "registers.value", "positions.value"}
    assert_same(ours, theirs)
    theirs = small_timm(no_embed_class=True)
    ours = small()
    assert load(ours, saved(theirs)).adapted == {"positions.value": "arranged for the model's tokens"}
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("grid", "registers", "position_tokens"), [((3, 3), 4, "patches"), ((2, 2), 4, "all"), ((4, 6), 0, "all")]
)
def test_rows_that_fit_two_grids_are_read_as_the_model_has_them(
    grid: tuple[int, int], registers: int, position_tokens: str
) -> None:
    """Nine are those of 3 x 3 patches or of 2 x 2 and five tokens; 25 of 5 x 5 or of 4 x 6 and the class token."""
    size = (grid[0] * PATCH, grid[1] * PATCH)
    theirs = small_timm(img_size=size, reg_tokens=registers, no_embed_class=position_tokens == "patches")
    ours = small(image_size=size, registers=registers, position_tokens=position_tokens)
    assert not load(ours, saved(theirs)).adapted
    assert_same(ours, theirs, size)


@pytest.mark.parametrize("size", [SIZE, 48])
@pytest.mark.parametrize(
    ("theirs_kwargs", "ours_kwargs", "allow"),
    [
        ({}, {"classifier": "pooled"}, "class_token.value"),
        ({}, {"registers": 4}, "registers.value"),
        ({"reg_tokens": 2}, {}, "registers.value"),
        ({}, {"classifier": "pooled", "registers": 1}, "class_token.value registers.value"),
        ({"reg_tokens": 1}, {"position_tokens": "patches"}, "registers.value"),
    ],
)
def test_positions_of_tokens_that_one_side_has_alone(
    size: int, theirs_kwargs: dict[str, Any], ours_kwargs: dict[str, Any], allow: str
) -> None:
    theirs = small_timm(**theirs_kwargs)
    ours = small(image_size=size, num_classes=3, **ours_kwargs)
    with pytest.raises(UserError) as caught:
        load(ours, saved(theirs))
    assert "positions.value" not in str(caught.value)
    assert ("model.class_token=true" in str(caught.value)) == ("classifier" in ours_kwargs)
    fitted = load(ours, saved(theirs), *allow.split())
    assert fitted.adapted["positions.value"].startswith("arranged for the model's tokens")
    side, extra = size // PATCH, ours.extra_tokens if ours.position_tokens == "all" else 0
    expected = resample_abs_pos_embed(theirs.pos_embed, [side, side], num_prefix_tokens=theirs.num_prefix_tokens)[0]
    assert torch.equal(ours.positions.value[extra:], expected[theirs.num_prefix_tokens :])
    if ours.position_tokens == "patches":
        assert torch.equal(ours.class_token.value, (theirs.cls_token + theirs.pos_embed[:, :1]).flatten())  # type: ignore[union-attr]
        return
    has_token = ours.class_token is not None
    assert torch.equal(ours.positions.value[:has_token], expected[:has_token])
    assert not ours.positions.value[has_token:extra].any()


@pytest.mark.slow
def test_weights_for_gray_images_take_rgb() -> None:
    gray = torch.randn(3, 1, SIZE, SIZE, dtype=torch.float64)
    theirs = small_timm(in_chans=1)
    resnet = randomise(timm.create_model("resnet18d", num_classes=CLASSES, in_chans=1)).eval()
    deep = ResNet(depth=18, stem="deep", shortcut="pool", num_classes=CLASSES)
    for network, same, name in ((small(), theirs, "stem.projection.weight"), (deep, resnet, "stem.deep.0.conv.weight")):
        fitted = load(network, saved(same))
        assert fitted.adapted == {name: "1 input channel shared among 3"}
        with torch.no_grad():
            found = network.double().eval()(gray.expand(-1, 3, -1, -1))
            # A third of a weight is rounded to float32.
            torch.testing.assert_close(found, same.double()(gray), rtol=1e-5, atol=1e-5)
    refused(small(), saved(small_timm(in_chans=4)), r"other shapes: stem\.projection\.weight")


def test_patch_size_and_classes() -> None:
    ours = small(patch_size=16, num_classes=3)
    before = ours.head.weight.clone()
    fitted = load(ours, saved(small_timm()))
    assert fitted.adapted.keys() == {"positions.value", "stem.projection.weight"}
    assert fitted.fresh == dict.fromkeys(("head.weight", "head.bias"), "3 classes, 7 classes in the file")
    assert torch.equal(ours.head.weight, before)


def test_what_does_not_fit_is_an_error_unless_allowed_by_name() -> None:
    theirs = small_timm(init_values=0.1)
    file = saved(theirs)
    refused(small(), file, r"unexpected: blocks.0.scale1.value, .*\n.*weights_allow")
    fitted = load(small(), file, "*.scale?.value")
    assert set(fitted.left_out.values()) == {"allowed"}
    missing = r"missing: blocks.0.attention.query_norm.weight, .* and 5 more"
    refused(small(qk_norm=True, layer_scale=0.1), file, missing)
    fitted = load(small(qk_norm=True, layer_scale=0.1), file, "*_norm.*")
    assert len(fitted.fresh) == 8
    shapes = r"other shapes: stem.projection.weight \(48, 3, 8, 8\) for \(24, 3, 8, 8\)"
    refused(small(width=24, layer_scale=0.1), file, shapes)
    # More rows for the token than there are.
    longer = saved({**theirs.state_dict(), "cls_token": torch.rand(1, 1, 20 * WIDTH)})
    refused(small(layer_scale=0.1), longer, r"other shapes: class_token\.value \(960,\) for \(48,\)")
    refused(small(), saved({"a": torch.rand(2)}), "is of an unknown kind; its first names are a")


@pytest.mark.parametrize("name", ["convnext_atto", "efficientnet_b0", "swin_tiny_patch4_window7_224", "gernet_s"])
def test_other_models_of_timm_are_not_taken_for_ours(name: str) -> None:
    """Their names, too, begin with `stem.`, `stages.` and `patch_embed.`"""
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
        layout, _, unknown = read_names(state)
        assert (layout, unknown) == ("unknown", list(state))
        with pytest.raises(pretrained.UnknownKind, match="is of an unknown kind; its first names are "):
            pretrained.fit(pretrained.ReadWeights(name, layout, {}, plain=state), small())


@pytest.mark.parametrize("network", [small, lambda: TimmNetwork(name="vit_tiny_patch16_224", num_classes=3)])
@pytest.mark.parametrize("prefix", ["", "vit."])
def test_the_form_of_transformers_is_refused(network: Callable[[], Network], prefix: str) -> None:
    names = ("embeddings.cls_token", "encoder.layer.0.attention.output.dense.weight", "layernorm.weight")
    line = r"model\.pth is in the form of Hugging Face's transformers; use timm's \(timm:N"
    refused(network(), saved({f"{prefix}{name}": torch.rand(2) for name in names}), line)


def test_files_that_cannot_be_read() -> None:
    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("ran",)

    code = saved({"model": small().state_dict(), "hook": Code()})
    refused(small(), code, r"model.pth is no file of only tensors and plain values, .*print")
    Path("text.pth").write_text("# a script, or the text that a server sends instead of a file")
    refused(small(), "text.pth", r"^weights: .*text.pth is no file of only tensors")
    for name in ("half.pth", "half.npz", "half.safetensors"):
        Path(name).write_bytes(b"half a file")
        refused(small(), name, f"weights: .*{name}")
    torch.save([1, 2], "list.pth")
    refused(small(), "list.pth", "it holds a list, not weights by name")
    refused(small(), "none.pth", "is not a file")
    refused(small(), "timm:resnet51x", "timm has no weights resnet51x; did you mean resnet51q")


def test_hubs_are_asked_by_name_again_after_a_network_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, asked, hosts = small_timm(), list[tuple[str, bool, bool]](), list[tuple[str, int]]()

    def create(name: str, *, pretrained: bool) -> nn.Module:
        asked.append((name, pretrained, constants.HF_HUB_OFFLINE))
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("no route to host")
        return theirs

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        hosts.append(address)
        if len(hosts) == 1:
            raise TimeoutError("no route to host")
        return socket.socket()

    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(read, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    name, ours = "deit_tiny_patch16_224.fb_in1k", small()
    refused(ours, f"timm:{name}", r"could not be downloaded \(no route to host\); without a network, put")
    load(ours, f"timm:{name}")
    assert asked == [(name, True, True), (name, True, False)]
    assert_same(ours, theirs)
    assert read.pinned("torchvision:resnet50") == "torchvision:resnet50"
    assert hosts == [("huggingface.co", 443), ("huggingface.co", 443), ("download.pytorch.org", 443)]
    # A mirror.
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:8765")
    load(ours, f"timm:{name}")
    assert hosts[-1] == ("localhost", 8765)


def test_a_hub_that_drops_packets_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of its addresses, nor for their names."""
    answers = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: answers.wait(60) and socket.socket())
    monkeypatch.setattr(read, "getproxies", dict)
    monkeypatch.setattr(read, "_REACH_SECONDS", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not read._reachable("timm:resnet18")
    assert not answers.is_set()
    answers.set()


def test_timms_own_models_take_timms_files() -> None:
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES, depth=2)).eval()
    name, options = "vit_tiny_patch16_224", {"depth": 2}
    ours = TimmNetwork(name=name, num_classes=CLASSES, image_size=64, options=options).double().eval()
    load(ours, saved(theirs))
    assert_same(ours, theirs, 64)
    # Another size and classes, as timm's own functions have it; of a run, too.
    for state in (theirs, {f"network.{key}": tensor for key, tensor in theirs.state_dict().items()}):
        ours = TimmNetwork(name=name, num_classes=3, image_size=96, options=options).double().eval()
        fitted = load(ours, saved(state))
        assert fitted.fresh.keys() == {"network.head.weight", "network.head.bias"}
        assert fitted.adapted == {"network.pos_embed": "resized by timm from (1, 17, 192) to (1, 37, 192)"}
        expected = resample_abs_pos_embed(theirs.pos_embed, [6, 6])
        assert torch.equal(ours.network.pos_embed, expected)
    refused(ours, saved({**theirs.state_dict(), "extra": torch.rand(1)}), r"unexpected: network\.extra")


def test_a_beit_file_with_the_indices_that_timm_leaves_out() -> None:
    name, options = "beit_base_patch16_224", {"depth": 1, "embed_dim": 48, "num_heads": 3}
    theirs = randomise(timm.create_model(name, num_classes=CLASSES, img_size=32, **options)).eval()
    indices = {"blocks.0.attn.relative_position_index": theirs.blocks[0].attn.relative_position_index}
    ours = TimmNetwork(name=name, num_classes=CLASSES, image_size=32, options=options).double().eval()
    load(ours, saved({"model": {**theirs.state_dict(), **indices}}))
    assert_same(ours, theirs)


def test_a_model_with_the_names_of_a_vit_and_other_shapes() -> None:
    """SAM's positions are a map."""
    name, options = "samvit_base_patch16", {"depth": 1, "embed_dim": 48, "num_heads": 3, "global_attn_indexes": ()}
    theirs = randomise(timm.create_model(name, num_classes=CLASSES, img_size=64, **options)).eval()
    ours = TimmNetwork(name=name, num_classes=CLASSES, image_size=64, options=options).double().eval()
    load(ours, saved(theirs))
    assert_same(ours, theirs, 64)
    refused(small_vit(), saved(theirs), "unexpected: .*pos_embed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext_atto", "edgenext_xx_small", "poolformer_s12", "beit_base_patch16_224"])
def test_weights_of_another_model_than_timms_are_told(name: str) -> None:
    """Filters of timm's raise what they like on another model's file."""
    with torch.device("meta"):
        ours = TimmNetwork(name=name, num_classes=5, options={"depth": 2} if "beit" in name else {})
    for theirs in (timm.create_model("resnet18"), small_timm()):
        with pytest.raises(UserError, match=r"^weights: model\.pth .* does not fit the model: missing: network\."):
            pretrained.fit(pretrained.read_weights(saved(theirs)), ours)
