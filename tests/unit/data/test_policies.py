"""The policies against the libraries of their recipes, on the same draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from pycls_fast.data.choices import Augment
from pycls_fast.data.decoders import PillowPicture
from pycls_fast.data.policies import Step, TimmRandAugment
from pycls_fast.data.transforms import TrainTransform
from pycls_fast.seeds import seeded_torch
from pycls_fast.values import Size
from tests.factories import config_of
from tests.unit.data.conftest import PHOTO

MEAN = (0.485, 0.456, 0.406)


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.open(PHOTO).convert("RGB").resize((96, 64))


def recipe(name: str, *overrides: str) -> TrainTransform:
    """The transform of `configs/augment/NAME.yaml`, by way of the configuration."""
    config = config_of("data=synthetic", "data.image_size=64", f"augment={name}", *overrides, name="resnet50")
    return TrainTransform(config.augment, image_size=64, mean=config.data.mean)


def seeded(step: Step, image: Image.Image, seed: int) -> np.ndarray:
    with seeded_torch(seed):
        return np.asarray(step(image))


def timm_step(name: str, interpolation: str = "bicubic", **options: Any) -> Any:
    """What timm's own factory puts behind crop and flip."""
    _, steps, _ = timm.data.create_transform(
        64, is_training=True, auto_augment=name, interpolation=interpolation, mean=MEAN, separate=True,
        **{"color_jitter": None, **options},
    )  # fmt: skip
    return steps


def timm_draws(step: Any, image: Image.Image, seed: int) -> np.ndarray | None:
    """timm's result from the same seeds as ours; None where it fails on this Pillow."""
    with seeded_torch(seed):
        inner = int(torch.randint(2**31, ()))
        random.seed(inner)
        np.random.seed(inner)
        try:
            return np.asarray(step(image))
        except ValueError as error:
            if "bits" not in str(error):
                raise
            return None


@pytest.fixture(autouse=True)
def global_generators() -> Any:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("deit", "rand-m9-mstd0.5-inc1"), ("rsb_a2", "rand-m7-mstd0.5-inc1"), ("timm_ra", "rand-m9-mstd0.5")],
)
def test_timm_s_rand_augment(name: str, theirs: str, photo: Image.Image) -> None:
    """Same draws, same pixels, on every image that timm survives; ours survives all."""
    (ours,) = recipe(name)._steps
    reference = timm_step(theirs)
    changed = 0
    for seed in range(200):
        result, expected = seeded(ours, photo, seed), timm_draws(reference, photo, seed)
        if expected is not None:
            np.testing.assert_array_equal(result, expected, err_msg=str(seed))
            changed += bool((result != np.asarray(photo)).any())
    assert changed > 100


def test_posterizing_to_nothing_is_black(photo: Image.Image) -> None:
    """timm asks Pillow for 0 bits at full strength, which Pillow 13 refuses; before, the result was black."""
    policy = TimmRandAugment(num_ops=1, magnitude=10, increasing=True, probability=1.0)
    step = policy.build(interpolation="bilinear", image_size=Size(64, 64), mean=MEAN)
    results = [seeded(step, photo, seed) for seed in range(150)]
    assert any((result == 0).all() for result in results)


def test_three_augment(photo: Image.Image) -> None:
    """timm's `3a` with the color jitter that DeiT III adds; each of the three comes a third of the time."""
    three, jitter = recipe("deit3")._steps
    reference = timm_step("3a", color_jitter=0.3)
    assert [type(step).__name__ for step in reference.transforms] == ["AutoAugment", "ColorJitter"]
    assert repr(jitter).replace("v2.", "") == repr(v2.ColorJitter(0.3, 0.3, 0.3, 0.0))
    gray = 0
    for seed in range(300):
        result = seeded(three, photo, seed)
        np.testing.assert_array_equal(result, timm_draws(reference.transforms[0], photo, seed))
        gray += bool((result == result[:, :, :1]).all())
    assert gray / 300 == pytest.approx(1 / 3, abs=5 * (2 / 9 / 300) ** 0.5)


def test_auto_augment_of_pycls(photo: Image.Image) -> None:
    """timm's `v0` with gray corners, but for colors without bits, which PyCls does not have (1,500 images, by hand)."""
    config = config_of("data=synthetic", name="vit_p_1gf")
    (ours,) = TrainTransform(config.augment, image_size=64, mean=MEAN)._steps
    gray = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BILINEAR}
    reference = timm.data.auto_augment.auto_augment_transform("v0", gray)
    changed = kept = 0
    for seed in range(300):
        result, expected = seeded(ours, photo, seed), timm_draws(reference, photo, seed)
        if expected is None or not expected.any():
            assert result.any()
            kept += 1
        else:
            np.testing.assert_array_equal(result, expected, err_msg=str(seed))
            changed += bool((result != np.asarray(photo)).any())
    assert kept > 0
    assert changed > 100


@pytest.mark.parametrize(
    ("crop", "name"),
    [
        *(("random_resized", name) for name in ("deit", "deit3", "rsb_a2", "timm_ra", "trivial", "auto_augment")),
        *(("pad", "deit"), ("none", "deit")),
    ],
)
def test_only_the_seed_decides(crop: str, name: str, photo: Image.Image) -> None:
    transform, image = recipe(name, f"augment.crop={crop}"), photo.tobytes()
    first = [transform(PillowPicture(photo), seed) for seed in range(12)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    for seed in reversed(range(12)):
        again = transform(PillowPicture(photo), seed)
        np.testing.assert_array_equal(again.image_HWC, first[seed].image_HWC)
        assert again.erase == first[seed].erase
    after = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert after == before, "a global generator was used"
    assert len({one.image_HWC.tobytes() for one in first}) >= (12 if crop == "random_resized" else 8)
    assert photo.tobytes() == image, "the input was changed"


@pytest.mark.parametrize("size", [(96, 64), (120, 90), (50, 130), (64, 64)])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_crops_of_a_padded_image(photo: Image.Image, size: tuple[int, int], mode: Any) -> None:
    """He et al.'s for CIFAR-10, black around; DeiT III's (augment.py, --src) with mirrored edges."""
    augment = Augment(crop="pad", pad=4, pad_mode=mode, interpolation="bicubic", hflip=0.5)
    transform = TrainTransform(augment, image_size=64)
    crop = v2.RandomCrop(64, padding=4, padding_mode=mode)
    theirs = v2.Compose([v2.Resize(64, InterpolationMode.BICUBIC), crop, v2.RandomHorizontalFlip(0.5)])
    whole = photo.resize(size)
    for seed in range(20):
        expected = seeded(theirs, whole, seed)
        np.testing.assert_array_equal(transform(PillowPicture(whole), seed).image_HWC, expected)
