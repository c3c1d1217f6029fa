"""A classifier's predictions for an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guess:
    """One class and its probability.

    Attributes:
        label: the output's index.
        class_name: its name.
        probability: softmax of the scores; for a network trained with binary cross-entropy the class's sigmoid, so
            that an image's probabilities need not sum to 1.
    """

    label: int
    class_name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        image: its path, or "image 3" if it was given as pixels.
        position: index in the input.
        top: the likeliest classes, best first.
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
        """Probability of the likeliest class."""
        return self.top[0].probability
