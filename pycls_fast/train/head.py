"""The head first: before any other layer is trained, a new head is fitted to the features that the weights give.

A random head distorts them while it is learned (Kumar et al., Fine-Tuning can Distort Pretrained Features and
Underperform Out-of-Distribution, ICLR 2022, "LP-FT"). Here it is the optimum of multinomial logistic regression, found
by L-BFGS (as the linear probes of Kornblith et al., Do Better ImageNet Models Transfer Better?, 2019); its accuracy is
that of step 0, the first that can be the best one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycls_fast.data.sampling import POWERS
from pycls_fast.data.sources.base import Subset
from pycls_fast.optim.owned_weights import assign
from pycls_fast.train.agreement import BUSY, on_main
from pycls_fast.train.evaluate import Scorer
from pycls_fast.train.features import collect_features, knn_votes, voted_places
from pycls_fast.train.run_state import Parts

# Penalties per image, of features with a variance of 1 on average. From the largest, whose solution is nearly that of
# the class means, to one that separates most sets completely.
PENALTIES = tuple(10.0 ** (power / 2) for power in range(4, -9, -1))
# From so many images on one held-out part is enough.
_FOLDS, _FOLDED_IMAGES = 5, 1_000
# More would take longer than the first epoch, for a head that is trained further.
_MOST_IMAGES = 20_000
_NEIGHBOURS, _TEMPERATURE = 20, 0.07
# The logit of an output without images, below all others.
_ABSENT = -20.0


Report = Callable[..., None]
"""Gets a line and, by their names, numbers."""


def fit_head(parts: Parts, scorer: Scorer, check: Callable[[], None], report: Report) -> None:
    """Fit the head to the training images' features and write it into the network; all ranks call this.

    The `scorer` computes the features; `check`, which may raise, and `report` are called by the main rank alone, while
    it fits and at the end.
    """
    step, network, train, world = parts.step, parts.network, parts.sources["train"], scorer.world
    power = 0.0 if parts.config.loss.class_weights == "auto" else POWERS[parts.config.data.sampling]
    has_bias = network.last_layer().bias is not None
    if len(train) > _MOST_IMAGES:
        train = Subset(train, np.sort(_some(train.labels, parts.config.seed)))

    def go_on() -> None:
        check()
        world.at("fitting the head")
        world.from_main(BUSY)

    features_ND, labels_N = collect_features(scorer, network, train, "train")
    images = len(labels_N)
    said = f"head: fitted to the features of {images:,} images"
    if step.sets_LK is not None:
        true_NK = step.sets_LK.cpu()[labels_N]

        def fit() -> tuple[Tensor, Tensor]:
            fitted = fit_each(features_ND, true_NK, power=power, bias=has_bias, check=go_on)
            report(f"{said}, class by class", images=images)
            return fitted
    else:
        held_out = collect_features(scorer, network, parts.sources["val"], "val")
        if len(labels_N.unique()) == 1:
            return

        def fit() -> tuple[Tensor, Tensor]:
            outputs = network.last_layer().out_features
            head = fit_logistic(features_ND, labels_N, outputs, power=power, bias=has_bias, check=go_on)
            text, scores = _quality(head, features_ND, labels_N, held_out, outputs)
            report(f"{said}{', weighted by class' if power < 1 else ''}, {text}", images=images, **scores)
            if not parts.config.loss.criterion().sigmoid:
                return head.weight_KD, head.bias_K
            return head.weight_KD, head.bias_K - sigmoid_shift(features_ND @ head.weight_KD.T + head.bias_K)

    fitted = on_main(world, fit)
    state = step.weights.state_dict()
    with torch.no_grad():
        for parameter, values in zip(("weight", "bias"), fitted, strict=True):
            if (key := f"{network.head_name}.{parameter}") in state:
                assign(state[key], values)
        step.weights.load_state_dict(state)
        if step.ema is not None:
            step.ema.load(step.weights.live())


def _some(labels: np.ndarray, seed: int) -> np.ndarray:
    """Positions of `_MOST_IMAGES` random images, one of each label first: a class without any gets no logits."""
    order = np.random.default_rng(seed).permutation(len(labels))
    _, firsts = np.unique(labels[order], return_index=True)
    return order[np.concatenate([firsts, np.setdiff1d(np.arange(len(labels)), firsts)])[:_MOST_IMAGES]]


def _quality(
    head: Head, features_ND: Tensor, labels_N: Tensor, held_out: tuple[Tensor, Tensor], outputs: int
) -> tuple[str, dict[str, float]]:
    """How good a head is, and nearest neighbours: in words and numbers."""
    (held_ND, held_N), k = held_out, min(_NEIGHBOURS, len(labels_N))
    votes = knn_votes(held_ND, features_ND, labels_N, classes=outputs, k=k, temperature=_TEMPERATURE)
    knn_top1, held_out_top1 = 100.0 * (voted_places(votes, held_N) < 1).double().mean().item(), 100.0 * head.accuracy
    accuracy = "too few to hold any out"
    if not math.isnan(held_out_top1):
        accuracy = f"{held_out_top1:.2f}% right in folds that were left out"
    text = f"{accuracy}; {k} nearest neighbours: val top-1 {knn_top1:.2f}%"
    return text, {"penalty": head.penalty, "held_out_top1": held_out_top1, "knn_top1": knn_top1}


def sigmoid_shift(logits_NK: Tensor) -> float:
    """What to take from all logits of a softmax, which it does not change, so that their sigmoids sum to 1 on average:
    the best for binary cross-entropy, where each image is of one class."""
    from scipy.optimize import brentq

    ends = float(logits_NK.min()), float(logits_NK.max()) + math.log(logits_NK.shape[1])
    shift: float = brentq(lambda by: float((logits_NK - by).sigmoid().sum(1).mean()) - 1.0, *ends)
    return shift


@dataclass(frozen=True)
class Head:
    """A linear classifier of features, float32; its penalty, of `PENALTIES` the one with the highest held-out accuracy;
    and that, as a fraction (NaN if there are too few images to hold any out)."""

    weight_KD: Tensor
    bias_K: Tensor
    penalty: float
    accuracy: float


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A context without the warnings of scikit-learn, which ask for nothing here: a nearly converged head is trained
    further, and classes with fewer images than folds are missing from some of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="sklearn")
        yield


@_without_warnings()
def fit_logistic(
    features_ND: Tensor,
    labels_N: Tensor,
    outputs: int,
    *,
    power: float = 1.0,
    bias: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Head:
    """Multinomial logistic regression with the penalty that is best on held-out images, on the CPU.

    A class counts as its number of images to this `power`, with 0 as all others. Classes may be without images; without
    a `bias`, `bias_K` is zeros. `check` is called before each fit; it may raise.
    """
    labels = labels_N.numpy()
    share_N = np.bincount(labels)[labels] ** (power - 1.0)
    share_N /= share_N.mean()
    mean_D = features_ND.mean(0) if bias else torch.zeros(features_ND.shape[1])
    centred_ND = features_ND - mean_D
    scale = float(centred_ND.std()) or 1.0
    rotated, back = _rotated((centred_ND / scale).double())
    right, loss = np.zeros(len(PENALTIES)), np.zeros(len(PENALTIES))
    parts = _parts(labels)
    for fitted, held_out in parts:
        for place, (weight, shift) in enumerate(
            _path(rotated[fitted], labels[fitted], share_N[fitted], outputs, bias=bias, check=check)
        ):
            logits = rotated[held_out] @ weight.T + shift
            logits -= logits.max(1, keepdims=True)
            own = logits[np.arange(len(held_out)), labels[held_out]]
            right[place] += share_N[held_out] @ (logits.argmax(1) == labels[held_out]) / len(labels)
            loss[place] += share_N[held_out] @ (np.log(np.exp(logits).sum(1)) - own)
    best = min(range(len(PENALTIES)), key=lambda place: (-right[place], loss[place]))
    *_, (weight, shift) = _path(rotated, labels, share_N, outputs, PENALTIES[: best + 1], bias=bias, check=check)
    weight_KD = (torch.from_numpy(weight) @ back / scale).float()
    # The share that was held out: all images in folds.
    tried = sum(share_N[held_out].sum() for _, held_out in parts) / len(labels)
    accuracy = float(right[best]) / tried if tried else math.nan
    return Head(weight_KD, torch.from_numpy(shift).float() - weight_KD @ mean_D, PENALTIES[best], accuracy)


def fit_each(
    features_ND: Tensor,
    true_NK: Tensor,
    *,
    power: float = 1.0,
    bias: bool = True,
    check: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """A logistic regression for each class, for images with several labels (1 where a class is true, else 0): float32
    weights (K, D) and biases (K,). See `fit_logistic`."""
    weight_KD = torch.zeros(true_NK.shape[1], features_ND.shape[1])
    bias_K = torch.where(true_NK.bool().all(0), -_ABSENT, _ABSENT)
    for k in torch.nonzero(true_NK.bool().any(0) & ~true_NK.bool().all(0))[:, 0].tolist():
        head = fit_logistic(features_ND, true_NK[:, k].long(), 2, power=power, bias=bias, check=check)
        weight_KD[k], bias_K[k] = head.weight_KD.diff(dim=0)[0], head.bias_K.diff()[0]
    return weight_KD, bias_K


def _rotated(features_ND: Tensor) -> tuple[np.ndarray, Tensor]:
    """The features in a basis of as many directions as there are images, if there are more features, and this basis:
    the penalty is the same in it, and the products are smaller."""
    if len(features_ND) >= features_ND.shape[1]:
        return features_ND.numpy(), torch.eye(features_ND.shape[1], dtype=torch.float64)
    left, singular, basis = torch.linalg.svd(features_ND, full_matrices=False)
    return (left * singular).numpy(), basis


def _parts(labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions to fit and to hold out, with equal shares of each class where it has enough images."""
    from sklearn.model_selection import StratifiedKFold

    folds = min(_FOLDS, len(labels))
    if np.bincount(labels).max() < folds:
        # Equal shares of no class.
        order = np.random.default_rng(0).permutation(len(labels))
        parts = [(np.setdiff1d(order, part), part) for part in np.array_split(order, folds)]
    else:
        parts = list(StratifiedKFold(folds, shuffle=True, random_state=0).split(labels, labels))
    parts = [(fitted, held_out) for fitted, held_out in parts if len(np.unique(labels[fitted])) > 1]
    return parts if len(labels) < _FOLDED_IMAGES else parts[:1]


def _path(
    features: np.ndarray,
    labels: np.ndarray,
    share_N: np.ndarray,
    outputs: int,
    penalties: tuple[float, ...] = PENALTIES,
    *,
    bias: bool,
    check: Callable[[], None],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields weights (K, D) and biases (K,) for each penalty, each found from the one before."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=200, tol=1e-3, warm_start=True, fit_intercept=bias)
    for penalty in penalties:
        check()
        model.C = 1.0 / (penalty * len(labels))
        model.fit(features, labels, share_N)
        weight, shift = np.zeros((outputs, features.shape[1])), np.full(outputs, _ABSENT if bias else 0.0)
        if len(model.classes_) == 2:
            # One row for both, the difference.
            weight[model.classes_] = np.concatenate([-model.coef_, model.coef_]) / 2
            shift[model.classes_] = np.concatenate([-model.intercept_, model.intercept_]) / 2
        else:
            weight[model.classes_], shift[model.classes_] = model.coef_, model.intercept_
        yield weight, shift
