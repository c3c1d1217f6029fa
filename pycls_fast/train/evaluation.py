"""Evaluation: every image counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pycls_fast.data import Batch, Prepare
from pycls_fast.parallel import World, uncompiled


@dataclass(frozen=True)
class Evaluation:
    """What a split scored: `top1` and `top5` in percent, mean cross-entropy in nats, images counted.

    There is no `loss` where an image has several right classes.
    """

    top1: float
    top5: float
    loss: float | None
    count: int
    damaged: tuple[tuple[str, str], ...] = ()

    def record(self) -> dict[str, Any]:
        """The four numbers under the names that `metrics.jsonl` uses."""
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss, "count": self.count}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    prepare: Prepare,
    autocast: Callable[[], AbstractContextManager[None]],
    world: World,
    on_batch: Callable[[int], None] = lambda images: None,
    *,
    among: torch.Tensor | None = None,
    answers_NM: torch.Tensor | None = None,
) -> Evaluation:
    """Score the model on this rank's batches and sum over the ranks.

    Args:
        model: not wrapped: ranks may have different numbers of batches. Left in the mode it was in.
        batches: on the device; a batch may be empty when all its images were damaged.
        prepare: uint8 images to the model's input.
        autocast: the context of the forward pass.
        world: the ranks.
        on_batch: told the number of images after each batch, for a progress bar.
        among: int64 on the device, the outputs that count, rising; the others are as if they did not exist.
        answers_NM: int64 on the device, all right classes of each image of the source, filled up with -1. The best
            scored of them counts; images without any are left out.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    damaged: list[tuple[str, str]] = []
    try:
        for batch in batches:
            damaged.extend(batch.damaged)
            images = len(batch.labels_B)
            if images:
                with uncompiled(model), autocast():
                    logits_BK = model(prepare(batch))
                answers_BM = batch.labels_B[:, None] if answers_NM is None else answers_NM[batch.indices_B]
                sums += _count(logits_BK.double(), answers_BM, among)
            on_batch(images)
    finally:
        model.train(was_training)
    top1, top5, loss, count = world.sum(sums).tolist()
    count = int(count)
    everyone = tuple(sorted({item for part in world.gather(damaged) for item in part}))
    share = 100.0 / max(count, 1)
    mean_loss = None if answers_NM is not None else loss / max(count, 1)
    return Evaluation(top1 * share, top5 * share, mean_loss, count, everyone)


def _count(logits_BK: torch.Tensor, answers_BM: torch.Tensor, among: torch.Tensor | None) -> torch.Tensor:
    """Images whose best right class comes first, and among the first five; summed loss; images; float64."""
    if among is not None:
        place_K = torch.full((logits_BK.shape[1],), -1, device=logits_BK.device)
        place_K[among] = torch.arange(len(among), device=logits_BK.device)
        answers_BM = torch.where(answers_BM < 0, -1, place_K[answers_BM.clamp(min=0)])
        logits_BK = logits_BK[:, among]
    # Of right classes with the same score the one with the lowest index comes first, as everywhere.
    answers_BM = answers_BM.sort(dim=1).values
    scores_BM = logits_BK.gather(1, answers_BM.clamp(min=0)).masked_fill(answers_BM < 0, -torch.inf)
    best_B1 = scores_BM.argmax(dim=1, keepdim=True)
    right_B1, labels_B1 = scores_BM.gather(1, best_B1), answers_BM.gather(1, best_B1)
    # Rank of the right class: how many classes score strictly higher, or as high with a lower index.
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)
    ahead_BK = (logits_BK > right_B1) | ((logits_BK == right_B1) & (classes_K < labels_B1))
    place_B = ahead_BK.sum(dim=1)
    has_answer_B = labels_B1[:, 0] >= 0
    # A score that is not a number is ahead of nothing; it must not count as right.
    valid_B = torch.isfinite(logits_BK).all(dim=1) & has_answer_B
    loss = F.cross_entropy(logits_BK[has_answer_B], labels_B1[has_answer_B, 0], reduction="sum")
    return torch.stack([((place_B < 1) & valid_B).sum(), ((place_B < 5) & valid_B).sum(), loss, has_answer_B.sum()])
