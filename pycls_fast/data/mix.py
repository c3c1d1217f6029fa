"""Mixing pairs of images within a batch: mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pycls_fast.data.draws import frozen_generator


class Mixed(NamedTuple):
    """How a batch was mixed: image i with image i - 1 (the first with the last), which has the share 1 - lam."""

    lam: float
    """Share of the image itself, in 0..1. 1 for a batch that was not mixed."""

    def labels(self, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """`(labels_a_B, labels_b_B, lam)`: the loss is lam * loss(a) + (1 - lam) * loss(b)."""
        return labels_B, labels_B.roll(1, 0), self.lam


class Mixer:
    """Mixes whole batches with one lam, by mixup or CutMix.

    All draws are made on the host from the step's seed, so nothing waits for the device.
    """

    def __init__(
        self,
        *,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        switch_probability: float = 0.5,
        probability: float = 1.0,
    ) -> None:
        """
        Args:
            mixup_alpha, cutmix_alpha: lam is drawn from Beta(alpha, alpha); 0 switches that method off.
            switch_probability: probability of CutMix rather than mixup when both are on.
            probability: probability of mixing a batch at all.
        """
        if not max(mixup_alpha, cutmix_alpha) > 0 or min(mixup_alpha, cutmix_alpha) < 0:
            raise ValueError(f"one alpha must be positive, none negative: {mixup_alpha}, {cutmix_alpha}")
        if not (0 <= switch_probability <= 1 and 0 <= probability <= 1):
            raise ValueError(f"not a probability: {switch_probability}, {probability}")
        self._mixup_alpha = mixup_alpha
        self._cutmix_alpha = cutmix_alpha
        self._probability = probability
        if mixup_alpha > 0 and cutmix_alpha > 0:
            self._cutmix_probability = switch_probability
        else:
            self._cutmix_probability = 1.0 if cutmix_alpha > 0 else 0.0

    def __call__(self, images_BCHW: torch.Tensor, seed: int) -> tuple[torch.Tensor, Mixed]:
        """The mixed images (new memory, or the same tensor if nothing was mixed), and how."""
        generator = frozen_generator(seed)
        if generator.random_sample() >= self._probability:
            return images_BCHW, Mixed(lam=1.0)
        if generator.random_sample() >= self._cutmix_probability:
            lam = float(generator.beta(self._mixup_alpha, self._mixup_alpha))
            return mixup(images_BCHW, lam), Mixed(lam=lam)
        lam = float(generator.beta(self._cutmix_alpha, self._cutmix_alpha))
        height, width = images_BCHW.shape[2:]
        center_y, center_x = int(generator.randint(height)), int(generator.randint(width))
        box = cutmix_box(lam, height, width, center_y, center_x)
        top, bottom, left, right = box
        # The box is clipped at the borders and its sides are whole pixels, so its true share is computed.
        lam = 1 - (bottom - top) * (right - left) / (height * width)
        return cutmix(images_BCHW, box), Mixed(lam=lam)


def mixup(images_BCHW: torch.Tensor, lam: float) -> torch.Tensor:
    """lam * image i + (1 - lam) * image i - 1."""
    # On CUDA `roll` would return contiguous memory (C, H, W).
    other_BCHW = torch.cat([images_BCHW[-1:], images_BCHW[:-1]])
    return other_BCHW.mul_(1 - lam).add_(images_BCHW, alpha=lam)


def cutmix(images_BCHW: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """Image i with the box (top, bottom, left, right) taken from image i - 1."""
    top, bottom, left, right = box
    mixed_BCHW = images_BCHW.clone()
    mixed_BCHW[:, :, top:bottom, left:right] = images_BCHW[:, :, top:bottom, left:right].roll(1, 0)
    return mixed_BCHW


def cutmix_box(lam: float, height: int, width: int, center_y: int, center_x: int) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of the box with the image's proportions, 1 - lam of its area and the given
    centre, cut off at the image's borders (Yun et al. 2019, equation 2, in whole pixels as in
    torchvision)."""
    half_side = 0.5 * math.sqrt(1 - lam)
    half_height, half_width = int(half_side * height), int(half_side * width)
    return (
        max(center_y - half_height, 0),
        min(center_y + half_height, height),
        max(center_x - half_width, 0),
        min(center_x + half_width, width),
    )
