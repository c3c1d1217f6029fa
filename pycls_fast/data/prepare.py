"""The last preparation of a batch, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from pycls_fast.data.loading import Batch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels on the scale 0..1, used since Torch7's ResNets
(fb.resnet.torch)."""


class Prepare(nn.Module):
    """uint8 BHWC -> normalised floating-point BCHW, (x / 255 - mean) / std, with random erasing.

    By default the result is a permuted view of channels-last memory, so it is `channels_last` without a copy; a network
    follows the layout of its input. Nothing here waits for the device.
    """

    mean_C11: torch.Tensor
    std_C11: torch.Tensor

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        dtype: torch.dtype = torch.float32,
        erase_value: Literal["mean", "noise"] = "mean",
        memory_format: Literal["contiguous", "channels_last"] = "channels_last",
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            mean, std: per channel, on the scale 0..1.
            dtype: of the result. Computed in at least float32 and rounded once.
            erase_value: what fills erased boxes: the mean colour (0 after normalising) or noise from N(0, 1)
                per value, drawn from the device's default generator.
            memory_format: of the result; "contiguous" transposes while converting.
            device: of the batches to come.
        """
        super().__init__()
        if erase_value not in ("mean", "noise"):
            raise ValueError(f"unknown erase_value {erase_value!r}")
        self._dtype = dtype
        self._compute_dtype = torch.promote_types(dtype, torch.float32)
        self._erase_value = erase_value
        formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
        self._memory_format = formats[memory_format]
        for name, values in (("mean_C11", mean), ("std_C11", std)):
            tensor = torch.tensor(values, dtype=self._compute_dtype, device=device)
            self.register_buffer(name, tensor.reshape(-1, 1, 1), persistent=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        """`images_BCHW` of a batch on this module's device."""
        # (B, H, W, C) -> (B, C, H, W): a view
        images_BCHW = batch.images_BHWC.permute(0, 3, 1, 2)
        images_BCHW = images_BCHW.to(self._compute_dtype, memory_format=self._memory_format)
        images_BCHW = images_BCHW.div_(255).sub_(self.mean_C11).div_(self.std_C11).to(self._dtype)
        if batch.erase_B4 is None:
            return images_BCHW
        mask_B1HW = box_mask(batch.erase_B4, *images_BCHW.shape[2:]).unsqueeze(1)
        if self._erase_value == "mean":
            return images_BCHW.masked_fill_(mask_B1HW, 0)
        # Drawn in one order whatever the memory format, which must not change the noise.
        noise_BHWC = torch.randn_like(images_BCHW.permute(0, 2, 3, 1), memory_format=torch.contiguous_format)
        noisy_BCHW = torch.where(mask_B1HW, noise_BHWC.permute(0, 3, 1, 2), images_BCHW)
        return noisy_BCHW.contiguous(memory_format=self._memory_format)


def box_mask(box_B4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`mask_BHW`, true within each image's box (top, left, height, width)."""
    top_B1, left_B1, height_B1, width_B1 = box_B4.split(1, dim=1)
    y_H = torch.arange(height, device=box_B4.device)
    x_W = torch.arange(width, device=box_B4.device)
    rows_BH = (y_H >= top_B1) & (y_H < top_B1 + height_B1)
    columns_BW = (x_W >= left_B1) & (x_W < left_B1 + width_B1)
    return rows_BH[:, :, None] & columns_BW[:, None, :]
