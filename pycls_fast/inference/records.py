"""What a classifier says of an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guess:
    """One class and its probability.

    Attributes:
        label: the output's index.
        class_name: its name.
        probability: softmax of the scores; of a network trained with binary cross-entropy the class's own sigmoid, so
            that those of an image need not add up to 1.
    """

    label: int
    class_name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What was found in one image.

    Attributes:
        image: its path, or "image 3" for one that was given as pixels.
        position: in what was given.
        top: the likeliest classes, the first of them first.
    """

    image: str
    position: int
    top: tuple[Guess, ...]

    @property
    def label(self) -> int:
        """Index of the likeliest class."""
        return self.top[0].label

    @property
    def class_name(self) -> str:
        """Name of the likeliest class."""
        return self.top[0].class_name

    @property
    def probability(self) -> float:
        """Of the likeliest class."""
        return self.top[0].probability
