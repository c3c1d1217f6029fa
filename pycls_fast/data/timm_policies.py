"""timm's augmentation policies, with torch's default generator.

They draw from the generators of `random` and NumPy, which are seeded from torch's and restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from pycls_fast.data.decoders import PILLOW_FILTERS, Interpolation

if TYPE_CHECKING:
    from timm.data.auto_augment import AugmentOp

_Step = Callable[[Image.Image], Image.Image]


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
) -> _Step:
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


def three_augment(*, interpolation: Interpolation, image_size: int, mean: Sequence[float]) -> _Step:
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
    def __init__(self, policy: _Step, ops: Sequence[AugmentOp]) -> None:
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
