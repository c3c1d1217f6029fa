"""A small real dataset that comes with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from pycls_fast.errors import UserError

COUNT = 1797
"""Images in `sklearn.datasets.load_digits`, the test set of Alpaydin and Kaynak's Optical Recognition of
Handwritten Digits (UCI Machine Learning Repository, 1998)."""


def write_digits(folder: str | Path) -> None:
    """Write the digits as grayscale PNGs `folder/DIGIT/NNNN.png`, unless they are there already.

    The values 0..16 become 0..255. The files appear all at once (written beside `folder`, then renamed), so that
    several processes may call this at the same time and none ever sees an incomplete set.

    Raises:
        UserError: when `folder` holds something else or cannot be written, or scikit-learn is missing.
    """
    folder = Path(folder)
    if _is_complete(folder):
        return
    try:
        _write_all_at_once(folder)
    except OSError as error:
        raise UserError(f"{folder}: the digits cannot be written there ({error.strerror}); choose another") from error


def _write_all_at_once(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        _write_images(draft)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was first, or something is in the way: a rename never replaces a filled folder.
            if not _is_complete(folder):
                raise UserError(
                    f"{folder} exists but does not hold the {COUNT:,} digits; choose another folder, or train on the "
                    "images there with an experiment for them (such as --config-name finetune)"
                ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    return sum(1 for _ in folder.glob("[0-9]/[0-9][0-9][0-9][0-9].png")) == COUNT


def _write_images(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    digits = load_digits()
    images_BHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for digit in range(10):
        (folder / str(digit)).mkdir()
    for number, (image_HW, digit) in enumerate(zip(images_BHW, digits.target, strict=True)):
        Image.fromarray(image_HW).save(folder / str(digit) / f"{number:04d}.png")
