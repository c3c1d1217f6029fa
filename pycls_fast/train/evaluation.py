"""Evaluation: every image counts once, whatever the number of ranks."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pycls_fast.data import Batch, Prepare
from pycls_fast.errors import UserError
from pycls_fast.parallel import World, uncompiled
from pycls_fast.train.output_file import whole


@dataclass(frozen=True)
class Predictions:
    """Each image's outcome, in the order of the images' positions in the source (N of them, damaged ones left out)."""

    indices_N: np.ndarray
    """int64, positions in the source."""
    labels_N: np.ndarray
    """int64, right classes; of several the one with the highest score, -1 for none."""
    predicted_N: np.ndarray
    """int64, classes with the highest score (the first of equals); -1 where a score is not a number."""
    losses_N: np.ndarray
    """float32, cross-entropy in nats; 0 where there is no right class."""

    def save(self, file: Path) -> None:
        """Write an `.npz` file whole or not at all."""
        with whole(file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(
                stream,
                indices=self.indices_N,
                labels=self.labels_N,
                predicted=self.predicted_N,
                losses=self.losses_N,
            )

    @classmethod
    def load(cls, file: Path) -> Predictions:
        """Read what `save` wrote.

        Raises:
            UserError: no such file, or one of another kind.
        """
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return cls(arrays["indices"], arrays["labels"], arrays["predicted"], arrays["losses"])
        except FileNotFoundError as error:
            raise UserError(f"{file}: there are no predictions; the run has not been evaluated yet") from error
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{file}: not predictions that can be read ({error})") from error


@dataclass(frozen=True)
class Evaluation:
    """What a split scored: `top1` and `top5` in percent, mean cross-entropy in nats, images counted.

    There is no `loss` where an image has several right classes.
    """

    top1: float
    top5: float
    loss: float | None
    count: int
    predictions: Predictions
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
    forward_is_collective: bool = False,
    free_gathered: Callable[[], None] = lambda: None,
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
        forward_is_collective: the forward pass contains collectives: a rank whose batch is empty takes part.
        free_gathered: called at the end (`parallel.Wrapped.free_gathered`).
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    damaged: list[tuple[str, str]] = []
    outcomes: list[tuple[torch.Tensor, ...]] = []
    try:
        for batch in batches:
            damaged.extend(batch.damaged)
            images = len(batch.labels_B)
            if images:
                with uncompiled(model), autocast():
                    logits_BK = model(prepare(batch))
                answers_BM = batch.labels_B[:, None] if answers_NM is None else answers_NM[batch.indices_B]
                scored = _score(logits_BK.double(), answers_BM, among)
                sums += scored.sums()
                outcomes.append((batch.indices_B, scored.labels_B, scored.predicted_B, scored.losses_B.float()))
            elif forward_is_collective:
                empty_BCHW = prepare(batch)
                with uncompiled(model), autocast():
                    model(empty_BCHW.new_zeros(1, *empty_BCHW.shape[1:]))
            on_batch(images)
    finally:
        free_gathered()
        model.train(was_training)
    top1, top5, loss, count = world.sum(sums).tolist()
    count = int(count)
    everyone = tuple(sorted({item for part in world.gather(damaged) for item in part}))
    share = 100.0 / max(count, 1)
    mean_loss = None if answers_NM is not None else loss / max(count, 1)
    return Evaluation(top1 * share, top5 * share, mean_loss, count, _gather(outcomes, world), everyone)


def _gather(outcomes: list[tuple[torch.Tensor, ...]], world: World) -> Predictions:
    """All ranks' outcomes on every rank. They left the device only here, behind the last batch."""
    kinds = (torch.int64, torch.int64, torch.int64, torch.float32)
    mine = [
        torch.cat([outcome[i] for outcome in outcomes]).cpu().numpy()
        if outcomes
        else torch.empty(0, dtype=kind).numpy()
        for i, kind in enumerate(kinds)
    ]
    columns = [np.concatenate(parts) for parts in zip(*world.gather(mine), strict=True)]
    order_N = np.argsort(columns[0], kind="stable")
    return Predictions(*(column[order_N] for column in columns))


@dataclass(frozen=True)
class _Scored:
    """A batch's outcome."""

    labels_B: torch.Tensor
    """The best scored right class; -1 where there is none."""
    predicted_B: torch.Tensor
    losses_B: torch.Tensor
    place_B: torch.Tensor
    """Classes ahead of the right one."""
    finite_B: torch.Tensor

    def sums(self) -> torch.Tensor:
        """Images whose right class comes first, and among the first five; summed loss; images; float64."""
        counted_B = self.labels_B >= 0
        # A score that is not a number is ahead of nothing; it must not count as right.
        valid_B = self.finite_B & counted_B
        return torch.stack(
            [
                ((self.place_B < 1) & valid_B).sum(),
                ((self.place_B < 5) & valid_B).sum(),
                self.losses_B.sum(),
                counted_B.sum(),
            ]
        )


def _score(logits_BK: torch.Tensor, answers_BM: torch.Tensor, among: torch.Tensor | None) -> _Scored:
    """Compare float64 logits with each image's right classes, -1 for no more; nothing here waits for the device."""
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
    labels_B = labels_B1[:, 0]
    finite_B = torch.isfinite(logits_BK).all(dim=1)
    # The first of equal scores, as above; argmax promises no order among them.
    is_best_BK = logits_BK == logits_BK.amax(dim=1, keepdim=True)
    predicted_B = torch.where(finite_B, torch.where(is_best_BK, classes_K, len(classes_K)).amin(dim=1), -1)
    losses_B = F.cross_entropy(logits_BK, labels_B, ignore_index=-1, reduction="none")
    if among is not None:
        labels_B, predicted_B = (torch.where(x < 0, -1, among[x.clamp(min=0)]) for x in (labels_B, predicted_B))
    return _Scored(labels_B, predicted_B, losses_B, place_B=ahead_BK.sum(dim=1), finite_B=finite_B)
