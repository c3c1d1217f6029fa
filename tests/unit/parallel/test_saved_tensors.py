"""What is saved for the backward pass, on the host or in 8 bits: which tensors, how many bytes, how far off."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from small import MODELS, batch, distance, gradients, held, resnet, saving, train, vit
from torch import Tensor, nn

from pycls_fast.models import VisionTransformer
from pycls_fast.parallel import save_activation_memory
from pycls_fast.parallel.memory import SMALLEST, PackedStorage, View, _Hook, keep
from pycls_fast.plan.live_memory import LiveMemory

OFFLOAD: dict[str, Any] = {"activation_offload": "cpu"}
COMPRESS: dict[str, Any] = {"activation_compression": "8bit"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "amp"), [("vit", {**OFFLOAD, "recompute": "full"}, False), ("resnet", OFFLOAD, True)]
)
def test_offloading_changes_no_bit(kind: str, way: dict[str, Any], amp: bool) -> None:
    steps = 20 if kind == "vit" else 1
    expected = train(MODELS[kind](), steps, amp=amp)
    found = train(saving(MODELS[kind](), **way), steps, amp=amp)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_the_error_of_compressed_gradients_against_float64(kind: str) -> None:
    """The forward pass is exact; gradients are off by percents, not by rounding and not by much more."""
    exact = gradients(MODELS[kind]().double(), torch.float64)
    reference = gradients(MODELS[kind]())
    found = gradients(saving(MODELS[kind](), **COMPRESS))
    assert torch.equal(found["logits"], reference["logits"])
    assert distance(reference, exact) < 1e-5
    assert 1e-5 < distance(found, exact) < 0.03
    for name, value in exact.items():
        if not name.endswith("key.bias"):  # zero but for rounding
            assert distance({name: found[name]}, {name: value}) < 0.1, name


def test_compressed_gradients_have_no_bias() -> None:
    """The mean over many batches is nearer to the exact mean than a single batch is."""
    model, compressed = vit(drop_path=0.0), saving(vit(drop_path=0.0), **COMPRESS)
    singles, sums = [], []
    for seed in range(20):
        pair = []
        for network in (model, compressed):
            network.zero_grad()
            images_BCHW, labels_B = batch(seed=seed)
            F.cross_entropy(network(images_BCHW), labels_B).backward()
            pair.append({name: p.grad.clone() for name, p in network.named_parameters()})
        singles.append(distance(pair[1], pair[0]))
        sums.append(pair)
    means = [{name: sum(pair[k][name] for pair in sums) for name in sums[0][0]} for k in (0, 1)]
    assert distance(means[1], means[0]) < 0.7 * sum(singles) / len(singles)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_what_compression_holds(amp: bool) -> None:
    sizes = {"width": 64, "mlp_width": 256, "attention": "sdpa"}
    limit = 0.55 if amp else 0.3
    assert held(saving(vit(**sizes), **COMPRESS), amp=amp) <= limit * held(vit(**sizes), amp=amp)


@pytest.mark.slow
def test_what_compression_holds_of_a_resnet() -> None:
    assert held(saving(resnet(), **COMPRESS), amp=False) <= 0.3 * held(resnet(), amp=False)


def test_views_of_one_storage_are_kept_once() -> None:
    """Three linear layers read one tensor; their gradients come from one kept copy."""
    layers = nn.ModuleList(nn.Linear(64, 8) for _ in range(3))
    made: list[PackedStorage] = []
    original = PackedStorage.__init__

    def counting(self: PackedStorage, *arguments: Any, **named: Any) -> None:
        made.append(self)
        original(self, *arguments, **named)

    for flags in ({"in_8_bits": False, "on_host": True}, {"in_8_bits": True, "on_host": False}):
        made.clear()
        features = torch.randn(32, 64, requires_grad=True) * 1.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedStorage, "__init__", counting)
            with keep(layers, **flags):
                total = sum(layer(features.view(4, 8, 64)).sum() for layer in layers)
        assert len(made) == 1
        total.backward()


def test_a_storage_that_was_changed_in_place_is_kept_again() -> None:
    hook = _Hook(nn.Identity(), (), in_8_bits=False, on_host=True)
    features = torch.randn(2 * SMALLEST)
    before = features.clone()
    first = hook.pack(features)
    features.add_(1.0)
    second = hook.pack(features)
    assert isinstance(first, View)
    assert isinstance(second, View)
    assert torch.equal(first.restore(), before)
    assert torch.equal(second.restore(), before + 1.0)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_strides_and_values_of_every_layout_come_back(in_8_bits: bool) -> None:
    base = torch.randn(8, 16, 12, 10, requires_grad=True) * 1.0
    layouts = [
        base,
        base.to(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2),
        base[:, 4:14],
        base[:, ::2],
        base[2:],
        base[:, 0],
        base[..., 0],
        base[:1, :, :, :1].expand(8, 16, 12, 10),
        base.transpose(0, 1).flatten(2),
    ]
    for tensor in layouts:
        hook = _Hook(nn.Identity(), (), in_8_bits=in_8_bits, on_host=not in_8_bits)
        kept = hook.pack(tensor)
        assert isinstance(kept, View) == (tensor.numel() >= SMALLEST)
        back = kept.restore() if isinstance(kept, View) else kept
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        if in_8_bits:
            assert (back - tensor).abs().max() < 8 / 500
        else:
            assert torch.equal(back, tensor)


def test_a_small_piece_of_a_large_storage_is_kept_alone() -> None:
    hook = _Hook(nn.Identity(), (), in_8_bits=False, on_host=True)
    large = torch.randn(100, 50, 64)
    for piece in (large[:, 0], large[10:20]):
        kept = hook.pack(piece)
        assert isinstance(kept, View)
        assert kept.packed.parts[0].numel() == piece.numel()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_parameters_and_their_copies_stay_exact(amp: bool) -> None:
    """The gradient of a linear network's input depends on its weights alone: no error may be in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False))
    model[0].weight.requires_grad_(False)
    images = torch.randn(32, 64)
    found = []
    for flags in ({}, {"in_8_bits": True, "on_host": False}):
        leaf = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            if flags:
                with keep(model, **flags):
                    out = model(leaf)
            else:
                out = model(leaf)
        out.float().square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_what_carries_no_gradient_stays_exact() -> None:
    hook = _Hook(nn.Identity(), (), in_8_bits=True, on_host=False)
    count = 2 * SMALLEST
    for tensor in (
        torch.randn(count),
        torch.arange(count),
        torch.rand(count) < 0.5,
        torch.randn(8, requires_grad=True) * 1,
    ):
        assert torch.equal(hook.pack(tensor), tensor)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.randn(count))
    # Of a stride's convolution: its images carry no gradient, but it is no parameter's copy.
    maps = F.conv1d(torch.randn(2, 1, count), nn.Parameter(torch.randn(1, 1, 3)))
    for tensor, is_kept in ((weight, False), (weight.bfloat16().view(2, -1).t(), False), (maps, True)):
        assert isinstance(hook.pack(tensor), View) == is_kept


def test_memory_is_freed_with_the_graph_and_without_a_backward_pass() -> None:
    gone: list[weakref.ref[Tensor]] = []
    for way in (OFFLOAD, COMPRESS):
        model = saving(resnet(), **way)
        images_BCHW, _ = batch()
        with LiveMemory([*model.parameters(), *model.buffers(), images_BCHW]) as memory:
            gc.disable()
            try:
                out = model(images_BCHW)
                gone.append(weakref.ref(out))
                del out
                assert memory.live == 0
            finally:
                gc.enable()
    assert all(reference() is None for reference in gone)


def test_evaluation_and_names_are_not_touched() -> None:
    model = saving(vit(), **COMPRESS).eval()
    assert list(model.state_dict()) == list(vit().state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch()[0]), vit().eval()(batch()[0]))


@pytest.mark.parametrize(
    "way",
    [{**COMPRESS, "recompute": "full"}, {**COMPRESS, "recompute": "selective"}, {**OFFLOAD, "recompute": "selective"}],
)
def test_what_does_not_go_together_is_refused(way: dict[str, Any]) -> None:
    model = vit()
    with pytest.raises(ValueError, match="use"):
        save_activation_memory(model, model.units(), **way)


def test_compressed_and_on_the_host_is_compressed() -> None:
    together = gradients(saving(vit(), **COMPRESS, **OFFLOAD))
    assert all(torch.equal(together[name], value) for name, value in gradients(saving(vit(), **COMPRESS)).items())


@pytest.mark.slow
def test_a_short_training_on_digits_follows_the_exact_one() -> None:
    """A hundred and twenty steps: both learn, and the losses stay together."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1).div(8).sub(1)
    labels = torch.tensor(digits.target)
    curves = []
    for way in ({}, COMPRESS):
        torch.manual_seed(0)
        model = VisionTransformer(
            image_size=8, patch_size=2, width=32, depth=2, heads=2, mlp_width=64, num_classes=10, drop_path=0.1
        )
        save_activation_memory(model, model.units(), **way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for step in range(120):
            torch.manual_seed(step)
            chosen = torch.randint(len(labels), (64,))
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses).view(6, 20).mean(dim=1))
    assert curves[0][0] > 1.5 > 1.2 > curves[0][-1]
    assert (curves[1] - curves[0]).abs().max() < 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", [OFFLOAD, COMPRESS, {**OFFLOAD, "recompute": "full"}])
def test_on_cuda_without_waiting(way: dict[str, Any]) -> None:
    model, images_BCHW = vit().cuda(), batch()[0].cuda()
    expected = None
    for network in (model, saving(vit().cuda(), **way)):
        torch.manual_seed(0)
        network(images_BCHW).sum().backward()  # chooses kernels
        network.zero_grad()
        torch.manual_seed(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            network(images_BCHW).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        expected = expected or found
    assert distance(found, expected) < (0.05 if way is COMPRESS else 1e-5)
