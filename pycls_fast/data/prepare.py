"""The last preparation of a batch: normalising, erasing and mixing, by the loader's workers or on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from pycls_fast.counter import counter_seed
from pycls_fast.data.boxes import box_mask
from pycls_fast.data.loading import Batch
from pycls_fast.data.mix import Mixed, Mixer
from pycls_fast.data.mix_elements import ElementMixer, MixedElements

# The stream of the noise among those that start from a microbatch's seed.
_NOISE = 1

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels on the scale 0..1, used since Torch7's ResNets
(fb.resnet.torch)."""


class Prepare(nn.Module):
    """uint8 BHWC -> normalised floating-point BCHW, (x / 255 - mean) / std, with random erasing.

    Images that are floating-point have been normalised already, and boxes that the batch no longer has were erased
    (`PrepareOnHost`): what is left to do is a property of the batch. By default the result is a permuted view of
    channels-last memory, so it is `channels_last` without a copy; a network follows the layout of its input. Nothing
    here waits for the device.
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
                per value, drawn on the batch's device.
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

    def forward(self, batch: Batch, seed: int | None = None) -> torch.Tensor:
        """`images_BCHW` of a batch on this module's device.

        Args:
            batch: in any state of preparation but mixed with boxes to erase.
            seed: of the microbatch; the noise is then the same on every device of one kind. None draws it from the
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
            # The memory may still be the batch's own where nothing had to be converted.
            return (images_BCHW if is_raw else images_BCHW.clone()).masked_fill_(mask_B1HW, 0)
        noise_BCHW = self._noise(images_BCHW, seed)
        noisy_BCHW = torch.where(mask_B1HW, noise_BCHW, images_BCHW)
        return noisy_BCHW.contiguous(memory_format=self._memory_format)

    def _noise(self, images_BCHW: torch.Tensor, seed: int | None) -> torch.Tensor:
        batch, channels, height, width = images_BCHW.shape
        generator = None
        if seed is not None:
            # One of its own: drop-path's draws do not depend on where the noise was drawn.
            generator = torch.Generator(images_BCHW.device).manual_seed(counter_seed(seed, _NOISE))
        # Drawn in one order whatever the memory format, and in one format whatever the result's.
        noise_BHWC = torch.randn(
            (batch, height, width, channels),
            dtype=self._compute_dtype,
            device=images_BCHW.device,
            generator=generator,
        )
        return noise_BHWC.permute(0, 3, 1, 2).to(images_BCHW.dtype)


@dataclass(frozen=True)
class PrepareOnHost:
    """The stages that are done before a batch goes to the device, in the loader's workers, in float32.

    Normalising comes first, then erasing, then mixing: what is done here is a beginning of that list, the device does
    the rest. Draws are those of the device's stages, from the same seeds.

    Attributes:
        prepare: for the CPU, of float32, channels-last.
        erase: erase here.
        mixer: mix here; None for not. Asks for `erase` where there is something to erase.
    """

    prepare: Prepare
    erase: bool = False
    mixer: Mixer | ElementMixer | None = None

    def __call__(self, batch: Batch, seed: int | None) -> Batch:
        """The batch with float32 images; evaluation, which has no seed, is never mixed."""
        images_BCHW = self.prepare(batch if self.erase else replace(batch, erase_B4=None), seed)
        mixed: Mixed | MixedElements | None = None
        if self.mixer is not None and seed is not None:
            images_BCHW, mixed = self.mixer(images_BCHW, seed)
        return replace(
            batch,
            images_BHWC=images_BCHW.permute(0, 2, 3, 1).contiguous(),
            erase_B4=None if self.erase else batch.erase_B4,
            mixed=mixed,
        )
