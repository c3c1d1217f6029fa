"""Evaluation: every image counts exactly once, whatever the number of ranks; scores by class, and a table by image."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import EvalSet
from pycls_fast.errors import UserError, cell, refusing
from pycls_fast.files import atomic_write
from pycls_fast.losses import BinaryCrossEntropy, Criterion
from pycls_fast.parallel.parallel_model import ParallelModel
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import uncompiled
from pycls_fast.reading import read_npz
from pycls_fast.speed import Speed
from pycls_fast.train.display import Display

# Damaged images that an error names, for a screen to hold.
_NAMED = 20


@dataclass(frozen=True)
class Predictions:
    """Each image's outcome, in the order of the images' positions in the source (N of them, damaged ones left out)."""

    indices_N: np.ndarray
    """int64, positions in the source."""
    labels_N: np.ndarray
    """int64, true classes; if there are several the one with the highest score, -1 for none."""
    predicted_N: np.ndarray
    """int64, classes with the highest score (ties: the lowest index); -1 if any score is not finite."""
    losses_N: np.ndarray
    """float32, cross-entropy in nats, 0 without a true class; where images have several labels, the loss of all."""
    probabilities_N: np.ndarray
    """float32, the predicted class's probability, NaN if any score is not finite."""

    @property
    def right(self) -> np.ndarray:
        """bool (N,), whether the predicted class is the true one."""
        return (self.labels_N >= 0) & (self.predicted_N == self.labels_N)

    def of(self, rows: np.ndarray | slice) -> Predictions:
        return Predictions(*(values_N[rows] for values_N in vars(self).values()))

    def shared(self, other: Predictions) -> tuple[Predictions, Predictions]:
        """These and others, both of the images that both have, without those that have no true class in either."""
        _, mine, others = np.intersect1d(self.indices_N, other.indices_N, assume_unique=True, return_indices=True)
        counted = (self.labels_N[mine] >= 0) | (other.labels_N[others] >= 0)
        return self.of(mine[counted]), other.of(others[counted])

    def save(self, file: Path) -> None:
        with atomic_write(file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **{name.removesuffix("_N"): array for name, array in vars(self).items()})

    @classmethod
    def load(cls, file: Path) -> Predictions:
        if not file.exists():
            raise UserError(f"{file}: there are no predictions; the run has not been evaluated yet")
        with refusing(f"{file}: not predictions that can be read", OSError, ValueError, KeyError, use="remove it"):
            stored = read_npz(file)
            arrays = [stored[each.name.removesuffix("_N")] for each in fields(cls)]
            types = zip(arrays, ("i", "i", "i", "fi", "fi"), strict=True)
            if not all(array.dtype.kind in allowed for array, allowed in types):
                raise ValueError("an array has the wrong type")
            if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 1:
                raise ValueError("the arrays differ in length")
            return cls(*arrays)


@dataclass(frozen=True)
class Evaluation:
    """The scores on a split: `top1` and `top5` in percent, mean loss in nats (None if images can have several
    true classes), images counted."""

    top1: float
    top5: float
    loss: float | None
    count: int
    predictions: Predictions
    scores_NK: np.ndarray | None = None
    """float32, the logarithm of each class's probability, or what its sigmoid is taken of; if they were asked for.
    Images as in `predictions`."""

    def record(self) -> dict[str, Any]:
        """The four numbers under the names that `metrics.jsonl` uses."""
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss, "count": self.count}


class FlipAveraged(nn.Module):
    """A network whose probabilities (`sigmoid`: each class's own) are the mean of those of an image and its mirror
    image (test-time augmentation)."""

    def __init__(self, network: nn.Module, *, sigmoid: bool) -> None:
        super().__init__()
        self.network, self.sigmoid = network, sigmoid

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits (B, K), in float32 at least."""
        both_2BK = torch.stack([self.network(images_BCHW), self.network(images_BCHW.flip(3))])
        both_2BK = both_2BK.to(torch.promote_types(both_2BK.dtype, torch.float32))
        if self.sigmoid:
            # That of the mean of the probabilities, which round to 1 long before the logits are infinite.
            return F.logsigmoid(both_2BK).logsumexp(0) - F.logsigmoid(-both_2BK).logsumexp(0)
        return both_2BK.log_softmax(2).logsumexp(0) - math.log(2)


@dataclass(frozen=True)
class Scorer:
    """Computes the logits of images, and shows how far it is. Its user has to report the damaged images.

    `wrapped.evaluated` is called, because ranks may have different numbers of batches. `after_batch` is called after
    each batch on every rank, and may raise to stop.
    """

    config: RunConfig
    wrapped: ParallelModel
    world: World
    switches: Speed
    display: Display
    damaged: DamagedImages
    after_batch: Callable[[], None] = lambda: None

    def logits(self, source: Images, doing: str) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield this rank's batches that have images, each with its logits (B, K); call it without gradients."""
        config, world, wrapped, model = self.config, self.world, self.wrapped, self.wrapped.evaluated
        prepare, autocast = build.prepare(config, world.device, self.switches), build.autocast(config, world.device)
        was_training = model.training
        model.eval()
        try:
            with self.display.scoring(doing, len(source)) as advance:
                for done, batch in enumerate(build.eval_batches(config, source, world, self.switches), start=1):
                    self.damaged.note(batch)
                    images_BCHW = prepare(batch)
                    # All its images were damaged: this rank takes part in the exchanges of a forward pass.
                    empty = not len(batch.labels_B)
                    if empty:
                        images_BCHW = images_BCHW.new_zeros(1, *images_BCHW.shape[1:])
                    with uncompiled(model), autocast():
                        logits_BK = model(images_BCHW)
                    if not empty:
                        yield batch, logits_BK
                    world.at(f"{doing}: {done} batches done")
                    advance(len(batch.labels_B) * world.data_size)
                    self.after_batch()
        finally:
            wrapped.free_gathered()
            model.train(was_training)


@torch.no_grad()
def evaluate(scorer: Scorer, scored: EvalSet, doing: str, *, keep_scores: bool = False) -> Evaluation:
    """Score a set, every image once over all ranks; all ranks call this.

    The mean of the run's own loss is reported. Outputs that do not count are ignored. Of several true classes the one
    with the highest score counts; images without any are left out. If images have several labels, each class is judged
    by its sigmoid, all scores are kept (4 bytes for each image and class on every rank), the first is right if it is
    one of the image's, and images without any count for the loss alone.
    """
    world, criterion = scorer.world, scorer.config.loss.criterion()
    sets_LK = build.label_sets(scorer.config, scored.source, world.device)
    if sets_LK is not None:
        criterion, keep_scores = Criterion(criterion.each or BinaryCrossEntropy().each, sigmoid=True), True
    among, answers_NM = (
        None if values is None else torch.from_numpy(values).to(world.device)
        for values in (scored.among, scored.answers_NM)
    )
    sums = torch.zeros(5, dtype=torch.float64, device=world.device)
    outcomes: list[tuple[torch.Tensor, ...]] = []
    for batch, output_BK in scorer.logits(scored.source, doing):
        logits_BK = output_BK.double()
        answers_BM = batch.labels_B[:, None] if answers_NM is None else answers_NM[batch.indices_B]
        target_BK = None if sets_LK is None else sets_LK[batch.labels_B]
        if target_BK is not None:
            answers_BM = torch.where(target_BK > 0, torch.arange(target_BK.shape[1], device=target_BK.device), -1)
        columns, added = _score(logits_BK, answers_BM, among, criterion, target_BK)
        sums += added
        if keep_scores:
            scores_BK = logits_BK if criterion.sigmoid else logits_BK.log_softmax(dim=1)
            columns = (*columns, scores_BK.float())
        outcomes.append((batch.indices_B, *columns))
    top1, top5, labelled, loss, count = world.sum(sums).tolist()
    share = 100.0 / max(labelled, 1)
    mean_loss = None if answers_NM is not None else loss / max(count, 1)
    columns_N = _gather(outcomes, world)
    predictions, scores_NK = Predictions(*columns_N[:5]), columns_N[5] if keep_scores else None
    return Evaluation(top1 * share, top5 * share, mean_loss, int(count), predictions, scores_NK)


def _gather(outcomes: list[tuple[torch.Tensor, ...]], world: World) -> list[np.ndarray]:
    """All ranks' outcomes, on every rank. They are copied from the device only here, after the last batch."""
    mine = [torch.cat(each).cpu().numpy() for each in zip(*outcomes, strict=True)]
    found = [part for part in world.gather(mine if world.counts else None) if part]
    if not found:
        return [np.empty(0, kind) for kind in (*[np.int64] * 3, *[np.float32] * 3)]
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    order_N = np.argsort(columns[0], kind="stable")
    return [column[order_N] for column in columns]


def _score(
    logits_BK: torch.Tensor,
    answers_BM: torch.Tensor,
    among: torch.Tensor | None,
    criterion: Criterion,
    target_BK: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Compare float64 logits with each image's true classes, padded with -1; nothing here waits for the device.

    Returns what `Predictions` keeps of each image, besides its index: the true class with the highest score (-1 without
    one), the predicted one, the loss and the probability. And float64 sums: images with the true class first, with it
    among the first five, with one at all, loss, images that count for it.
    """
    if among is not None:
        place_K = torch.full((logits_BK.shape[1],), -1, device=logits_BK.device)
        place_K[among] = torch.arange(len(among), device=logits_BK.device)
        answers_BM = torch.where(answers_BM < 0, -1, place_K[answers_BM.clamp(min=0)])
        logits_BK = logits_BK[:, among]
    # Among true classes with equal scores the lowest index comes first, as everywhere.
    answers_BM = answers_BM.sort(dim=1).values
    scores_BM = logits_BK.gather(1, answers_BM.clamp(min=0)).masked_fill(answers_BM < 0, -torch.inf)
    labels_B = answers_BM.gather(1, scores_BM.argmax(dim=1, keepdim=True))[:, 0]
    place_B = places(logits_BK, labels_B.clamp(min=0))
    # NaN compares false, so its image would rank first; it must not count as correct.
    finite_B, counted_B = torch.isfinite(logits_BK).all(dim=1), labels_B >= 0
    # Ties go to the lowest index, as above; argmax does not guarantee that.
    highest_B1 = logits_BK.amax(dim=1, keepdim=True)
    classes_K = torch.arange(logits_BK.shape[1], device=logits_BK.device)
    lowest_B = torch.where(logits_BK == highest_B1, classes_K, len(classes_K)).amin(dim=1)
    predicted_B = torch.where(finite_B, lowest_B, -1)
    losses_B = own_losses_B = F.cross_entropy(logits_BK, labels_B, ignore_index=-1, reduction="none")
    if criterion.each is not None and target_BK is None:
        own_losses_B = criterion.each(logits_BK, labels_B.clamp(min=0)).masked_fill(~counted_B, 0.0)
    first_B, first_five_B = ((place_B < n) & finite_B & counted_B for n in (1, 5))
    labelled = counted_B.sum()
    if target_BK is not None and criterion.each is not None:
        # An image without any label counts, too: for the loss, which is that of all classes.
        losses_B = own_losses_B = criterion.each(logits_BK, target_BK)
        counted_B = torch.ones_like(counted_B)
    sums = torch.stack([first_B.sum(), first_five_B.sum(), labelled, own_losses_B.sum(), counted_B.sum()])
    highest_B = highest_B1[:, 0]
    probabilities_B = highest_B.sigmoid() if criterion.sigmoid else (highest_B - logits_BK.logsumexp(dim=1)).exp()
    probabilities_B = torch.where(finite_B, probabilities_B, torch.nan)
    if among is not None:
        labels_B, predicted_B = (torch.where(x < 0, -1, among[x.clamp(min=0)]) for x in (labels_B, predicted_B))
    return (labels_B, predicted_B, losses_B.float(), probabilities_B.float()), sums


def places(scores_BK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """How many classes rank above each image's own, (B,): a higher score, or as high and a lower index; K for minus
    infinity."""
    right_B1 = scores_BK.gather(1, labels_B[:, None])
    classes_K = torch.arange(scores_BK.shape[1], device=scores_BK.device)
    ahead_BK = (scores_BK > right_B1) | ((scores_BK == right_B1) & (classes_K < labels_B[:, None]))
    return torch.where(right_B1[:, 0] > -torch.inf, ahead_BK.sum(dim=1), scores_BK.shape[1])


def predictions_csv(predictions: Predictions, source: Images) -> str:
    """The images as CSV, those with the highest loss first; images without a true class, which have none unless images
    have several labels, are at the end.

    `label` and `class` are the true class, empty if there is none; `probability` is the predicted class's. Scores that
    are not finite predict no class.
    """
    # Models may have more outputs than their data has classes.
    names = dict(enumerate(source.classes)) | {-1: ""}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image", "label", "class", "predicted", "predicted_class", "probability", "loss"))
    # NaN is the worst loss.
    losses_N = np.nan_to_num(predictions.losses_N, nan=np.inf)
    without_N = (predictions.labels_N < 0) & (source.label_sets is None)
    for place in np.lexsort((-losses_N, without_N)).tolist():
        index, label, predicted, loss, probability = (values_N[place].item() for values_N in vars(predictions).values())
        row = [cell(source.name(index))]
        for k in (label, predicted):
            row += ["" if k < 0 else str(k), cell(names.get(k, f"output {k}"))]
        row += ["" if predicted < 0 else f"{probability:.6g}", "" if without_N[place] else f"{loss:.6g}"]
        table.writerow(row)
    return text.getvalue()


class DamagedImages:
    """The damaged images that a process meets: each is reported once and left out; more than `limit` are an error.

    `on_new` is called on all ranks, once for each image, with a step, its name and the reason. Reasons by name: `noted`
    are those of images that this rank has met since the last report, `reported` those that any rank has met before.
    """

    def __init__(
        self,
        limit: int,
        world: World,
        display: Display,
        on_new: Callable[[int, str, str], None] = lambda step, name, reason: None,
    ) -> None:
        self.noted: dict[str, str] = {}
        self.reported: dict[str, str] = {}
        self._limit, self._world, self._display, self._on_new = limit, world, display, on_new

    def note(self, batch: Batch) -> None:
        """Note a batch's, without those that have been reported."""
        self.noted.update((name, reason) for name, reason in batch.damaged if name not in self.reported)

    def noting(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        with closing(batches):
            for batch in batches:
                self.note(batch)
                yield batch

    def report(self, step: int = 0) -> None:
        """Warn of those that any rank has noted since the last call, or raise a `UserError` that names the first if
        there are too many; all ranks call this."""
        noted, self.noted = self.noted, {}
        found = {name: reason for part in self._world.gather(noted) for name, reason in sorted(part.items())}
        new = {name: reason for name, reason in found.items() if name not in self.reported}
        self.reported |= new
        for name, reason in new.items():
            self._on_new(step, name, reason)
        if len(self.reported) > self._limit:
            lines = [f"{name}: {reason}" for name, reason in self.reported.items()]
            more = f"and {len(lines) - _NAMED:,} more; pycls-fast prepare verify names all"
            raise UserError(
                f"data.max_damaged: {len(lines)} images cannot be read, more than {self._limit}:",
                *lines[:_NAMED],
                *([more] if len(lines) > _NAMED else []),
            )
        for name, reason in new.items():
            self._display.warn(f"{name}: {reason}; left out")

    def need_images(self, split: str, count: int, step: int = 0) -> None:
        """Report; a `UserError` if no image of a split was left to `count`. All ranks call this."""
        self.report(step)
        if not count:
            raise UserError(f"{split}: no image can be read; repair them (pycls-fast prepare verify)")
