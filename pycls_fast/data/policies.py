"""The augmentation policies that `augment.policy` names, each from the library that its published recipe used.

A policy builds a step, which takes an RGB image and returns one; all its draws come from torch's default generator,
which the transform seeds for each sample. torchvision and timm are imported where a step is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Choice
from pycls_fast.values import NonNegativeFloat, PositiveInt, Probability

if TYPE_CHECKING:
    from PIL import Image

    from pycls_fast.data.decoders import Interpolation

Step = Callable[["Image.Image"], "Image.Image"]


class Policy(Choice, key="augment.policy"):
    """Random operations on each training image, between its flips and the color jitter."""

    name: str = ""
    """The policy."""

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
        """From a PIL image to one of the same size.

        Args:
            interpolation: the filter of rotations.
            image_size: the side of the images, in pixels.
            mean: the color of newly exposed corners, on the scale 0..1.
        """
        raise NotImplementedError


class RandAugment(Policy, name="rand_augment"):
    """RandAugment (Cubuk et al., 2020) of torchvision: 14 operations, black corners."""

    num_ops: PositiveInt = 2
    """Operations per image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """The strength of the operations."""

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
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

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
        from pycls_fast.data.timm_policies import timm_rand_augment

        return timm_rand_augment(**self.own(), interpolation=interpolation, image_size=image_size, mean=mean)


class AutoAugment(Policy, name="auto_augment"):
    """AutoAugment (Cubuk et al., 2019) of torchvision."""

    dataset: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """The images on which the policy was found."""

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
        from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

        return v2.AutoAugment(AutoAugmentPolicy(self.dataset), interpolation=InterpolationMode(interpolation))


class TrivialAugment(Policy, name="trivial_augment_wide"):
    """TrivialAugment Wide (Müller and Hutter, 2021) of torchvision: one operation of random strength."""

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
        from torchvision.transforms import InterpolationMode, v2

        return v2.TrivialAugmentWide(interpolation=InterpolationMode(interpolation))


class ThreeAugment(Policy, name="three_augment"):
    """3-Augment (Touvron et al., DeiT III, 2022) as in timm: one of grayscale, solarize, blur.

    The recipe adds color jitter of 0.3.
    """

    def build(self, *, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> Step:
        from pycls_fast.data.timm_policies import three_augment

        return three_augment(interpolation=interpolation, image_size=image_size, mean=mean)


def color_jitter(brightness: float, contrast: float, saturation: float, hue: float) -> Step:
    """Factors from 1 +- value, hue from +- value turns, in random order (torchvision)."""
    from torchvision.transforms import v2

    return v2.ColorJitter(brightness, contrast, saturation, hue)
