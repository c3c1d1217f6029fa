"""The augmentation policies that `augment.policy` names, each from the library that its published recipe used.

A policy builds a step, which takes an RGB image and returns one; all its draws come from torch's default generator,
which the transform seeds for each sample. torchvision and timm are imported where a step is built; timm's policies draw
from the generators of `random` and NumPy, which are seeded from torch's and restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pycls_fast.choice import Choice
from pycls_fast.values import NonNegativeFloat, PositiveInt, Probability, Size

if TYPE_CHECKING:
    from PIL import Image

    from pycls_fast.data.crop import Interpolation

Step = Callable[["Image.Image"], "Image.Image"]


class Policy(Choice, key="augment.policy"):
    """Random operations on each training image, between its flips and the color jitter."""

    name: str = ""
    """The policy."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        """From a PIL image to one of the same size.

        Args:
            interpolation: the filter of rotations.
            mean: the color of newly exposed corners, on the scale 0..1.
        """
        raise NotImplementedError


class RandAugment(Policy, name="rand_augment"):
    """RandAugment (Cubuk et al., 2020) of torchvision: 14 operations, black corners."""

    num_ops: PositiveInt = 2
    """Operations per image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """The strength of the operations."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        from torchvision.transforms import InterpolationMode, v2

        return v2.RandAugment(self.num_ops, self.magnitude, interpolation=InterpolationMode(interpolation))


class TimmRandAugment(Policy, name="timm_rand_augment"):
    """RandAugment as in timm and DeiT: 15 operations, magnitude with normally distributed noise."""

    num_ops: PositiveInt = 2
    """Operations per image."""
    magnitude: Annotated[int, Field(ge=0, le=10)] = 9
    """The strength of the operations."""
    magnitude_std: NonNegativeFloat = 0.0
    """The standard deviation of a normal noise on the magnitude."""
    increasing: bool = False
    """Every operation gets stronger with the magnitude; otherwise three of them get weaker."""
    probability: Probability = 0.5
    """The probability of each operation."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        # Imports all of timm's models, which takes more than a second: only where one of its policies is used.
        from timm.data.auto_augment import rand_augment_transform

        noise, increasing = f"{self.magnitude_std:g}", int(self.increasing)
        name = f"rand-m{self.magnitude}-n{self.num_ops}-mstd{noise}-inc{increasing}-p{self.probability:g}"
        policy = rand_augment_transform(name, _timm_parameters(image_size, mean, interpolation))
        return _TimmPolicy(policy, policy.ops)


class AutoAugment(Policy, name="auto_augment"):
    """AutoAugment (Cubuk et al., 2019) of torchvision."""

    dataset: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """The images on which the policy was found."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

        return v2.AutoAugment(AutoAugmentPolicy(self.dataset), interpolation=InterpolationMode(interpolation))


class AutoAugmentV0(Policy, name="auto_augment_v0"):
    """AutoAugment of EfficientNet's code, as in PyCls: other operations than in the paper, gray corners."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        parameters = _timm_parameters(image_size, (0.5, 0.5, 0.5), interpolation)
        # PyCls' POSTERIZE_MIN; the others make some images black.
        return _timm_auto_augment("v0", parameters, least_bits=1)


class TrivialAugment(Policy, name="trivial_augment_wide"):
    """TrivialAugment Wide (Müller and Hutter, 2021) of torchvision: one operation of random strength."""

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        from torchvision.transforms import InterpolationMode, v2

        return v2.TrivialAugmentWide(interpolation=InterpolationMode(interpolation))


class ThreeAugment(Policy, name="three_augment"):
    """3-Augment (Touvron et al., DeiT III, 2022) as in timm: one of grayscale, solarize, blur.

    The recipe adds color jitter of 0.3.
    """

    def build(self, *, interpolation: Interpolation, image_size: Size, mean: Sequence[float]) -> Step:
        return _timm_auto_augment("3a", _timm_parameters(image_size, mean, interpolation))


def _timm_auto_augment(name: str, parameters: dict[str, object], *, least_bits: int = 0) -> Step:
    from timm.data.auto_augment import auto_augment_transform

    policy = auto_augment_transform(name, parameters)
    return _TimmPolicy(policy, [op for sub_policy in policy.policy for op in sub_policy], least_bits=least_bits)


def _timm_parameters(image_size: Size, mean: Sequence[float], interpolation: Interpolation) -> dict[str, object]:
    from pycls_fast.data.decoders import PILLOW_FILTERS

    return {
        # Shifts go up to this.
        "translate_const": int(min(image_size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
        "interpolation": PILLOW_FILTERS[interpolation],
    }


class _TimmPolicy:
    def __init__(self, policy: Step, ops: Sequence[Any], *, least_bits: int = 0) -> None:
        from timm.data.auto_augment import posterize

        for op in ops:
            if op.aug_fn is posterize:
                op.aug_fn = partial(_posterize, least_bits=least_bits)
        self._policy = policy

    def __call__(self, image: Image.Image) -> Image.Image:
        import numpy as np
        import torch

        seed, states = int(torch.randint(2**31, ())), (random.getstate(), np.random.get_state())
        random.seed(seed)
        np.random.seed(seed)
        try:
            return self._policy(image)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _posterize(image: Image.Image, bits_to_keep: int, *, least_bits: int, **ignored: object) -> Image.Image:
    """timm's operation; at full strength it asks Pillow for 0 bits, which is black, and since Pillow 13 an error."""
    from PIL import Image
    from timm.data.auto_augment import posterize

    bits_to_keep = max(bits_to_keep, least_bits)
    if bits_to_keep == 0:
        return Image.new(image.mode, image.size)
    return posterize(image, bits_to_keep)
