"""Mixing images of a batch, each with the one before: mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pycls_fast.seeds import frozen_generator


@dataclass(frozen=True)
class Mixer:
    """Mixes image i with image i - 1 (the first with the last), all with one lam, by mixup or CutMix.

    All draws are made on the host from the step's seed, so nothing waits for the device.

    Attributes:
        mixup_alpha, cutmix_alpha: lam is drawn from Beta(alpha, alpha); 0 switches that method off, of which one is on.
        switch_probability: probability of CutMix rather than mixup when both are on.
        probability: probability of mixing a batch at all.
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    switch_probability: float = 0.5
    probability: float = 1.0

    def __call__(self, images_BCHW: torch.Tensor, seed: int) -> tuple[torch.Tensor, float]:
        """The mixed images (new memory, or the same tensor if nothing was mixed), and lam, the share of the image
        itself, in 0..1."""
        lam, box = self._draw(frozen_generator(seed), *images_BCHW.shape[2:])
        if box is not None:
            return cutmix(images_BCHW, box), lam
        return images_BCHW if lam == 1 else mixup(images_BCHW, lam), lam

    def _draw(
        self, generator: np.random.RandomState, height: int, width: int
    ) -> tuple[float, tuple[int, int, int, int] | None]:
        """Draw lam, and the box of CutMix; lam is 1 where nothing is mixed."""
        if generator.random_sample() >= self.probability:
            return 1.0, None
        one_way = 0.0 if self.cutmix_alpha == 0 else 1.0
        cutmix_probability = self.switch_probability if min(self.mixup_alpha, self.cutmix_alpha) > 0 else one_way
        if generator.random_sample() >= cutmix_probability:
            return float(generator.beta(self.mixup_alpha, self.mixup_alpha)), None
        lam = float(generator.beta(self.cutmix_alpha, self.cutmix_alpha))
        center_y, center_x = int(generator.randint(height)), int(generator.randint(width))
        top, bottom, left, right = box = cutmix_box(lam, height, width, center_y, center_x)
        # The box is clipped at the borders and its sides are whole pixels, so its true share is computed.
        return 1 - (bottom - top) * (right - left) / (height * width), box


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


def box_mask(box_B4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`mask_BHW`, true within each image's box (top, left, height, width)."""
    top_B1, left_B1, height_B1, width_B1 = box_B4.split(1, dim=1)
    y_H = torch.arange(height, device=box_B4.device)
    x_W = torch.arange(width, device=box_B4.device)
    rows_BH = (y_H >= top_B1) & (y_H < top_B1 + height_B1)
    columns_BW = (x_W >= left_B1) & (x_W < left_B1 + width_B1)
    return rows_BH[:, :, None] & columns_BW[:, None, :]
