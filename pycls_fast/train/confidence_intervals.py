"""95% intervals of scores: the range in which those of other images like these would lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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
    (the basic bootstrap). Scores that are the same in all resamples or unknown in one have no interval, nor have `auc`
    and `map`, for which all classes' scores are ranked, above 1 million images x classes.
    """
    # It takes half a second to import.
    from scipy import stats

    found: dict[str, list[float]] = {}
    for name, share in (("top1", result.top1), ("top5", result.top5)):
        ends = stats.binomtest(round(share * result.count / 100), result.count).proportion_ci(method="wilson")
        found[name] = [100 * float(ends.low), 100 * float(ends.high)]
    known = {name: score for name, score in scores.items() if isinstance(score, float)}
    if not known:
        return found
    again = resampled(result, source)
    parts = [again(drawn_NR) for drawn_NR in draws(len(result.predictions.labels_N), _RESAMPLES)]
    for name in (name for name in parts[0] if name in known):
        low, high = np.quantile(np.concatenate([part[name] for part in parts]), (0.025, 0.975)).tolist()
        if name == "calibration_error":
            low, high = max(2 * known[name] - high, 0.0), 2 * known[name] - low
        if low < high:
            found[name] = [low, high]
    return found


def draws(images: int, resamples: int) -> Iterator[np.ndarray]:
    """How often each image is in each resample, float32 (N, R), some resamples at a time."""
    random, chunk = np.random.default_rng(0), max(_CHUNK // images, 1)
    for first in range(0, resamples, chunk):
        places = [random.integers(images, size=images) for _ in range(min(chunk, resamples - first))]
        yield np.stack([np.bincount(each, minlength=images) for each in places], axis=1).astype(np.float32)


def resampled(result: Evaluation, source: Images) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """A function from `draws` to the scores of the resamples, each (R,): images have weights, and are ranked once,
    where the plain computation scores each as often as it was drawn."""
    classes = len(source.classes)
    predictions, scores_NK = result.predictions, result.scores_NK
    several = source.label_sets is not None
    if source.label_sets is not None:
        true_NK, scores_NK = of_sets(result, source)
        true, guessed = (sparse.csr_array(each_NK.T) for each_NK in (true_NK, scores_NK > 0))
        rows_M, shares, rights = np.arange(len(true_NK)).repeat(classes), sigmoid(scores_NK), true_NK
    else:
        true, guessed = (_members(each_N, classes) for each_N in (predictions.labels_N, predictions.predicted_N))
        rows_M, shares, rights = judged(predictions)
    right, images = true.multiply(guessed), true.shape[1]
    bins_M, gaps_M = probability_gaps(shares, rights)
    gaps = sparse.csr_array((gaps_M, (bins_M, rows_M)), shape=(bins_M.max(initial=0) + 1, images))
    judged_N = np.bincount(rows_M, minlength=images)
    ranks = []
    if scores_NK is not None and scores_NK.size <= _MOST_RANKED and np.isfinite(scores_NK).all():
        rank = _average_precision if several else _area
        ranks = [rank(scores_NK[:, k], true[[k]].indices) for k in range(classes)]

    def scores(drawn_NR: np.ndarray) -> dict[str, np.ndarray]:
        images_KR, right_KR, guessed_KR = (each.astype(np.float32) @ drawn_NR for each in (true, right, guessed))
        found = {
            "class_top1": _mean(100 * right_KR, images_KR),
            "f1": _mean(200 * right_KR, (images_KR + guessed_KR) * (images_KR > 0)),
            "calibration_error": np.abs(gaps @ drawn_NR).sum(0) / np.maximum(judged_N @ drawn_NR, 1),
        }
        if ranks:
            parts = [rank(drawn_NR) for rank in ranks]
            found["map" if several else "auc"] = _mean(*np.stack(parts, axis=1))
        return found

    return scores


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


def _ordered(scores_N: np.ndarray, own_P: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images from the lowest score; how many are below each of `own_P`, and how many are not above it."""
    order_N = np.argsort(scores_N, kind="stable")
    sides = (np.searchsorted(scores_N[order_N], scores_N[own_P], side) for side in ("left", "right"))
    return order_N, *sides


def _below(drawn_NR: np.ndarray) -> np.ndarray:
    """(N + 1, R): in each row the sum of those before it. Exact, as the sums are whole numbers below 2^24."""
    return np.pad(drawn_NR.cumsum(0), ((1, 0), (0, 0)))


def _area(scores_N: np.ndarray, own_P: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The area under the ROC curve of each resample: pairs in the right order (ties count half), and all, (2, R)."""
    order_N, low_P, high_P = _ordered(scores_N, own_P)

    def area(drawn_NR: np.ndarray) -> np.ndarray:
        own_PR, below_MR = drawn_NR[own_P], _below(drawn_NR[order_N])
        own_R = own_PR.sum(0, dtype=np.float64)
        pairs_R = (own_PR * (below_MR[low_P] + below_MR[high_P])).sum(0, dtype=np.float64) / 2
        # Of the pairs within the class one half is in the right order.
        return np.stack([pairs_R - own_R**2 / 2, own_R * (below_MR[-1] - own_R)])

    return area


def _average_precision(scores_N: np.ndarray, own_P: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The average precision of each resample: the sum of the precision at each image of the class in percent, and how
    many there are, (2, R)."""
    own_P = own_P[np.argsort(scores_N[own_P], kind="stable")]
    order_N, low_P, _ = _ordered(scores_N, own_P)
    _, own_low_P, _ = _ordered(scores_N[own_P], np.arange(len(own_P)))

    def average_precision(drawn_NR: np.ndarray) -> np.ndarray:
        own_PR = drawn_NR[own_P]
        below_MR, own_below_MR = _below(drawn_NR[order_N]), _below(own_PR)
        right_PR = own_below_MR[-1] - own_below_MR[own_low_P]
        all_PR = below_MR[-1] - below_MR[low_P]
        # Without images above the image was not drawn either.
        precision_PR = right_PR / np.maximum(all_PR, 1)
        return np.stack([100 * (own_PR * precision_PR).sum(0, dtype=np.float64), own_PR.sum(0, dtype=np.float64)])

    return average_precision
