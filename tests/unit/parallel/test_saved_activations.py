"""Recomputed, offloaded and compressed activations: what is learned, what is kept, and how far off it is."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import MODELS, batch, distance, gradients, held, resnet, saving, train, vit
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pycls_fast.models.complexity import complexity
from pycls_fast.models.moe import Experts
from pycls_fast.parallel.saved_activations import (
    GROUP,
    SMALLEST,
    BitReLUs,
    SavedTensors,
    View,
    _Hook,
    compress,
    decompress,
    save_activation_memory,
)
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.speed import Speed
from tests.factories import assert_same_bits

FULL: dict[str, Any] = {"recompute": "full"}
SELECTIVE: dict[str, Any] = {"recompute": "selective"}
OFFLOAD: dict[str, Any] = {"activation_offload": "cpu"}
COMPRESS: dict[str, Any] = {"activation_compression": "8bit"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [FULL, SELECTIVE, OFFLOAD, {**OFFLOAD, **FULL}],
    ids=["full", "selective", "offloaded", "both"],
)
@pytest.mark.parametrize(("kind", "amp"), [("vit", False), ("resnet", True)], ids=["float32", "autocast"])
def test_steps_are_the_same_to_the_bit(kind: str, amp: bool, way: dict[str, Any]) -> None:
    """Drop-path at 0.4; BatchNorm's statistics and its count of batches are in the state."""
    steps = 20 if kind == "vit" else 2
    expected = train(MODELS[kind](), steps, amp=amp)
    found = train(saving(MODELS[kind](), **way), steps, amp=amp)
    assert_same_bits(found, expected)


def test_selective_keeps_what_an_activation_would_have_changed() -> None:
    """A convolution's result; layers of timm that squeeze and excite have such."""

    def gradient(**way: Any) -> Tensor:
        torch.manual_seed(0)
        unit = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(inplace=True))
        save_activation_memory(unit, [("", unit)], Speed(**way))
        unit(torch.randn(2, 3, 8, 8)).square().sum().backward()
        assert isinstance(unit[0].weight.grad, Tensor)
        return unit[0].weight.grad

    assert torch.equal(gradient(**SELECTIVE), gradient())


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_what_is_held_between_the_passes(amp: bool) -> None:
    sizes = {"width": 64, "mlp_width": 256, "attention": "sdpa"}
    off = held(vit(**sizes), amp=amp)
    assert held(saving(vit(**sizes), **FULL), amp=amp) <= 0.3 * off
    assert held(saving(vit(**sizes), **SELECTIVE), amp=amp) <= 0.6 * off
    assert held(saving(vit(**sizes), **COMPRESS), amp=amp) <= (0.55 if amp else 0.3) * off
    if not amp:
        assert held(saving(resnet(), **COMPRESS)) <= 0.3 * held(resnet())


def test_what_was_computed_again_is_not_kept() -> None:
    """By the loss of a router, which is remembered from the first time."""
    model = saving(vit(experts=Experts(count=4)), **FULL)
    images_BCHW, labels_B = batch(64)
    with LiveMemory([*model.parameters(), *model.buffers(), images_BCHW, labels_B]) as memory:
        loss = F.cross_entropy(model(images_BCHW), labels_B) + model.auxiliary_loss()
        loss.backward()
        model.zero_grad()
    # Less than what a block computes with, 17 tokens of width 32.
    assert memory.live < 64 * 17 * 32 * 4


def test_selective_repeats_attention_and_its_projection_alone() -> None:
    counts = {}
    for name, way in {"off": {}, "full": FULL, "selective": SELECTIVE}.items():
        model = saving(vit(depth=3), **way)
        with FlopCounterMode(display=False) as counter:
            gradients(model)
        counts[name] = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = {name: sum(n for op, n in ops.items() if "addmm" in op) for name, ops in counts.items()}
    attention = {name: sum(n for op, n in ops.items() if "bmm" in op) for name, ops in counts.items()}
    projections = 3 * 2 * 8 * 17 * 32 * 32
    assert products["off"] + projections == products["selective"] < products["full"]
    assert attention["off"] < attention["selective"] == attention["full"]


@pytest.mark.parametrize("way", [FULL, COMPRESS])
def test_a_copy_calls_the_copy_and_names_and_evaluation_stay(way: dict[str, Any]) -> None:
    model = saving(vit(), **way)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()[0]), vit().eval()(batch()[0]))
    model.train()
    assert list(model.state_dict()) == list(vit().state_dict())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert gradients(model)["logits"].abs().max() > 0
    assert gradients(twin)["logits"].abs().max() == 0
    assert complexity(model, image_size=16) == complexity(vit(), image_size=16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_under_compilation(kind: str) -> None:
    expected = gradients(MODELS[kind](drop_path=0.0))
    for way in (FULL, SELECTIVE):
        model = saving(MODELS[kind](drop_path=0.0), **way)
        for _, unit in model.units():
            unit.compile(backend="aot_eager")
        found = gradients(model)
        assert distance(found, expected) < 1e-5
        for name, value in MODELS[kind]().named_buffers():
            if name.endswith("num_batches_tracked"):
                assert model.get_buffer(name) == value + 1


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


def test_a_storage_that_was_changed_in_place_is_kept_again() -> None:
    hook = _Hook((), in_8_bits=False, on_host=True)
    features = torch.randn(2 * SMALLEST)
    before = features.clone()
    kept: list[Any] = [hook.pack(features), hook.pack(features.add_(1.0))]
    for view, expected in zip(kept, (before, before + 1.0), strict=True):
        assert torch.equal(view.restore(), expected)


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
        hook = _Hook((), in_8_bits=in_8_bits, on_host=not in_8_bits)
        kept = hook.pack(tensor)
        assert isinstance(kept, View) == (tensor.numel() >= SMALLEST)
        back = kept.restore() if isinstance(kept, View) else kept
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        if in_8_bits:
            assert (back - tensor).abs().max() < 8 / 500
        else:
            assert torch.equal(back, tensor)


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_parameters_and_their_copies_stay_exact(amp: bool) -> None:
    """The gradient of a linear network's input depends on its weights alone: no error may be in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False))
    model[0].weight.requires_grad_(False)
    images = torch.randn(32, 64)
    found = []
    ways: list[dict[str, bool]] = [{}, {"in_8_bits": True, "on_host": False}]
    for flags in ways:
        leaf = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = SavedTensors(model, **flags)(leaf) if flags else model(leaf)
        out.float().square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_what_carries_no_gradient_stays_exact() -> None:
    hook = _Hook((), in_8_bits=True, on_host=False)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, 10 * GROUP + 3])
def test_the_error_is_at_most_half_a_step_of_the_group(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    flat = (torch.randn(count, dtype=torch.float64) * torch.logspace(-3, 3, count, dtype=torch.float64)).to(dtype)
    back = decompress(compress(flat), count, dtype)
    assert back.dtype == dtype
    for start in range(0, count, GROUP):
        group, found = flat[start : start + GROUP].double(), back[start : start + GROUP].double()
        span = (group.max() - group.min()).item()
        own = torch.finfo(dtype).eps * group.abs().max().item() + 4e-7 * (span if dtype != torch.float64 else 0)
        assert (found - group).abs().max().item() <= span / 510 * (1 + 1e-6) + own
    packed = compress(flat)
    kept = sum(part.numel() * part.element_size() for part in packed)
    groups = -(-count // GROUP)
    assert kept == groups * (GROUP + 2 * packed.low_G1.element_size())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_equal_numbers_are_exact_and_what_is_not_finite_stays_visible(bad: float) -> None:
    flat = torch.cat([torch.full((GROUP,), 0.1), torch.randn(GROUP), torch.zeros(GROUP)])
    flat[GROUP + 5] = bad
    back = decompress(compress(flat), len(flat), flat.dtype)
    assert not torch.isfinite(back[GROUP + 5])
    assert torch.equal(back[:GROUP], flat[:GROUP])
    assert torch.equal(back[2 * GROUP :], flat[2 * GROUP :])


def relu_inputs() -> list[Tensor]:
    """In several layouts, with zeros and what is not a number among them."""
    maps = torch.randn(2, 6, 5, 4)
    maps[0, 0, 0] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    return [maps, maps.to(memory_format=torch.channels_last), maps.transpose(1, 3), maps[:, ::2], maps.double()]


@pytest.mark.parametrize("inplace", [False, True])
def test_one_bit_relu_is_torchs_to_the_bit(inplace: bool) -> None:
    for features in relu_inputs():
        gradient, found = torch.randn_like(features), []
        for bits in (False, True):
            leaf = features.clone(memory_format=torch.preserve_format).requires_grad_()
            if bits:
                with BitReLUs():
                    out = F.relu(leaf * 1.0, inplace=inplace)
            else:
                out = F.relu(leaf * 1.0, inplace=inplace)
            out.backward(gradient)
            assert leaf.grad is not None
            found.append((out.detach(), leaf.grad))
        for expected, ours in zip(*found, strict=True):
            assert torch.equal(expected.nan_to_num(7.0), ours.nan_to_num(7.0))
            assert expected.stride() == ours.stride()


def test_every_spelling_of_relu_is_caught() -> None:
    for relu in (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, nn.ReLU(), nn.ReLU(inplace=True)):
        with BitReLUs():
            out = relu(torch.randn(4, requires_grad=True) * 1.0)
        assert type(out.grad_fn).__name__ == "BitReLUBackward"
