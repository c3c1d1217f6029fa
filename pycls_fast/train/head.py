"""The head first: before any other layer is trained, a new head is fitted to the features that the weights give.

A random head distorts the features while it is learned (Kumar et al., Fine-Tuning can Distort Pretrained Features and
Underperform Out-of-Distribution, ICLR 2022, "LP-FT"). Here the head is the optimum of multinomial logistic regression,
found by L-BFGS (as the linear probes of Kornblith et al., Do Better ImageNet Models Transfer Better?, 2019); its
accuracy is that of step 0, the first that can be the best one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.optim.shards import assign
from pycls_fast.train.features import collect_features
from pycls_fast.train.run import Run
from pycls_fast.train.tasks.knn import neighbour_places

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


@dataclass(frozen=True)
class Head:
    """A linear classifier of features.

    Attributes:
        weight_KD, bias_K: float32.
        penalty: of `PENALTIES`, the one with the highest held-out accuracy.
        accuracy: that one, as a fraction.
    """

    weight_KD: Tensor
    bias_K: Tensor
    penalty: float
    accuracy: float


def fit_logistic(features_ND: Tensor, labels_N: Tensor, outputs: int) -> Head:
    """Multinomial logistic regression with the penalty that is best on held-out images.

    Args:
        features_ND: float32, on the CPU.
        labels_N: int64; classes may be without images.
    """
    labels = labels_N.numpy()
    mean_D = features_ND.mean(0)
    centred_ND = features_ND - mean_D
    scale = float(centred_ND.std()) or 1.0
    rotated, back = _rotated((centred_ND / scale).double())
    right, loss = np.zeros(len(PENALTIES)), np.zeros(len(PENALTIES))
    for fitted, held_out in _parts(labels):
        for place, (weight, bias) in enumerate(_path(rotated[fitted], labels[fitted], outputs)):
            logits = rotated[held_out] @ weight.T + bias
            logits -= logits.max(1, keepdims=True)
            own = logits[np.arange(len(held_out)), labels[held_out]]
            right[place] += (logits.argmax(1) == labels[held_out]).sum() / len(labels)
            loss[place] += (np.log(np.exp(logits).sum(1)) - own).sum()
    best = min(range(len(PENALTIES)), key=lambda place: (-right[place], loss[place]))
    *_, (weight, bias) = _path(rotated, labels, outputs, PENALTIES[: best + 1])
    weight_KD = (torch.from_numpy(weight) @ back / scale).float()
    # The share that was held out: all images in folds.
    tried = sum(len(held_out) for _, held_out in _parts(labels)) / len(labels)
    return Head(weight_KD, torch.from_numpy(bias).float() - weight_KD @ mean_D, PENALTIES[best], right[best] / tried)


def _rotated(features_ND: Tensor) -> tuple[np.ndarray, Tensor]:
    """The features in a basis of as many directions as there are images, if these are fewer; and the basis.

    The penalty is the same in it, and the products are smaller.
    """
    if len(features_ND) >= features_ND.shape[1]:
        return features_ND.numpy(), torch.eye(features_ND.shape[1], dtype=torch.float64)
    left, singular, basis = torch.linalg.svd(features_ND, full_matrices=False)
    return (left * singular).numpy(), basis


def _parts(labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions to fit and to hold out, with equal shares of each class where it has enough images."""
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(min(_FOLDS, len(labels)), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        # Classes with fewer images than folds are missing from some of them.
        warnings.simplefilter("ignore", UserWarning)
        try:
            parts = list(splitter.split(np.zeros(len(labels)), labels))
        except ValueError:
            # Every class has fewer images than there are folds.
            order = np.random.default_rng(0).permutation(len(labels))
            parts = [(np.setdiff1d(order, part), part) for part in np.array_split(order, min(_FOLDS, len(labels)))]
    parts = [(fitted, held_out) for fitted, held_out in parts if len(np.unique(labels[fitted])) > 1]
    return parts if len(labels) < _FOLDED_IMAGES else parts[:1]


def _path(
    features: np.ndarray, labels: np.ndarray, outputs: int, penalties: tuple[float, ...] = PENALTIES
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields weights (K, D) and biases (K,) for each penalty, each found from the one before."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=200, tol=1e-3, warm_start=True)
    for penalty in penalties:
        model.C = 1.0 / (penalty * len(labels))
        with warnings.catch_warnings():
            # A nearly converged head is trained further, or judged by what it gets right.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features, labels)
        weight, bias = np.zeros((outputs, features.shape[1])), np.full(outputs, _ABSENT)
        if len(model.classes_) == 2:
            # One row for both, the difference.
            weight[model.classes_] = np.concatenate([-model.coef_, model.coef_]) / 2
            bias[model.classes_] = np.concatenate([-model.intercept_, model.intercept_]) / 2
        else:
            weight[model.classes_], bias[model.classes_] = model.coef_, model.intercept_
        yield weight, bias


def fit_head(run: Run, after_batch: Callable[[], None]) -> None:
    """Fit the head to the training images' features and write it into the network; all ranks call this.

    Args:
        after_batch: called after each batch; may raise to stop.

    Raises:
        UserError: images cannot be read (`data.max_damaged`).
    """
    last = run.parts.network.last_layer()
    train, val = _some(run.parts.sources["train"], run.config.seed), run.parts.sources["val"]
    parts, place = run.parts, (run.world, run.parts.speed, run.display, after_batch)
    features_ND, labels_N = collect_features(run.config, parts.network, parts.step.wrapped, train, "train", *place)
    held_ND, held_N = collect_features(run.config, parts.network, parts.step.wrapped, val, "val", *place)
    head = None
    if run.world.is_main and len(labels_N.unique()) > 1:
        head = fit_logistic(features_ND, labels_N, last.out_features)
        outputs, k = last.out_features, min(_NEIGHBOURS, len(labels_N))
        place_N = neighbour_places(
            held_ND, held_N, features_ND, labels_N, classes=outputs, k=k, temperature=_TEMPERATURE
        )
        knn = 100.0 * (place_N < 1).double().mean().item()
        held_out = 100.0 * head.accuracy
        run.display.note(
            f"head: fitted to the features of {len(labels_N):,} images, {held_out:.2f}% of held-out ones right; "
            f"{_NEIGHBOURS} nearest neighbours: val top-1 {knn:.2f}%"
        )
        numbers = {"penalty": head.penalty, "held_out_top1": held_out, "knn_top1": knn, "images": len(labels_N)}
        run.folder.add_record("event", 0, 0.0, event="head fitted", **numbers)
    head = run.world.from_main(head)
    if head is None:
        return
    weights, name = run.parts.step.weights, run.parts.network.head_name
    state = weights.state_dict()
    with torch.no_grad():
        assign(state[f"{name}.weight"], head.weight_KD)
        assign(state[f"{name}.bias"], head.bias_K)
        weights.load_state_dict(state)
        if run.parts.step.ema is not None:
            run.parts.step.ema.load(weights.live())


def _some(source: Images, seed: int) -> Images:
    """The source, or a random part of a large one."""
    if len(source) <= _MOST_IMAGES:
        return source
    rows = np.sort(np.random.default_rng(seed).choice(len(source), _MOST_IMAGES, replace=False))
    return Subset(source, rows)
