"""The part of an image that a transform asks of a decoder, and boxes."""

from __future__ import annotations

from typing import Literal, NamedTuple

Interpolation = Literal["bilinear", "bicubic"]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""
NO_BOX: Box = (0, 0, 0, 0)


class Crop(NamedTuple):
    """A part of an image, resized: crop to `box`, resize to `resized`, crop to `view`, mirror."""

    box: Box
    resized: tuple[int, int]
    """(height, width) that the box is resized to, with a filter that widens when shrinking ("antialias")."""
    view: Box
    """The part of the resized box that is kept."""
    interpolation: Interpolation
    mirror: bool = False
    """Whether to flip left to right at the end."""
