"""Half-precision networks with float32 master weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network
from pycls_fast.optim.choices import AdamW
from pycls_fast.optim.ema import Ema
from pycls_fast.optim.groups import NORMS, parameter_groups
from pycls_fast.optim.masters import MasterWeights
from pycls_fast.optim.optimizers import load_named_state, named_state
from tests.factories import assert_same_bits, randomise, small_vit

HALVES = [torch.float16, torch.bfloat16]


def vit(seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    return randomise(small_vit(image_size=8, patch_size=4, depth=2, num_classes=5, attention="sdpa")).float()


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=18, num_classes=5, stem="small")


def masters_of(model: nn.Module, dtype: torch.dtype = torch.float16, **changes: Any) -> MasterWeights:
    return MasterWeights(model, **{"dtype": dtype, "wide_norms": True, "kept": True, **changes})


def batches(steps: int, dtype: torch.dtype, count: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        images_BCHW = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return images_BCHW.to(dtype), torch.randint(0, 5, (4,), generator=generator)

    return [[batch() for _ in range(count)] for _ in range(steps)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch[1])


def adamw(groups: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1, foreach=False)


def train(model: Network, masters: MasterWeights | None, steps: int, dtype: torch.dtype, micro: int = 2) -> Any:
    groups = parameter_groups(model, AdamW(lr=1.0, weight_decay=0.1))
    optimizer = adamw(groups if masters is None else masters.owned_groups(groups))
    for microbatches in batches(steps, dtype, micro):
        for batch in microbatches:
            (loss_of(model, batch) / micro).backward()
            if masters is not None:
                masters.take_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters is not None:
            masters.copy_to_model()
    return optimizer


@pytest.mark.parametrize("wide_norms", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_with_float64_as_the_low_format_the_scheme_is_plain_training_bit_for_bit(kept: bool, wide_norms: bool) -> None:
    plain, other = vit().double(), vit().double()
    masters = masters_of(other, torch.float64, wide=torch.float64, kept=kept, wide_norms=wide_norms)
    train(plain, None, 20, torch.float64)
    train(other, masters, 20, torch.float64)
    assert_same_bits(other.state_dict(), plain.state_dict())
    assert_same_bits(masters.state_dict(), plain.state_dict())
    start = vit().double().state_dict()
    assert not any(torch.equal(value, start[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("build", [vit, resnet])
def test_what_is_cast(build: Any, dtype: torch.dtype) -> None:
    for wide_norms in (True, False):
        model = build()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        masters = masters_of(model, dtype, wide_norms=wide_norms)
        for module in model.modules():
            # The masters are kept, so batch norm's statistics are.
            wide = isinstance(module, NORMS if wide_norms else nn.BatchNorm2d)
            for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if value.is_floating_point():
                    assert value.dtype == (torch.float32 if wide else dtype), name
        # The masters have what the model had, before it was rounded, under the same names.
        assert masters.state_dict().keys() == before.keys()
        exact = {id(p): p for p in masters.parameters}
        assert len(exact) == len(list(model.parameters()))
        for name, value in masters.state_dict().items():
            assert value.dtype == before[name].dtype
            if name in dict(model.named_parameters()):
                assert torch.equal(value, before[name])
        assert [name for name, _ in masters.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert all(p.dtype == torch.float32 for _, p in masters.named_parameters())
        seen: set[torch.dtype] = set()
        for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
            norm.register_forward_hook(lambda _, inputs, output, seen=seen: seen.add(inputs[0].dtype))
        assert model(torch.randn(2, 3, 8, 8, dtype=dtype)).dtype == dtype
        assert seen == ({torch.float32 if wide_norms else dtype} if build is vit else set())


def test_a_norm_without_weights_takes_the_format_of_what_it_normalises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2))
    masters_of(model, torch.bfloat16)
    assert model(torch.randn(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
def test_an_update_of_1e_4_of_the_weight_is_kept_by_the_masters_and_lost_without(dtype: torch.dtype) -> None:
    """Half a unit in the last place of 1.5 is 3e-4 of it in float16."""
    results = {}
    for kept in (True, False):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 1.5)
        masters = masters_of(model, dtype, kept=kept)
        optimizer = torch.optim.SGD(masters.parameters, lr=1.5e-4)
        for _ in range(30):
            model(torch.ones(1, 4, dtype=dtype)).sum().backward()
            masters.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
            masters.copy_to_model()
        results[kept] = model.weight.float().mean().item()
        assert masters.state_dict()["weight"].mean().item() == pytest.approx(1.5 - 30 * 1.5e-4 if kept else 1.5, 1e-6)
    assert results[False] == 1.5
    # Rounded: to half a unit in the last place.
    assert results[True] == pytest.approx(1.5 - 30 * 1.5e-4, abs=1.5 * torch.finfo(dtype).eps / 2)
    assert results[True] < 1.5 or dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [True, False])
def test_microbatches_are_added_up_in_float32(kept: bool) -> None:
    """1 + 64 x 2^-11 is 1 when it is added up in float16."""
    model = nn.Linear(1, 1, bias=False)
    masters = masters_of(model, kept=kept)
    for value in (1.0, *[2.0**-11] * 64):
        model(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
        masters.take_gradients()
    assert model.weight.grad is None
    (gradient,) = [p.grad for p in masters.parameters]
    assert gradient.dtype == torch.float32
    assert gradient.item() == 1 + 64 * 2.0**-11


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("wide_norms", "kept"), [(True, True), (False, True), (False, False)])
def test_rounding_of_the_forward_pass_and_the_gradients(dtype: torch.dtype, wide_norms: bool, kept: bool) -> None:
    """Against float64: errors of the format's own size, and no more than 4 times those of torch's autocast."""
    (batch,) = batches(1, torch.float64)[0]
    exact = vit().double()
    expected = exact(batch[0])
    loss_of(exact, batch).backward()
    gradients = {name: p.grad for name, p in exact.named_parameters()}

    def error(found: Tensor, wanted: Tensor) -> float:
        return ((found.double() - wanted).norm() / wanted.norm()).item()

    narrow = vit()
    masters = masters_of(narrow, dtype, wide_norms=wide_norms, kept=kept)
    half = (batch[0].to(dtype), batch[1])
    own = error(narrow(half[0]), expected)
    loss_of(narrow, half).mul(256).backward()
    masters.take_gradients()
    auto = vit()
    with torch.autocast("cpu", dtype=dtype):
        logits = auto(batch[0].float())
    reference = error(logits, expected)
    nn.functional.cross_entropy(logits.float(), batch[1]).mul(256).backward()
    assert 0 < own < 4 * max(reference, torch.finfo(dtype).eps)
    theirs = {name: p.grad / 256 for name, p in auto.named_parameters()}
    whole = [torch.cat([g[name].double().flatten() for name in gradients]) for g in (gradients, theirs)]
    mine = torch.cat([p.grad.double().flatten() / 256 for _, p in masters.named_parameters()])
    assert 0 < error(mine, whole[0]) < 4 * error(whole[1], whole[0])
    for name, p in masters.named_parameters():
        # The keys' bias has no gradient in exact arithmetic.
        if not name.endswith("key.bias"):
            assert error(p.grad / 256, gradients[name]) < 64 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("kept", [True, False])
def test_state_goes_from_one_precision_to_another(kept: bool) -> None:
    model = vit()
    masters = masters_of(model, kept=kept)
    optimizer = train(model, masters, 3, torch.float16)
    state = {name: value.clone() for name, value in masters.state_dict().items()}
    # No memory is held between steps but by kept ones.
    assert all((master.untyped_storage().nbytes() > 0) == kept for master in masters.masters)
    learned = named_state(optimizer, masters.named_parameters())
    assert all(value.dtype == torch.float32 for value in state.values())
    # float16 masters -> float32 -> bfloat16 masters: the same names, the values as far as the format goes.
    plain = vit(1)
    plain.load_state_dict(state)
    plain_optimizer = adamw(parameter_groups(plain, AdamW(lr=1.0, weight_decay=0.1)))
    load_named_state(plain_optimizer, plain.named_parameters(), learned)
    other = vit(2)
    others = masters_of(other, torch.bfloat16, wide_norms=False)
    others.load_state_dict(plain.state_dict())
    assert_same_bits(others.state_dict(), state)
    assert_same_bits(other.state_dict(), {name: value.bfloat16() for name, value in state.items()})
    # Back into the same: the same bits.
    again = vit(3)
    again_masters = masters_of(again, kept=kept)
    again_masters.load_state_dict(state)
    assert_same_bits(again_masters.state_dict(), state)
    assert_same_bits(again.state_dict(), model.state_dict())
    # A step begins with them.
    for parameter in again.parameters():
        parameter.grad = torch.zeros_like(parameter)
    again_masters.take_gradients()
    again_masters.copy_to_model()
    assert_same_bits(again.state_dict(), model.state_dict())


def test_the_average_follows_the_masters() -> None:
    """Steps that float16 cannot see reach the average; swapped in and out, nothing has changed."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    randomise(model)
    for kept in (True, False):
        masters = masters_of(model.float(), kept=kept)
        made = Ema(masters, decay=0.5, warmup=False, implementation="foreach")
        assert all(v.dtype in (torch.float32, torch.int64) for v in made.values.values())
        start = made.values["0.weight"].clone()
        with torch.no_grad():
            masters.live()["0.weight"].mul_(1 + 1e-4)
        masters.refresh_model()
        made.update(0)
        moved = not torch.equal(made.values["0.weight"], start)
        assert moved == kept
        values = {name: value.clone() for name, value in made.values.items()}
        state = {name: value.clone() for name, value in masters.state_dict().items()}
        low = model[0].weight.detach().clone()
        with torch.no_grad():
            made.values["0.weight"].mul_(1.3)
        with made.swapped_in():
            assert torch.equal(model[0].weight, (values["0.weight"] * 1.3).half())
        assert torch.equal(made.values["0.weight"], values["0.weight"] * 1.3)
        assert torch.equal(made.values["1.running_mean"], values["1.running_mean"])
        assert torch.equal(model[0].weight, low)
        assert_same_bits(masters.state_dict(), state)
