"""95% intervals of scores: the range in which those of other images like these would lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from scipy import sparse

from pycls_fast.data.sources.base import Images
from pycls_fast.train.by_class import judged, of_sets, probability_gaps, sigmoid
from pycls_fast.train.evaluate import Evaluation

_RESAMPLES = 1_000
# Images x classes whose scores are ranked again in each resample: some seconds.
_MOST_RANKED = 1_000_000
# Images x resamples at a time, 4 MB.
_CHUNK = 2**20


def intervals(result: Evaluation, source: Images, scores: Mapping[str, object]) -> dict[str, list[float]]:
    """The ends of the intervals of `top1`, `top5` and `scores` (`auc` and those of `class_scores`, or of `set_scores`,
    or none), by name; the same each time.

    `top1` and `top5` are proportions and have Wilson's interval. The others have the bootstrap's (Efron, Bootstrap
    Methods: Another Look at the Jackknife, 1979): from the N images N are drawn with replacement, 1,000 times, and 2.5%
    of the scores that they have are cut off at either end. Resamples have a higher calibration error than the images,
    as what was drawn too often in a bin counts like what was drawn too seldom; so its ends are mirrored at the score
    (the basic bootstrap), which is the upper end where few resamples have a lower one. Scores that are the same in all
    resamples or unknown in one have no interval, nor have `auc` and `map`, for which all classes' scores are ranked,
    above 1 million images x classes.
    """
    labelled = int((result.predictions.labels_N >= 0).sum())
    shares = {"top1": result.top1, "top5": result.top5} if labelled else {}
    found = {name: wilson(share, labelled) for name, share in shares.items()}
    known = {name: score for name, score in scores.items() if isinstance(score, float)}
    if not known:
        return found
    resampler = Resampler(result, source)
    parts = [resampler.scores(drawn_NR) for drawn_NR in draws(len(result.predictions.labels_N), _RESAMPLES)]
    for name in (name for name in parts[0] if name in known):
        low, high = np.quantile(np.concatenate([part[name] for part in parts]), (0.025, 0.975)).tolist()
        if name == "calibration_error":
            low, high = max(2 * known[name] - high, 0.0), max(2 * known[name] - low, known[name])
        if low < high:
            found[name] = [low, high]
    return found


def wilson(share: float, count: int) -> list[float]:
    """The ends of Wilson's 95% interval of a share of `count` images, all in percent."""
    # It takes half a second to import.
    from scipy import stats

    ends = stats.binomtest(round(share * count / 100), count).proportion_ci(method="wilson")
    return [100 * float(ends.low), 100 * float(ends.high)]


def draws(images: int, resamples: int) -> Iterator[np.ndarray]:
    """How often each image is in each resample, float32 (N, R), some resamples at a time."""
    random, chunk = np.random.default_rng(0), max(_CHUNK // images, 1)
    for first in range(0, resamples, chunk):
        places = [random.integers(images, size=images) for _ in range(min(chunk, resamples - first))]
        yield np.stack([np.bincount(each, minlength=images) for each in places], axis=1).astype(np.float32)


class Resampler:
    """Computes the scores of resamples. Images have weights and are ranked once, where the plain computation scores
    each as often as it was drawn."""

    def __init__(self, result: Evaluation, source: Images) -> None:
        classes = len(source.classes)
        predictions, scores_NK = result.predictions, result.scores_NK
        self._several_labels = source.label_sets is not None
        if source.label_sets is not None:
            true_NK, scores_NK = of_sets(result, source)
            true, guessed = (sparse.csr_array(each_NK.T) for each_NK in (true_NK, scores_NK > 0))
            rows_M, shares, rights = np.arange(len(true_NK)).repeat(classes), sigmoid(scores_NK), true_NK
        else:
            true, guessed = (_members(each_N, classes) for each_N in (predictions.labels_N, predictions.predicted_N))
            rows_M, shares, rights = judged(predictions)
        # bool (K, N): the images of each class, those predicted to be, and those of which that is right.
        self._true, self._guessed, self._right = true, guessed, true.multiply(guessed)
        images = true.shape[1]
        # What each image adds to the calibration error of each bin, and how many probabilities it has.
        bins_M, gaps_M = probability_gaps(shares, rights)
        self._gaps = sparse.csr_array((gaps_M, (bins_M, rows_M)), shape=(bins_M.max(initial=0) + 1, images))
        self._judged_N = np.bincount(rows_M, minlength=images)
        self._rankings: list[_Ranking] = []
        if scores_NK is not None and scores_NK.size <= _MOST_RANKED and np.isfinite(scores_NK).all():
            self._rankings = [_Ranking(scores_NK[:, k], true[[k]].indices) for k in range(classes)]

    def scores(self, drawn_NR: np.ndarray) -> dict[str, np.ndarray]:
        """The scores of some of the resamples that `draws` yields, each (R,)."""
        images_KR, right_KR, guessed_KR = (
            each.astype(np.float32) @ drawn_NR for each in (self._true, self._right, self._guessed)
        )
        found = {
            "recall" if self._several_labels else "class_top1": _mean(100 * right_KR, images_KR),
            "f1": _mean(200 * right_KR, (images_KR + guessed_KR) * (images_KR > 0)),
            "calibration_error": np.abs(self._gaps @ drawn_NR).sum(0) / np.maximum(self._judged_N @ drawn_NR, 1),
        }
        if self._rankings and self._several_labels:
            parts = [ranking.average_precision(drawn_NR) for ranking in self._rankings]
            found["map"] = _mean(*np.stack(parts, axis=1))
        elif self._rankings:
            parts = [ranking.area(drawn_NR) for ranking in self._rankings]
            found["auc"] = _mean(*np.stack(parts, axis=1))
        return found


def _members(values_N: np.ndarray, classes: int) -> sparse.csr_array:
    """bool (K, N): the images of each class; other values are of none."""
    places = np.flatnonzero((values_N >= 0) & (values_N < classes))
    return sparse.csr_array((np.ones(len(places), bool), (values_N[places], places)), shape=(classes, len(values_N)))


def _mean(shares_KR: np.ndarray, whole_KR: np.ndarray) -> np.ndarray:
    """The mean of the quotients over the classes whose divisor is not 0; NaN without such a class."""
    known_KR = whole_KR > 0
    quotients_KR = np.divide(shares_KR, whole_KR, where=known_KR, out=np.zeros(shares_KR.shape))
    classes_R = known_KR.sum(0)
    return np.where(classes_R > 0, quotients_KR.sum(0) / np.maximum(classes_R, 1), np.nan)


class _Ranking:
    """All images ranked by their scores of one class, and the places of the class's own images among them."""

    def __init__(self, scores_N: np.ndarray, own_P: np.ndarray) -> None:
        self._order_N = np.argsort(scores_N, kind="stable")
        # The class's images, from the lowest score.
        self._own_P = own_P[np.argsort(scores_N[own_P], kind="stable")]
        own_scores_P, ranked_N = scores_N[self._own_P], scores_N[self._order_N]
        # How many images are below each of them, and how many are not above it; how many of the class are below it.
        self._below_P, self._up_to_P = (np.searchsorted(ranked_N, own_scores_P, side) for side in ("left", "right"))
        self._own_below_P = np.searchsorted(own_scores_P, own_scores_P, "left")

    def area(self, drawn_NR: np.ndarray) -> np.ndarray:
        """The area under the ROC curve of each resample: pairs in the right order (ties by half), all pairs, (2, R)."""
        own_PR, sums_MR = drawn_NR[self._own_P], _sums(drawn_NR[self._order_N])
        own_R = own_PR.sum(0, dtype=np.float64)
        pairs_R = (own_PR * (sums_MR[self._below_P] + sums_MR[self._up_to_P])).sum(0, dtype=np.float64) / 2
        # Of the pairs within the class one half is in the right order.
        return np.stack([pairs_R - own_R**2 / 2, own_R * (sums_MR[-1] - own_R)])

    def average_precision(self, drawn_NR: np.ndarray) -> np.ndarray:
        """The average precision of each resample: the sum of the precision at each image of the class in percent, and
        how many there are, (2, R)."""
        own_PR = drawn_NR[self._own_P]
        sums_MR, own_sums_MR = _sums(drawn_NR[self._order_N]), _sums(own_PR)
        right_PR = own_sums_MR[-1] - own_sums_MR[self._own_below_P]
        all_PR = sums_MR[-1] - sums_MR[self._below_P]
        # Without images above the image was not drawn either.
        precision_PR = right_PR / np.maximum(all_PR, 1)
        return np.stack([100 * (own_PR * precision_PR).sum(0, dtype=np.float64), own_PR.sum(0, dtype=np.float64)])


def _sums(drawn_NR: np.ndarray) -> np.ndarray:
    """(N + 1, R): in each row the sum of the rows before it. Exact, as the sums are whole numbers below 2^24."""
    return np.pad(drawn_NR.cumsum(0), ((1, 0), (0, 0)))
