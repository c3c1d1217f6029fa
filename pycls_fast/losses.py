"""Classification losses. Targets stay pairs of labels, `(labels_B, mixed_B, lam)`, until a loss needs more.

Except for binary cross-entropy with a threshold, all losses are affine in the target: the loss of a mixed target is
the mixture of the two labels' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What each image should be classified as.

    Attributes:
        labels_B: int64 class indices; if images have several, float32 (B, K), one value per class, for the losses that
            have a sigmoid for each.
        mixed_B: those of the images mixed in, or None.
        lam: share of `labels_B` in [0, 1]; `mixed_B` has the rest. A 0-d tensor is a share that stays on its device.
    """

    labels_B: Tensor
    mixed_B: Tensor | None = None
    lam: float | Tensor = 1.0


class LossFunction(Protocol):
    """Mean loss over a batch: `(logits_BK, targets) -> scalar`, in float32 or wider."""

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor: ...


@runtime_checkable
class PerImage(LossFunction, Protocol):
    """A loss that also has the loss of each image, (B,), for `ClassWeighted`."""

    def each(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Criterion:
    """How an evaluation judges logits_BK; the default is that of softmax cross-entropy."""

    each: Callable[[Tensor, Tensor], Tensor] | None = None
    """The loss of each image, (B,), whose mean is reported, from logits_BK and labels_B; None for softmax
    cross-entropy, which predictions have in any case, so that runs with different losses can be compared."""
    sigmoid: bool = False
    """Probabilities are sigmoids, as trained with binary cross-entropy, else a softmax."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy, nats, with label smoothing as in Szegedy et al. 2016, section 7."""

    label_smoothing: float = 0.0

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        logits_BK = _wide(logits_BK)
        loss = F.cross_entropy(logits_BK, targets.labels_B, label_smoothing=self.label_smoothing)
        if targets.mixed_B is None:
            return loss
        other = F.cross_entropy(logits_BK, targets.mixed_B, label_smoothing=self.label_smoothing)
        # Cross-entropy is linear in the target, so mixing losses is mixing targets, without a B x K target.
        return targets.lam * loss + (1.0 - targets.lam) * other

    def each(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(_wide(logits_BK), labels_B, label_smoothing=self.label_smoothing, reduction="none")


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """One sigmoid per class (Beyer et al. 2020; Wightman et al. 2021, section 2.1), nats.

    The target of a class is its share in the mix, smoothed to `(1 - s) t + s / K` as in timm. `reduction` is over
    classes: "mean" (timm) or "sum" (big_vision); images are always averaged. With a `threshold`, targets above it
    become 1 and all others 0, as in timm and DeiT III (which uses 0): both classes of a mixed image count fully.
    `positive_K` weights the present classes, as torch's `pos_weight`.
    """

    label_smoothing: float = 0.0
    reduction: str = "mean"
    threshold: float | None = None
    positive_K: Tensor | None = None

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        loss_BK = self._by_class(logits_BK, targets)
        return loss_BK.mean() if self.reduction == "mean" else loss_BK.sum(dim=1).mean()

    def each(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        loss_BK = self._by_class(logits_BK, Targets(labels_B))
        return loss_BK.mean(dim=1) if self.reduction == "mean" else loss_BK.sum(dim=1)

    def _by_class(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        logits_BK = _wide(logits_BK)
        target_BK = self.dense(targets, logits_BK)
        if self.threshold is not None:
            target_BK = target_BK.gt(self.threshold).to(target_BK.dtype)
        return F.binary_cross_entropy_with_logits(logits_BK, target_BK, reduction="none", pos_weight=self.positive_K)

    def dense(self, targets: Targets, like_BK: Tensor) -> Tensor:
        """Targets as one value per class, (B, K)."""
        target_BK = _one_hot(targets.labels_B, like_BK)
        if targets.mixed_B is not None:
            target_BK = targets.lam * target_BK + (1.0 - targets.lam) * _one_hot(targets.mixed_B, like_BK)
        return (1.0 - self.label_smoothing) * target_BK + self.label_smoothing / like_BK.shape[1]


@dataclass(frozen=True)
class AsymmetricLoss(BinaryCrossEntropy):
    """Binary cross-entropy in which absent classes that are easily told count less (Ridnik et al., Asymmetric Loss For
    Multi-Label Classification, 2021, equations 4 to 7), nats.

    Attributes:
        gamma_positive, gamma_negative: the exponents of the focus, for the present and the absent classes.
        margin: absent classes of a lower probability count as 0.
    """

    reduction: str = "sum"
    gamma_positive: float = 0.0
    gamma_negative: float = 4.0
    margin: float = 0.05

    def _by_class(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        logits_BK = _wide(logits_BK)
        target_BK = self.dense(targets, logits_BK)
        # Powers below 1 have no derivative at 0.
        absent_BK = (logits_BK.sigmoid() - self.margin).clamp(min=_TINY)
        present_BK = (-logits_BK).sigmoid().clamp(min=_TINY)
        missed_BK = F.softplus(-logits_BK) * present_BK**self.gamma_positive
        if self.positive_K is not None:
            missed_BK = self.positive_K * missed_BK
        wrong_BK = -(1.0 - absent_BK).clamp(min=_TINY).log() * absent_BK**self.gamma_negative
        return target_BK * missed_BK + (1.0 - target_BK) * wrong_BK


_TINY = 1e-8


@dataclass(frozen=True)
class ClassWeighted:
    """A loss that weights each image by its class; a mixed image is weighted by both of its classes.

    The mean is over images, not over weights as in torch, so it does not depend on how a batch is split into
    microbatches and ranks. The weights are on the logits' device.
    """

    plain: PerImage
    weights_K: Tensor

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        loss_B = self._weighted(logits_BK, targets.labels_B)
        if targets.mixed_B is None:
            return loss_B.mean()
        other_B = self._weighted(logits_BK, targets.mixed_B)
        return (targets.lam * loss_B + (1.0 - targets.lam) * other_B).mean()

    def _weighted(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return self.weights_K[labels_B] * self.plain.each(logits_BK, labels_B)


def balanced_weights(counts_K: Tensor) -> Tensor:
    """float32: images / (classes * images of the class) over the non-empty classes, as scikit-learn's "balanced".

    A class without images has weight 1, which is never used.
    """
    present_K = counts_K > 0
    mean = counts_K.sum() / present_K.sum().clamp(min=1)
    return torch.where(present_K, mean / counts_K.clamp(min=1), 1.0).float()


def positive_weights(counts_K: Tensor, images: int) -> Tensor:
    """float32: the images without a class for each one with it, from 0.01 to 100."""
    return ((images - counts_K) / counts_K.clamp(min=1)).clamp(0.01, 100.0).float()


class FusedLoss:
    """A loss compiled into few fused kernels, gradient included; nothing is compiled before the first call.

    The mixing share of a batch is a tensor, so that new values do not recompile. `compiler` are torch.compile's
    arguments, for tests.
    """

    def __init__(self, plain: LossFunction, **compiler: Any) -> None:
        def of_pairs(logits_BK: Tensor, labels_B: Tensor, mixed_B: Tensor | None, lam: Tensor) -> Tensor:
            return plain(logits_BK, Targets(labels_B, mixed_B, lam))

        self.plain = plain
        self._compiled = torch.compile(of_pairs, fullgraph=True, dynamic=False, **compiler)

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        # Filled on the device: no sync.
        lam = logits_BK.new_ones((), dtype=torch.promote_types(logits_BK.dtype, torch.float32)) * targets.lam
        return self._compiled(logits_BK, targets.labels_B, targets.mixed_B, lam)


def _one_hot(labels_B: Tensor, like_BK: Tensor) -> Tensor:
    if labels_B.ndim == 2:
        return labels_B.to(like_BK.dtype)
    return torch.zeros_like(like_BK).scatter_(1, labels_B[:, None], 1.0)


def _wide(logits_BK: Tensor) -> Tensor:
    """Half precision cast to float32: exp and log of a sum over classes need the range."""
    return logits_BK.float() if logits_BK.dtype in (torch.float16, torch.bfloat16) else logits_BK
