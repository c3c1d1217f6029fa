"""Mixing pairs of images within a batch: mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from pycls_fast.seeds import frozen_generator


class Mixed(NamedTuple):
    """How a batch was mixed: image i with image i - 1 (the first with the last), or image B - 1 - i if each has its own
    share; the other image has the share 1 - lam."""

    lam: float | torch.Tensor
    """Share of the image itself, in 0..1: 1 for a batch that was not mixed; float32 (B,) if each has its own."""

    def labels(self, labels_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]:
        """`(labels_a_B, labels_b_B, lam)`: the loss is lam * loss(a) + (1 - lam) * loss(b)."""
        other_B = labels_B.flip(0) if isinstance(self.lam, torch.Tensor) else labels_B.roll(1, 0)
        return labels_B, other_B, self.lam


@dataclass(frozen=True)
class Mixer:
    """Mixes whole batches with one lam, by mixup or CutMix.

    All draws are made on the host from the step's seed, so nothing waits for the device.

    Attributes:
        mixup_alpha, cutmix_alpha: lam is drawn from Beta(alpha, alpha); 0 switches that method off, of which one is on.
        switch_probability: probability of CutMix rather than mixup when both are on.
        probability: probability of mixing a batch (an image, a pair) at all.
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    switch_probability: float = 0.5
    probability: float = 1.0

    def __call__(self, images_BCHW: torch.Tensor, seed: int) -> tuple[torch.Tensor, Mixed]:
        """The mixed images (new memory, or the same tensor if nothing was mixed), and how."""
        lam, box = self._draw(frozen_generator(seed), *images_BCHW.shape[2:])
        if box is not None:
            return cutmix(images_BCHW, box), Mixed(lam)
        return images_BCHW if lam == 1 else mixup(images_BCHW, lam), Mixed(lam)

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


@dataclass(frozen=True)
class ElementMixer(Mixer):
    """Mixes each image with its counterpart from the batch's other end, by mixup or CutMix.

    Attributes:
        mode: "elem" draws method, lam and box for each image; "pair" the same for both images of a pair.
    """

    mode: Literal["pair", "elem"] = "elem"

    def __call__(self, images_BCHW: torch.Tensor, seed: int) -> tuple[torch.Tensor, Mixed]:
        """The mixed images (new memory), and how."""
        batch, _, height, width = images_BCHW.shape
        share_B, box_B4 = self._draw_all(batch, height, width, seed)
        # The share that mixup keeps of an image; CutMix copies a box of the counterpart and keeps the other pixels.
        kept_B = np.where(box_B4[:, 2:].any(axis=1), 1.0, share_B)
        kept_B111, boxes_B4 = (_send(x, images_BCHW.device) for x in (kept_B.reshape(-1, 1, 1, 1), box_B4))
        kept_B111 = kept_B111.to(images_BCHW.dtype)
        other_BCHW = images_BCHW.flip(0)
        mask_B1HW = box_mask(boxes_B4, height, width).unsqueeze(1)
        mixed_BCHW = torch.where(mask_B1HW, other_BCHW, images_BCHW * kept_B111 + other_BCHW * (1 - kept_B111))
        return mixed_BCHW, Mixed(_send(share_B.astype(np.float32), images_BCHW.device))

    def _draw_all(self, batch: int, height: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """`lam_B` and the boxes of CutMix (top, left, height, width), zeros for none."""
        generator = frozen_generator(seed)
        share_B = np.ones(batch)
        box_B4 = np.zeros((batch, 4), dtype=np.int64)
        for i in range(batch // 2 if self.mode == "pair" else batch):
            share_B[i], box = self._draw(generator, height, width)
            if box is not None:
                top, bottom, left, right = box
                box_B4[i] = top, left, bottom - top, right - left
        if self.mode == "pair":
            share_B[(batch + 1) // 2 :] = share_B[: batch // 2][::-1]
            box_B4[(batch + 1) // 2 :] = box_B4[: batch // 2][::-1]
        return share_B, box_B4


def _send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    # With pinned memory the host does not wait for the copy.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def box_mask(box_B4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`mask_BHW`, true within each image's box (top, left, height, width)."""
    top_B1, left_B1, height_B1, width_B1 = box_B4.split(1, dim=1)
    y_H = torch.arange(height, device=box_B4.device)
    x_W = torch.arange(width, device=box_B4.device)
    rows_BH = (y_H >= top_B1) & (y_H < top_B1 + height_B1)
    columns_BW = (x_W >= left_B1) & (x_W < left_B1 + width_B1)
    return rows_BH[:, :, None] & columns_BW[:, None, :]
