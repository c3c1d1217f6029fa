"""Normalising, erasing and mixing in the workers: the very images and labels that the device would have made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.data.batch import Batch
from pycls_fast.data.mix import ElementMixer, Mixer
from pycls_fast.data.prepare import Prepare, PrepareOnHost
from pycls_fast.data.sampling import Keys, TrainSampler
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.losses import Targets
from pycls_fast.parallel import World
from pycls_fast.seeds import microbatch_seed
from pycls_fast.train.step import Step

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
# What is left of the order normalise, erase, mix when its beginning is done by the workers.
PLACES = [("cpu", "device", "device"), ("cpu", "cpu", "device"), ("cpu", "cpu", "cpu")]
AUGMENT = (
    "augment.erase_probability=0.5", "augment.erase_value=noise", "augment.mixup_alpha=0.5", "augment.cutmix_alpha=1.0",
)  # fmt: skip


MIXERS = {
    "batch": Mixer(mixup_alpha=0.5, cutmix_alpha=1.0),
    "pair": ElementMixer(mode="pair", mixup_alpha=0.5, cutmix_alpha=1.0),
    "elem": ElementMixer(mode="elem", mixup_alpha=0.5, cutmix_alpha=1.0, probability=0.8),
}


def inputs(
    places: tuple[str, str, str], batch: Batch, seed: int, *, erase_value: Any, dtype: torch.dtype = torch.float32,
    memory_format: Any = "channels_last", mode: str = "batch",
) -> tuple[Tensor, tuple[Tensor, Tensor, float | Tensor]]:  # fmt: skip
    """Images and labels as the step has them."""
    normalize_on, erase_on, mix_on = places
    mixer = MIXERS[mode]
    if normalize_on == "cpu":
        host = PrepareOnHost(
            Prepare(MEAN, STD, erase_value=erase_value),
            erase=erase_on == "cpu",
            mixer=mixer if mix_on == "cpu" else None,
        )
        batch = host(batch, seed).to(CPU)
        assert batch.images_BHWC.dtype == torch.float32
        assert batch.images_BHWC.is_contiguous()
    prepare = Prepare(MEAN, STD, erase_value=erase_value, dtype=dtype, memory_format=memory_format)
    images_BCHW, mixed = prepare(batch, seed), batch.mixed
    if mixed is None:
        images_BCHW, mixed = mixer(images_BCHW, seed)
    return images_BCHW, mixed.labels(batch.labels_B)


def raw(seed: int = 3) -> Batch:
    return synthetic_batch(8, 12, 10, erase_probability=0.7, seed=seed, device=CPU)


@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize("erase_value", ["mean", "noise"])
@pytest.mark.parametrize(
    ("memory_format", "mode"),
    [("channels_last", "batch"), ("contiguous", "batch"), ("channels_last", "pair"), ("channels_last", "elem")],
)
def test_the_same_bits_over_many_batches(
    places: tuple[str, str, str], erase_value: str, memory_format: str, mode: str
) -> None:
    lams: set[float] = set()
    settings: dict[str, Any] = {"erase_value": erase_value, "memory_format": memory_format, "mode": mode}
    for number in range(20):
        batch, seed = raw(number), microbatch_seed(7, step=number, position=0, rank=0)
        expected, labels = inputs(("device",) * 3, batch, seed, **settings)
        found, others = inputs(places, batch, seed, **settings)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        assert all(torch.equal(a, b) for a, b in zip(labels[:2], others[:2], strict=True))
        shares, other_shares = torch.as_tensor(labels[2]), torch.as_tensor(others[2])
        assert torch.equal(shares, other_shares)
        assert shares.ndim == (mode != "batch")
        lams.update(shares.reshape(-1).tolist())
    assert len(lams) > 10


@pytest.mark.parametrize("places", PLACES, ids="-".join)
def test_in_16_bits_the_error_is_that_of_rounding(places: tuple[str, str, str]) -> None:
    batch, seed = raw(), 11
    exact, _ = inputs(("device",) * 3, batch, seed, erase_value="mean", dtype=torch.float64)
    plain, _ = inputs(PLACES[-1], batch, seed, erase_value="mean", dtype=torch.bfloat16)
    found, _ = inputs(places, batch, seed, erase_value="mean", dtype=torch.bfloat16)
    assert 0 < (found.double() - exact).norm() <= 4 * (plain.double() - exact).norm()


def test_the_batch_is_left_alone() -> None:
    host = PrepareOnHost(Prepare(MEAN, STD), erase=False)
    batch = raw()
    normalised = host(batch, 1)
    before = normalised.images_BHWC.clone()
    assert normalised.erase_B4 is not None
    Prepare(MEAN, STD)(normalised, 1)
    assert torch.equal(normalised.images_BHWC, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "workers", "mode"),
    [
        *((places, workers, "batch") for places in PLACES for workers in (0, 2)),
        *((PLACES[2], n, "elem") for n in (0, 2)),
    ],
)
def test_the_loader_of_a_run(places: tuple[str, str, str], workers: int, mode: str) -> None:
    """From the configuration: the step gets the same from workers that prepare as from those that do not."""
    found = []
    for chosen in (("device",) * 3, places):
        names = ("normalize_on", "erase_on", "mix_on")
        overrides = [f"speed.{name}={value}" for name, value in zip(names, chosen, strict=True)]
        config = load_config(
            "vit_digits",
            ["data=synthetic", "data.image_size=16", "data.global_batch_size=8", "optim.accumulation_steps=2",
             f"data.num_workers={workers}", f"augment.mix_mode={mode}", *AUGMENT, *overrides],
        )  # fmt: skip
        switches = build.switches(config, CPU)
        world = World(rank=1, size=2, device=CPU)
        loader = build.train_loader(config, SyntheticImages(20, 16, 3, 0), world, switches, start_step=1, steps=3)
        parts: Any = SimpleNamespace(
            seed=config.seed, rank=1, prepare=build.prepare(config, CPU, switches), mixer=build.mixer(config)
        )
        steps = []
        for number, batch in enumerate(loader):
            normalised, erased, mixed = (place == "cpu" for place in chosen)
            assert batch.images_BHWC.is_floating_point() == normalised
            assert (batch.erase_B4 is None) == erased
            assert (batch.mixed is not None) == mixed
            steps.append(Step._inputs(parts, 1 + number // 2, number % 2, batch))
        found.append(steps)
    assert len(found[0]) == len(found[1]) == 4
    for (images, targets), (others, other_targets) in zip(*found, strict=True):
        assert torch.equal(images, others)
        assert_same(targets, other_targets)
    assert not torch.equal(found[0][0][0], found[0][1][0])


@pytest.mark.parametrize("mode", MIXERS)
def test_the_targets_are_what_is_in_the_images(mode: str) -> None:
    """A class is a channel that is full: the mean of each channel says how much of its class the image has."""
    labels_B = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])
    images_BHWC = 255 * F.one_hot(labels_B)[:, None, None].expand(-1, 20, 14, -1).to(torch.uint8)
    batch = Batch(images_BHWC, labels_B, torch.arange(8), None)
    parts: Any = SimpleNamespace(seed=3, rank=0, prepare=Prepare((0.0,) * 3, (1.0,) * 3), mixer=MIXERS[mode])
    mixed = 0
    for step in range(10):
        images_BCHW, targets = Step._inputs(parts, step, 0, batch)
        found_BK = F.one_hot(targets.labels_B).double()
        if targets.mixed_B is not None:
            lam_B1 = torch.as_tensor(targets.lam).double().reshape(-1, 1)
            found_BK = lam_B1 * found_BK + (1 - lam_B1) * F.one_hot(targets.mixed_B)
        torch.testing.assert_close(found_BK, images_BCHW.double().mean(dim=(2, 3)), rtol=1e-5, atol=1e-5)
        mixed += bool(((found_BK > 0.01) & (found_BK < 0.4)).any())
    assert mixed > 5


def assert_same(one: Targets, other: Targets) -> None:
    assert torch.equal(one.labels_B, other.labels_B)
    assert torch.equal(torch.as_tensor(one.lam), torch.as_tensor(other.lam))
    assert (one.mixed_B is None) == (other.mixed_B is None)
    if one.mixed_B is not None and other.mixed_B is not None:
        assert torch.equal(one.mixed_B, other.mixed_B)


def test_a_microbatch_carries_its_seed() -> None:
    sampler = TrainSampler(20, seed=5, global_batch_size=8, rank=1, world_size=2, total_steps=2, accumulation_steps=2)
    keys = list(sampler)
    assert all(isinstance(each, Keys) and len(each) == 2 for each in keys)
    assert [each.seed for each in keys] == [
        microbatch_seed(5, step=step, position=position, rank=1) for step in range(2) for position in range(2)
    ]


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        (("speed.normalize_on=device", "speed.erase_on=cpu"), "speed.erase_on: cpu conflicts with speed.normalize_on="),
        (("speed.erase_on=device", "speed.mix_on=cpu"), "speed.mix_on: cpu conflicts with speed.erase_on=device"),
    ],
)
def test_an_order_that_cannot_be_is_refused_with_a_way_out(overrides: tuple[str, ...], begins: str) -> None:
    base = ["speed=reference", *AUGMENT, *(["speed.mix_on=device"] if "mix_on" not in begins else [])]
    with pytest.raises(UserError) as caught:
        build.switches(load_config("vit_digits", [*base, *overrides]), CPU)
    (line,) = caught.value.lines
    assert line.startswith(begins)
    build.switches(load_config("vit_digits", [*base, *overrides, line.rpartition("use ")[2].partition(" ")[0]]), CPU)
