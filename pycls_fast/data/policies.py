"""Augmentation policies of published recipes, each from the library that its recipe used.

A step takes an RGB image and returns one; all its draws come from torch's default generator, which the transform seeds
for each sample. timm's policies draw from the generators of `random` and NumPy; those are seeded from torch's and
restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from pycls_fast.data.decoders import PILLOW_FILTERS, Interpolation

if TYPE_CHECKING:
    from timm.data.auto_augment import AugmentOp

Step = Callable[[Image.Image], Image.Image]


def color_jitter(brightness: float, contrast: float, saturation: float, hue: float) -> Step:
    """Factors from 1 +- value, hue from +- value turns, in random order (torchvision)."""
    return v2.ColorJitter(brightness, contrast, saturation, hue)


def rand_augment(num_ops: int, magnitude: int, *, interpolation: Interpolation) -> Step:
    """RandAugment (Cubuk et al. 2020) of torchvision: `num_ops` of 14 operations, magnitude 0..30, black corners."""
    return v2.RandAugment(num_ops, magnitude, interpolation=InterpolationMode(interpolation))


def auto_augment(policy: Literal["imagenet", "cifar10", "svhn"], *, interpolation: Interpolation) -> Step:
    """AutoAugment (Cubuk et al. 2019) of torchvision, with the policy found on that dataset."""
    return v2.AutoAugment(AutoAugmentPolicy(policy), interpolation=InterpolationMode(interpolation))


def trivial_augment(*, interpolation: Interpolation) -> Step:
    """TrivialAugment Wide (Müller and Hutter 2021) of torchvision: one operation of random strength."""
    return v2.TrivialAugmentWide(interpolation=InterpolationMode(interpolation))


def timm_rand_augment(
    num_ops: int,
    magnitude: int,
    *,
    magnitude_std: float,
    increasing: bool,
    probability: float,
    interpolation: Interpolation,
    image_size: int,
    mean: Sequence[float],
) -> Step:
    """RandAugment as in timm and DeiT: 15 operations, magnitude 0..10 with normally distributed noise.

    Args:
        increasing: every operation gets stronger with the magnitude; otherwise three of them get weaker.
        probability: probability of each operation.
        image_size: shifts go up to 0.45 of it.
        mean: the colour of newly exposed corners, on the scale 0..1.
    """
    # Imports all of timm's models, which takes more than a second: only where one of its policies is used.
    from timm.data.auto_augment import rand_augment_transform

    name = f"rand-m{magnitude}-n{num_ops}-mstd{magnitude_std:g}-inc{int(increasing)}-p{probability:g}"
    hparams = _timm_parameters(image_size, mean, interpolation)
    policy = rand_augment_transform(name, hparams)
    return _TimmPolicy(policy, policy.ops)


def three_augment(*, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
    """3-Augment (Touvron et al., DeiT III, 2022) as in timm: one of grayscale, solarize, blur.

    The recipe adds color jitter of 0.3.
    """
    from timm.data.auto_augment import auto_augment_transform

    policy = auto_augment_transform("3a", _timm_parameters(image_size, mean, interpolation))
    return _TimmPolicy(policy, [op for sub_policy in policy.policy for op in sub_policy])


def _timm_parameters(image_size: int, mean: Sequence[float], interpolation: Interpolation) -> dict[str, object]:
    return {
        "translate_const": int(image_size * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
        "interpolation": PILLOW_FILTERS[interpolation],
    }


class _TimmPolicy:
    def __init__(self, policy: Step, ops: Sequence[AugmentOp]) -> None:
        from timm.data.auto_augment import posterize

        for op in ops:
            if op.aug_fn is posterize:
                op.aug_fn = _posterize
        self._policy = policy

    def __call__(self, image: Image.Image) -> Image.Image:
        with _seeded_globals(int(torch.randint(2**31, ()))):
            return self._policy(image)


def _posterize(image: Image.Image, bits_to_keep: int, **ignored: object) -> Image.Image:
    """timm's operation; at full strength it asks Pillow for 0 bits, which is black, and since Pillow 13 an error."""
    from timm.data.auto_augment import posterize

    if bits_to_keep == 0:
        return Image.new(image.mode, image.size)
    return posterize(image, bits_to_keep)


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """Seed `random` and NumPy's global generator within the block; restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
