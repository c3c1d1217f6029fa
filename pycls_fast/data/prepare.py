"""The last stages of a batch: normalising, erasing and mixing, by the loader's workers or on the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from pycls_fast.data.batch import Batch
from pycls_fast.data.choices import Augment
from pycls_fast.seeds import counter_seed, frozen_generator

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""By the values of `speed.memory_format`."""


@dataclass(frozen=True)
class Mixer:
    """Mixes image i with image i - 1 (the first with the last), all with one lam: mixup (Zhang et al. 2017) or CutMix
    (Yun et al. 2019).

    All draws are made on the host from the step's seed, so nothing waits for the device.
    """

    augment: Augment
    """One of its alphas is not 0."""

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
        mixup_alpha, cutmix_alpha = self.augment.mixup_alpha, self.augment.cutmix_alpha
        if generator.random_sample() >= self.augment.mix_probability:
            return 1.0, None
        one_way = 0.0 if cutmix_alpha == 0 else 1.0
        cutmix_probability = self.augment.mix_switch_probability if min(mixup_alpha, cutmix_alpha) > 0 else one_way
        if generator.random_sample() >= cutmix_probability:
            return float(generator.beta(mixup_alpha, mixup_alpha)), None
        lam = float(generator.beta(cutmix_alpha, cutmix_alpha))
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


# The noise's random stream among those derived from a microbatch's seed.
_NOISE = 1


class Prepare(nn.Module):
    """uint8 BHWC -> normalised floating-point BCHW, (x / 255 - mean) / std, with random erasing.

    The batch shows what is left to do: floating-point images are already normalised, and a batch that has been erased
    has no boxes (`PrepareOnHost`). By default the result is a permuted view of channels-last memory, which is
    `channels_last` without a copy; a network follows the layout of its input. Nothing here waits for the device.
    """

    mean_C11: torch.Tensor
    std_C11: torch.Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        dtype: torch.dtype = torch.float32,
        erase_value: Literal["mean", "noise"] = "mean",
        memory_format: Literal["contiguous", "channels_last"] = "channels_last",
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            mean, std: per channel, on the scale 0..1.
            dtype: dtype of the result, which is computed in at least float32 and rounded once.
            erase_value: what fills erased boxes: the mean colour (0 after normalising) or noise from N(0, 1)
                per value, drawn on the batch's device.
            memory_format: that of the result; "contiguous" transposes while converting.
        """
        super().__init__()
        self._dtype = dtype
        self._compute_dtype = torch.promote_types(dtype, torch.float32)
        self._erase_value = erase_value
        self._memory_format = MEMORY_FORMATS[memory_format]
        for name, values in (("mean_C11", mean), ("std_C11", std)):
            tensor = torch.tensor(values, dtype=self._compute_dtype, device=device)
            self.register_buffer(name, tensor.reshape(-1, 1, 1), persistent=False)

    def forward(self, batch: Batch, seed: int | None = None) -> torch.Tensor:
        """`images_BCHW` of a batch on this module's device.

        Args:
            batch: in any state of preparation, except mixed with boxes left to erase.
            seed: the microbatch's; the noise is then the same on every device of one kind. None draws it from the
                device's default generator.
        """
        is_raw = not batch.images_BHWC.is_floating_point()
        # (B, H, W, C) -> (B, C, H, W): a view
        images_BCHW = batch.images_BHWC.permute(0, 3, 1, 2)
        images_BCHW = images_BCHW.to(self._compute_dtype, memory_format=self._memory_format)
        if is_raw:
            images_BCHW = images_BCHW.div_(255).sub_(self.mean_C11).div_(self.std_C11)
        images_BCHW = images_BCHW.to(self._dtype)
        if batch.erase_B4 is None:
            return images_BCHW
        mask_B1HW = box_mask(batch.erase_B4, *images_BCHW.shape[2:]).unsqueeze(1)
        if self._erase_value == "mean":
            # If nothing had to be converted, the memory may still be the batch's own.
            return (images_BCHW if is_raw else images_BCHW.clone()).masked_fill_(mask_B1HW, 0)
        noise_BCHW = self._noise(images_BCHW, seed)
        noisy_BCHW = torch.where(mask_B1HW, noise_BCHW, images_BCHW)
        return noisy_BCHW.contiguous(memory_format=self._memory_format)

    def _noise(self, images_BCHW: torch.Tensor, seed: int | None) -> torch.Tensor:
        batch, channels, height, width = images_BCHW.shape
        generator = None
        if seed is not None:
            # A separate generator: drop-path's draws must not depend on where the noise is drawn.
            generator = torch.Generator(images_BCHW.device).manual_seed(counter_seed(seed, _NOISE))
        # The same draws for every memory format and result dtype.
        noise_BHWC = torch.randn(
            (batch, height, width, channels),
            dtype=self._compute_dtype,
            device=images_BCHW.device,
            generator=generator,
        )
        return noise_BHWC.permute(0, 3, 1, 2).to(images_BCHW.dtype)


@dataclass(frozen=True)
class PrepareOnHost:
    """Stages that the loader's workers run before a batch goes to the device, in float32.

    The order is normalising, erasing, mixing: the workers do the first one, two or three, the device the rest. Seeds
    and draws are the same as on the device.
    """

    prepare: Prepare
    """For the CPU, of float32, channels-last."""
    erase: bool = False
    mixer: Mixer | None = None
    """None leaves it to the device. Requires `erase` if there are boxes to erase."""

    def __call__(self, batch: Batch, seed: int | None) -> Batch:
        """The batch with float32 images; evaluation, which has no seed, is never mixed."""
        images_BCHW = self.prepare(batch if self.erase else replace(batch, erase_B4=None), seed)
        lam = None
        if self.mixer is not None and seed is not None:
            images_BCHW, lam = self.mixer(images_BCHW, seed)
        return replace(
            batch,
            images_BHWC=images_BCHW.permute(0, 2, 3, 1).contiguous(),
            erase_B4=None if self.erase else batch.erase_B4,
            lam=lam,
        )


IN_FLIGHT = 2
"""Batches that "prefetch" copies ahead."""


def to_device(batches: Iterable[Batch], device: torch.device | str, *, mode: str) -> Generator[Batch, None, None]:
    """Yield the batches on `device`, in order.

    Args:
        mode: "blocking" copies each batch synchronously when it is requested. "prefetch" (CUDA only) copies on a
            separate stream with two batches in flight, so that copies run beside the computation; give it pinned
            batches, else each copy still waits for the host.
    """
    device = torch.device(device)
    if mode == "blocking":
        return (batch.to(device) for batch in batches)
    return _prefetch(iter(batches), device)


def _prefetch(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    copy_stream = torch.cuda.Stream(device)
    in_flight: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def start_copy() -> None:
        batch = next(batches, None)
        if batch is None:
            return
        with torch.cuda.stream(copy_stream):
            # The pinned source may be freed at once: its allocator waits for the copy before using the memory
            # again.
            copied = batch.to(device, non_blocking=True)
            in_flight.append((copied, copy_stream.record_event()))

    for _ in range(IN_FLIGHT):
        start_copy()
    while in_flight:
        batch, copied = in_flight.popleft()
        compute_stream = torch.cuda.current_stream(device)
        # Wait for this batch's event, not the whole stream: the next copy may still be running.
        compute_stream.wait_event(copied)
        # Memory that the consumer frees must not be reused by a new copy while the computation still reads it.
        batch.record_stream(compute_stream)
        yield batch
        # After the consumer has queued its work, which the next copy then overlaps.
        del batch
        start_copy()
