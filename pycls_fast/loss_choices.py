"""The losses that `loss.name` names; `losses.py` computes them, and imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Choice
from pycls_fast.errors import UserError
from pycls_fast.values import NonNegativeFloat, Rate

if TYPE_CHECKING:
    from pycls_fast.losses import BinaryCrossEntropy, Criterion, CrossEntropy, LossFunction


class Loss(Choice, key="loss", default="cross_entropy"):
    """The training loss. Evaluations report the same one without smoothing, threshold and weights."""

    name: str = ""
    """The loss."""
    label_smoothing: Rate = 0.0
    """The share of the target that is spread over all classes."""
    class_weights: Literal["none", "auto"] = "none"
    """auto: each image counts by the mean number of images per class divided by its own class's; where images have
    several labels, each present class by the images without it divided by those with it, 0.01 to 100."""

    def build(self, classes: int) -> LossFunction:
        """The mean loss of a batch; for `class_weights` it needs a method `each(logits_BK, labels_B) -> loss_B`."""
        raise NotImplementedError

    def criterion(self) -> Criterion:
        """How evaluations judge: by softmax cross-entropy, if this is not replaced."""
        from pycls_fast.losses import Criterion

        return Criterion()


class SoftmaxLoss(Loss, name="cross_entropy"):
    """Softmax cross-entropy."""

    def build(self, classes: int) -> CrossEntropy:
        from pycls_fast.losses import CrossEntropy

        return CrossEntropy(self.label_smoothing)


class SigmoidLoss(Loss, name="bce"):
    """Binary cross-entropy with a sigmoid for each class."""

    bce_reduction: Literal["mean", "sum"] = "mean"
    """Average the classes as timm does, or add them as big_vision does."""
    bce_threshold: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Classes with a larger share of a mixed image get the target 1, all others 0; null: the share is the target."""

    def build(self, classes: int) -> BinaryCrossEntropy:
        """The loss; a `UserError` if the threshold gives every class the same target."""
        from pycls_fast.losses import BinaryCrossEntropy

        # Targets after smoothing, of an absent and of the present class.
        absent = self.label_smoothing / classes
        present = 1.0 - self.label_smoothing + absent
        threshold = self.bce_threshold
        if threshold is not None and self.label_smoothing and not absent < threshold < present:
            raise UserError(
                f"loss.bce_threshold: {threshold:g} with loss.label_smoothing={self.label_smoothing:g} makes every "
                f"class a {int(threshold <= absent)}: with {classes} classes the smoothed targets are {absent:.3g} and "
                f"{present:.3g}; use loss.label_smoothing=0, or a threshold between the two"
            )
        return BinaryCrossEntropy(self.label_smoothing, self.bce_reduction, threshold)

    def criterion(self) -> Criterion:
        from pycls_fast.losses import BinaryCrossEntropy, Criterion

        return Criterion(BinaryCrossEntropy(reduction=self.bce_reduction).each, sigmoid=True)


class AsymmetricSigmoidLoss(Loss, name="asymmetric"):
    """Binary cross-entropy in which absent classes that are easily told count less, for images with several labels
    (Ridnik et al., 2021); the sum over the classes."""

    gamma_positive: NonNegativeFloat = 0.0
    """The exponent that lets present classes of a high probability count less."""
    gamma_negative: NonNegativeFloat = 4.0
    """The exponent that lets absent classes of a low probability count less."""
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Absent classes of a lower probability do not count."""

    def build(self, classes: int) -> BinaryCrossEntropy:
        from pycls_fast.losses import AsymmetricLoss

        return AsymmetricLoss(self.label_smoothing, **self.own())

    def criterion(self) -> Criterion:
        from pycls_fast.losses import AsymmetricLoss, Criterion

        return Criterion(AsymmetricLoss(**self.own()).each, sigmoid=True)
