"""The last stages of a batch: normalising, erasing and mixing, on the device or by the workers; its way there."""

from __future__ import annotations

import math
import random
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torch import Tensor
from torchvision.transforms import v2

from pycls_fast import build
from pycls_fast.data.batch import Batch
from pycls_fast.data.choices import Augment
from pycls_fast.data.prepare import Mixer, Prepare, cutmix, cutmix_box, mixup, to_device
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.losses import Targets
from pycls_fast.parallel.world import World
from pycls_fast.train.step import Step
from tests.factories import config_of
from tests.unit.data.conftest import assert_same

MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
BOXES = [[0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 6, 7], [5, 6, 1, 1], [2, 0, 4, 1]]


def random_batch(erase: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images_BHWC = torch.randint(0, 256, (5, 6, 7, 3), dtype=torch.uint8, generator=generator)
    return Batch(
        images_BHWC=images_BHWC,
        labels_B=torch.arange(5),
        indices_B=torch.arange(5),
        erase_B4=torch.tensor(BOXES) if erase else None,
    )


@pytest.mark.parametrize("erase_value", [None, "mean", "noise"])
def test_contiguous_has_the_same_values(erase_value: Any) -> None:
    found = []
    for memory_format in ("channels_last", "contiguous"):
        torch.manual_seed(0)
        prepare = Prepare(MEAN, STD, erase_value=erase_value or "mean", memory_format=memory_format)  # type: ignore[arg-type]
        found.append(prepare(random_batch(erase=erase_value is not None)))
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].is_contiguous()
    assert torch.equal(*found)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_normalised(dtype: torch.dtype, error: float) -> None:
    """In 16 bits as in float32, rounded once."""
    batch = random_batch()
    x = batch.images_BHWC.permute(0, 3, 1, 2).double()
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    images_BCHW = Prepare(MEAN, STD, dtype=dtype)(batch)
    torch.testing.assert_close(images_BCHW.double(), (x / 255 - mean) / std, rtol=error, atol=error)
    for half in (torch.bfloat16, torch.float16):
        assert torch.equal(Prepare(MEAN, STD, dtype=half)(batch), Prepare(MEAN, STD)(batch).to(half))


def test_erased_boxes_become_the_mean() -> None:
    images_BCHW = Prepare(MEAN, STD)(random_batch(erase=True))
    untouched_BCHW = Prepare(MEAN, STD)(random_batch())
    mask_BCHW = torch.zeros(5, 3, 6, 7, dtype=torch.bool)
    for image, (top, left, height, width) in enumerate(BOXES):
        mask_BCHW[image, :, top : top + height, left : left + width] = True
    assert (images_BCHW[mask_BCHW] == 0).all()
    assert torch.equal(images_BCHW[~mask_BCHW], untouched_BCHW[~mask_BCHW])


def test_erased_boxes_become_noise_of_the_default_generator() -> None:
    size = 64
    batch = Batch(
        images_BHWC=torch.full((4, size, size, 3), 200, dtype=torch.uint8),
        labels_B=torch.arange(4),
        indices_B=torch.arange(4),
        erase_B4=torch.tensor([[0, 0, size, size]] * 3 + [[0, 0, 0, 0]]),
    )
    prepare = Prepare(MEAN, STD, erase_value="noise")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = prepare(batch)
        second = prepare(batch)
        torch.manual_seed(1)
        assert torch.equal(prepare(batch), first)
    assert not torch.equal(first, second)
    noise = first[:3].double()
    assert abs(noise.mean().item()) < 5 / noise.numel() ** 0.5
    assert abs(noise.std().item() - 1) < 5 / (2 * noise.numel()) ** 0.5
    plain = Prepare(MEAN, STD)(Batch(batch.images_BHWC, batch.labels_B, batch.indices_B, None))
    assert torch.equal(first[3], plain[3])


CPU = torch.device("cpu")
# What is left of the order normalise, erase, mix when its beginning is done by the workers.
PLACES = [("cpu", "device", "device"), ("cpu", "cpu", "device"), ("cpu", "cpu", "cpu")]


@pytest.mark.parametrize("erase_value", ["mean", "noise"])
@pytest.mark.parametrize(
    ("places", "workers"),
    [*((places, 0) for places in PLACES), pytest.param(PLACES[2], 2, marks=pytest.mark.slow)],
)
def test_the_loader_of_a_run(places: tuple[str, str, str], workers: int, erase_value: str) -> None:
    """From the configuration: the step gets the same from workers that prepare as from those that do not."""
    found: list[list[tuple[Tensor, Targets]]] = []
    for chosen in (("device",) * 3, places):
        names = ("normalize_on", "erase_on", "mix_on")
        overrides = [f"speed.{name}={value}" for name, value in zip(names, chosen, strict=True)]
        config = config_of(
            "data=synthetic", "data.image_size=16", "data.global_batch_size=8", "optim.accumulation_steps=2",
            f"data.num_workers={workers}", "augment.erase_probability=0.5", f"augment.erase_value={erase_value}",
            "augment.mixup_alpha=0.5", "augment.cutmix_alpha=1.0", *overrides,
        )  # fmt: skip
        switches = build.switches(config, CPU)
        world = World(rank=1, size=2, device=CPU)
        loader = build.train_loader(config, SyntheticImages(20, 16, 3, 0), world, switches, start_step=1, steps=7)
        prepare, mixer = build.prepare(config, CPU, switches), build.mixer(config)
        parts: Any = SimpleNamespace(
            seed=config.seed, rank=1, labels=attrgetter("labels_B"), prepare=prepare, mixer=mixer
        )
        found.append([])
        for number, batch in enumerate(loader):
            normalised, erased, mixed = (place == "cpu" for place in chosen)
            assert batch.images_BHWC.is_floating_point() == normalised
            assert (batch.erase_B4 is None) == erased
            assert (batch.lam is not None) == mixed
            found[-1].append(Step.inputs(parts, 1 + number // 2, number % 2, batch))
    assert len(found[0]) == len(found[1]) == 12
    for (images, targets), (others, other_targets) in zip(*found, strict=True):
        assert torch.equal(images, others)
        assert images.stride() == others.stride()
        for one, other in zip(vars(targets).values(), vars(other_targets).values(), strict=True):
            assert one is other is None or torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert len({targets.lam for _, targets in found[0]}) > 6


def make_batches(count: int, size: int = 4) -> list[Batch]:
    return [
        Batch(
            images_BHWC=torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8),
            labels_B=torch.tensor([number, 1]),
            indices_B=torch.tensor([number, 2]),
            erase_B4=torch.tensor([[number, 1, 2, 3], [0, 0, 0, 0]]) if number % 2 else None,
            damaged=((f"image {number}", "reason"),),
        )
        for number in range(count)
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["blocking", "prefetch"])
def test_on_the_device_under_load(mode: Any) -> None:
    """Large batches, freed at once, while the device is busy: memory reused too early would show."""
    device = torch.device("cuda")
    batches = [batch.pin_memory() for batch in make_batches(12, size=512)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for batch in to_device(batches, device, mode=mode):
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch.images_BHWC.long().sum() + batch.labels_B.sum())
    expected = [int(batch.images_BHWC.long().sum() + batch.labels_B.sum()) for batch in batches]
    assert torch.stack(sums).tolist() == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetch_does_not_make_the_host_wait() -> None:
    batches = [batch.pin_memory() for batch in make_batches(6, size=64)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = list(to_device(batches, "cuda", mode="prefetch"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(copies, batches)


def random_images(batch: int = 6, height: int = 20, width: int = 14) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def soft_targets(labels: tuple[torch.Tensor, torch.Tensor, Any], classes: int = 6) -> torch.Tensor:
    one_B, other_B, lam = labels
    lam_B1 = torch.as_tensor(lam, dtype=torch.float64).reshape(-1, 1)
    one_hot = torch.nn.functional.one_hot
    return lam_B1 * one_hot(one_B, classes) + (1 - lam_B1) * one_hot(other_B, classes)


LABELS = torch.tensor([3, 1, 4, 1, 5, 0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_same_formula_as_torchvision(kind: str, seed: int) -> None:
    """With lam and centre as torchvision drew them, images and targets are torchvision's."""
    images_BCHW = random_images()
    theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(num_classes=6, alpha=0.8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected_images, expected_targets = theirs(images_BCHW, LABELS)
        torch.manual_seed(seed)
        params = theirs.make_params([images_BCHW])
    if kind == "mixup":
        lam = params["lam"]
        mixed_BCHW = mixup(images_BCHW, lam)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn_lam = float(theirs._dist.sample(()))
            center_x, center_y = int(torch.randint(14, (1,))), int(torch.randint(20, (1,)))
        top, bottom, left, right = cutmix_box(drawn_lam, 20, 14, center_y, center_x)
        assert (left, top, right, bottom) == params["box"]
        lam = params["lam_adjusted"]
        mixed_BCHW = cutmix(images_BCHW, (top, bottom, left, right))
    torch.testing.assert_close(mixed_BCHW, expected_images, rtol=1e-12, atol=1e-12)
    targets = soft_targets((LABELS, LABELS.roll(1, 0), lam), 6)
    torch.testing.assert_close(targets, expected_targets.double(), rtol=1e-6, atol=1e-6)


EIGHT = torch.tensor([3, 1, 4, 1, 5, 0, 2, 2])
MIXER = Mixer(Augment(mixup_alpha=0.8, cutmix_alpha=1.0, mix_probability=0.9))


@pytest.mark.parametrize("seed", range(20))
def test_targets_have_the_shares_of_the_images(seed: int) -> None:
    """Images that show nothing but their own label, mixed, show the share of each label."""
    images_BCHW = torch.nn.functional.one_hot(EIGHT, 6).double()[:, :, None, None].repeat(1, 1, 20, 14)
    mixed_BCHW, lam = MIXER(images_BCHW, seed)
    expected_BK = soft_targets((EIGHT, EIGHT.roll(1, 0), lam))
    torch.testing.assert_close(mixed_BCHW.mean((2, 3)), expected_BK, rtol=1e-5, atol=1e-6)


def test_only_the_seed_decides_how_is_mixed() -> None:
    mixer, images_BCHW = MIXER, random_images()
    before = images_BCHW.clone()
    first = [mixer(images_BCHW, seed) for seed in range(50)]
    torch.manual_seed(9)
    states = torch.get_rng_state().tolist(), random.getstate()
    for seed, (mixed_BCHW, lam) in enumerate(first):
        again_BCHW, again = mixer(images_BCHW, seed)
        assert torch.equal(again_BCHW, mixed_BCHW)
        assert again == lam
    assert (torch.get_rng_state().tolist(), random.getstate()) == states
    assert torch.equal(images_BCHW, before), "the input was changed"
    assert len({lam for _, lam in first}) > 30


def test_layout_is_kept() -> None:
    images_BCHW = random_images().float().contiguous(memory_format=torch.channels_last)
    for mixer in (Mixer(Augment(mixup_alpha=0.8)), Mixer(Augment(cutmix_alpha=0.8))):
        mixed_BCHW, _ = mixer(images_BCHW, 1)
        assert mixed_BCHW.dtype == torch.float32
        assert mixed_BCHW.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", [Mixer(Augment(mixup_alpha=0.8)), Mixer(Augment(cutmix_alpha=0.8))])
def test_cuda_mixes_as_the_cpu_and_keeps_the_layout(mixer: Mixer) -> None:
    images_BCHW = random_images().float().contiguous(memory_format=torch.channels_last)
    expected_BCHW, _ = mixer(images_BCHW, 1)
    mixed_BCHW, _ = mixer(images_BCHW.cuda(), 1)
    assert mixed_BCHW.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mixed_BCHW.cpu(), expected_BCHW)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_distribution_is_timm_s(mixup: float, cutmix: float) -> None:
    """Shares of the labels over many batches, by their mean and spread, from independent draws."""
    ours, theirs = [], []
    keys = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "mix_probability": 0.7, "mix_switch_probability": 0.4}
    mixer = Mixer(Augment(**keys))
    reference = Mixup(mixup, cutmix, prob=0.7, switch_prob=0.4, mode="batch", label_smoothing=0.0, num_classes=8)
    images_BCHW = torch.zeros(8, 1, 16, 16)
    own = torch.arange(8)
    state = np.random.get_state()
    np.random.seed(0)
    for seed in range(400):
        ours.append(np.full(8, mixer(images_BCHW, seed)[1]))
        _, target = reference(images_BCHW.clone(), own)
        theirs.append(target[own, own].numpy())
    np.random.set_state(state)
    mine, expected = np.stack(ours), np.stack(theirs)
    independent = len(mine)
    assert abs(mine.mean() - expected.mean()) < 5 * math.sqrt(2 * expected.var() / independent)
    assert mine.std() == pytest.approx(expected.std(), rel=0.1)
    assert (mine == 1).mean() == pytest.approx((expected == 1).mean(), abs=0.05)
