"""Classification losses. Targets stay label pairs `(labels_a_B, labels_b_B, lam)` until a loss needs more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What each image should be classified as.

    Attributes:
        labels_B: int64 class indices.
        mixed_B: int64 class indices of the images mixed in, or None.
        lam: share of `labels_B` in [0, 1], of all images or (B,) of each; `mixed_B` has the rest.
    """

    labels_B: Tensor
    mixed_B: Tensor | None = None
    lam: float | Tensor = 1.0


class Loss(Protocol):
    """Mean loss over a batch: `(logits_BK, targets) -> scalar`, in float32 or wider."""

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy, nats, with label smoothing as in Szegedy et al. 2016, section 7."""

    label_smoothing: float = 0.0

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        logits_BK = _wide(logits_BK)
        each = "none" if isinstance(targets.lam, Tensor) else "mean"
        loss = F.cross_entropy(logits_BK, targets.labels_B, label_smoothing=self.label_smoothing, reduction=each)
        if targets.mixed_B is None:
            return loss.mean()
        other = F.cross_entropy(logits_BK, targets.mixed_B, label_smoothing=self.label_smoothing, reduction=each)
        # Cross-entropy is linear in the target, so mixing losses is mixing targets, without a B x K target.
        return (targets.lam * loss + (1.0 - targets.lam) * other).mean()


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """One sigmoid per class (Beyer et al. 2020; Wightman et al. 2021, section 2.1), nats.

    The target of a class is its share in the mix, smoothed to `(1 - s) t + s / K` as in timm. `reduction` is over
    classes: "mean" (timm) or "sum" (big_vision); images are always averaged.
    """

    label_smoothing: float = 0.0
    reduction: str = "mean"

    def __call__(self, logits_BK: Tensor, targets: Targets) -> Tensor:
        logits_BK = _wide(logits_BK)
        target_BK = self.dense(targets, logits_BK)
        loss_BK = F.binary_cross_entropy_with_logits(logits_BK, target_BK, reduction="none")
        return loss_BK.mean() if self.reduction == "mean" else loss_BK.sum(dim=1).mean()

    def dense(self, targets: Targets, like_BK: Tensor) -> Tensor:
        """Targets as one value per class, (B, K)."""
        target_BK = torch.full_like(like_BK, self.label_smoothing / like_BK.shape[1])
        lam_B1 = target_BK.new_ones((len(target_BK), 1))
        if targets.mixed_B is not None:
            lam_B1 = lam_B1 * (targets.lam[:, None] if isinstance(targets.lam, Tensor) else targets.lam)
            target_BK.scatter_add_(1, targets.mixed_B[:, None], (1.0 - self.label_smoothing) * (1.0 - lam_B1))
        return target_BK.scatter_add_(1, targets.labels_B[:, None], (1.0 - self.label_smoothing) * lam_B1)


def _wide(logits_BK: Tensor) -> Tensor:
    """Half precision to float32: exp and log of a sum over classes need the range."""
    return logits_BK.float() if logits_BK.dtype in (torch.float16, torch.bfloat16) else logits_BK
