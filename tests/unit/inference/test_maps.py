"""Maps against the same written out by hand, block by block and head by head, on random weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.inference import maps
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.resnet import ResNet
from tests.factories import randomise, small_vit

KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "registers": {"registers": 2, "attention": "sdpa", "qk_norm": True},
    "pooled": {"classifier": "pooled", "layout": "batch_second", "qkv": "fused"},
    "mae": {"classifier": "pooled", "class_token": True, "classifier_norm": "before_pool"},
    "map": {"classifier": "map", "layer_scale": 0.3},
    "padded": {"sequence_padding": 8, "attention": "sdpa"},
}


def vit(**kwargs: Any) -> Any:
    return randomise(small_vit(image_size=12, patch_size=4, width=12, num_classes=4, **kwargs)).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_hand(model: Any) -> list[list[list[Tensor]]]:
    """softmax(q k^T / sqrt(E)) of each image, block and head, in plain loops; a MAP head's row as a last block."""
    with torch.no_grad():
        features = model._embed(model.stem(images()))
        found = []
        for sample in range(2):
            x = features[sample]
            blocks = []
            for block in model.blocks:
                x1 = block.norm1(x)
                blocks.append(heads(block.attention, x1, x1))
                mixed = torch.cat([p @ v for p, v in zip(blocks[-1], cut(block.attention.value(x1)), strict=True)], 1)
                branch = block.attention.projection(mixed)
                x = x + (branch if block.scale1 is None else block.scale1(branch))
                branch = block.mlp(block.norm2(x))
                x = x + (branch if block.scale2 is None else block.scale2(branch))
            if model.pooling is not None:
                blocks.append(heads(model.pooling.attention, model.pooling.probe[None], model.norm(x)))
            found.append(blocks)
    return found


def cut(values_ND: Tensor) -> list[Tensor]:
    return [values_ND[:, 4 * head : 4 * head + 4] for head in range(3)]


def heads(attention: Any, asking: Tensor, asked: Tensor) -> list[Tensor]:
    rows = []
    for q, k in zip(cut(attention.query(asking)), cut(attention.key(asked)), strict=True):
        if attention.query_norm is not None:
            q, k = attention.query_norm(q), attention.key_norm(k)
        scores = (q @ k.T) / math.sqrt(4)
        rows.append(scores.exp() / scores.exp().sum(dim=1, keepdim=True))
    return rows


def read(model: Any, matrix: Tensor) -> Tensor:
    extra = model.extra_tokens
    row = matrix[0] if model.classifier == "token" else matrix[extra:].mean(dim=0)
    return row[extra:].reshape(3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_the_last_block_and_rollout(kind: str) -> None:
    model = vit(**KINDS[kind])
    kernels = [block.attention.kernel for block in model.blocks]
    with torch.no_grad():
        last, rolled = maps.attention_maps(model, images()), maps.attention_rollout(model, images())
    assert (last.shape, rolled.shape) == ((2, 3, 3, 3), (2, 3, 3))
    # Of a MAP head the one query's row over the patches, in the rollout then what reached those.
    pooled = model.classifier == "map"
    for sample, blocks in enumerate(by_hand(model)):
        for head, matrix in enumerate(blocks[-1]):
            wanted = matrix[0].reshape(3, 3) if pooled else read(model, matrix)
            torch.testing.assert_close(last[sample, head], wanted, rtol=1e-10, atol=0)
        flow = torch.eye(model.tokens, dtype=torch.float64)
        for matrices in blocks[:3]:
            flow = (0.5 * sum(matrices) / 3 + 0.5 * torch.eye(model.tokens, dtype=torch.float64)) @ flow
        wanted = ((sum(blocks[3]) / 3) @ flow)[0].reshape(3, 3) if pooled else read(model, flow)
        torch.testing.assert_close(rolled[sample], wanted, rtol=1e-10, atol=0)
        assert 0 < rolled[sample].sum() <= 1 + 1e-12
    assert [block.attention.kernel for block in model.blocks] == kernels


@pytest.mark.parametrize("kind", KINDS)
def test_patch_features_are_the_last_block_s(kind: str) -> None:
    """Normed, without the tokens before and behind the patches."""
    model = vit(**KINDS[kind])
    unpadded = vit(**{**KINDS[kind], "sequence_padding": 1})
    unpadded.load_state_dict(model.state_dict())
    with torch.no_grad():
        features = maps.patch_features(model, images())
        logits = model(images())
        tokens = unpadded.enter(images())
        for block in unpadded.blocks:
            tokens = block(tokens)
        for sample in range(2):
            own = tokens[:, sample] if model.batch_dim == 1 else tokens[sample]
            wanted = torch.stack([model.norm(token) for token in own[model.extra_tokens :]]).reshape(3, 3, 12)
            torch.testing.assert_close(features[sample], wanted, rtol=1e-10, atol=1e-12)
    if kind == "mae":
        # The norm is before the mean: these are what the classifier pools.
        torch.testing.assert_close(model.head(features.mean(dim=(1, 2))), logits, rtol=1e-10, atol=1e-12)


def test_kernels_come_back_after_an_error() -> None:
    model = vit()
    kernels = [block.attention.kernel for block in model.blocks]

    def fail(_: Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), maps.explicit_attention(model, fail):
        model(images())
    assert [block.attention.kernel for block in model.blocks] == kernels


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("ours", "stages.3"),
        ("resnet18", "network.layer4"),
        ("convnext_atto", "network.norm_pre"),
        # Channels come last.
        ("swin_tiny_patch4_window7_224", "network.norm"),
        # Its head reads only the class token, which comes before the patches.
        ("vit_tiny_patch16_224", "network.blocks.0"),
    ],
)
def test_class_maps_are_grad_cam(name: str, last: str) -> None:
    """Selvaraju et al. 2017, equations 1 and 2, with the gradients of autograd."""
    own = {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)} if "swin" in name else {}
    own = {"depth": 2, "embed_dim": 12} if "vit" in name else own
    made: Any = {"name": name, "num_classes": 4, "image_size": 64, "options": own}
    model: nn.Module = randomise(ResNet(depth=18, num_classes=4) if name == "ours" else TimmNetwork(**made))
    model = model.eval()
    batch, labels = torch.randn(2, 3, 64, 64, dtype=torch.float64), torch.tensor([3, 1])
    kept: list[Tensor] = []
    module = model.get_submodule(last)
    handle = module.register_forward_hook(lambda m, a, output: (output.retain_grad(), kept.append(output))[0])
    logits = model(batch)
    logits[torch.arange(2), labels].sum().backward()
    handle.remove()
    assert kept[0].grad is not None
    channels = 3 if "swin" in name or "vit" in name else 1
    features, gradient = kept[0], kept[0].grad
    if "vit" in name:
        features, gradient = (each[:, 1:].unflatten(1, (4, 4)) for each in (features, gradient))
    alpha = gradient.mean(dim=(1, 2) if channels == 3 else (2, 3), keepdim=True)
    wanted = F.relu((alpha * features).sum(dim=channels)).detach()
    with torch.no_grad():
        found = maps.class_maps(model, batch, labels)
    assert wanted.max() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_principal_components() -> None:
    """A plane of known directions inside of 6 dimensions, and noise far below it."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator)).Q
    places = torch.randn(2, 5, 5, 2, dtype=torch.float64, generator=generator) * torch.tensor([10.0, 3.0]).double()
    features = places @ basis[:2] + 7 + 1e-6 * torch.randn(2, 5, 5, 6, dtype=torch.float64, generator=generator)
    found = maps.principal_components(features)
    assert found.shape == (2, 5, 5, 3)
    assert 0 == found.min() < found.max() == 1
    for component in range(2):
        pair = torch.stack([found[..., component].flatten(), places[..., component].flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() > 0.98
    # Of one place there is nothing to see.
    assert (maps.principal_components(features[:1, :1, :1]) == 0.5).all()


@pytest.mark.parametrize("compute", [maps.attention_maps, maps.attention_rollout])
def test_what_a_model_does_not_have(compute: Any) -> None:
    network = ResNet(depth=18, num_classes=4)
    with pytest.raises(UserError, match="is for vision transformers of this package; kind=class for others"):
        compute(network, images())
    # CoaT's features are a list.
    coat = TimmNetwork(name="coat_tiny", num_classes=4, image_size=32, options={"embed_dims": (16, 16, 16, 16)})
    for model in (vit(), coat.eval()):
        with pytest.raises(UserError, match="kind: class is for ResNets, and for timm's networks with"):
            maps.class_maps(model, torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="kind: features is for vision transformers and ResNets of this package"):
        maps.patch_features(nn.Identity(), images())
