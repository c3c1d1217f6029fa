"""Features, which are what a network's last linear layer gets; what their neighbours say; a head fitted to them.

Neighbours: Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4; k
and temperature as Caron et al., Emerging Properties in Self-Supervised Vision Transformers (DINO), 2021, `eval_knn.py`.

The head first: before any other layer is trained, a new head is fitted to the features that the weights give. A random
head distorts them while it is learned (Kumar et al., Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution, ICLR 2022, "LP-FT"). Here it is the optimum of multinomial logistic regression, found by L-BFGS (as
the linear probes of Kornblith et al., Do Better ImageNet Models Transfer Better?, 2019); its accuracy is that of step
0, the first that can be the best one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.optim.weights import assign
from pycls_fast.train.agreement import on_main
from pycls_fast.train.evaluate import Scorer, places
from pycls_fast.train.run import Run

# Images whose votes are counted at a time.
_CHUNK = 1024
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


@contextmanager
def head_inputs(network: Network) -> Iterator[list[Tensor]]:
    """A list that receives the last layer's input of each forward pass in the context, float32 (B, D), on the CPU."""
    seen: list[Tensor] = []
    handle = network.last_layer().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def collect_features(scorer: Scorer, network: Network, source: Images, split: str) -> tuple[Tensor, Tensor]:
    """The head's input for every readable image, float32 (N, D) on the CPU, and the labels; the same on all ranks,
    which call this. A `UserError` if no image can be read, too many are damaged, or the head gets several vectors of
    one."""
    world = scorer.world
    features: list[Tensor] = []
    labels: list[Tensor] = []
    with head_inputs(network) as seen:
        for batch, _ in scorer.logits(source, f"features of {split}"):
            features.append(seen[-1])
            labels.append(batch.labels_B.cpu())
            seen.clear()
    scorer.damaged.report()
    # Gathered in host memory, which is larger.
    mine = (torch.cat(features), torch.cat(labels)) if features and world.counts else None
    found = [part for part in world.gather(mine) if part is not None]
    if not found:
        raise UserError(f"split: {split} has no image that can be read")
    features_ND, labels_N = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    if not features_ND.isfinite().all():
        raise UserError("weights: features of some images are not finite; take other weights, or head=small")
    if features_ND.ndim != 2:
        raise UserError(
            f"model: the last layer, {network.head_name}, gets {tuple(features_ND.shape[1:])} numbers of an image, not "
            "one vector, so there are no features; train with head=small"
        )
    return features_ND, labels_N


def knn_votes(
    features_ND: Tensor, memory_MD: Tensor, labels_M: Tensor, *, classes: int, k: int, temperature: float
) -> Iterator[Tensor]:
    """Yields the logarithm of each class's votes, (B, K), for 1,024 images at a time: those of all may not fit.

    They have the features' format, and are minus infinity for a class without a neighbour. The `k` labelled images (at
    most M) with the highest cosine similarity `s` vote with `exp(s / temperature)`.
    """
    memory_DM = F.normalize(memory_MD, dim=1).T
    for part_BD in F.normalize(features_ND, dim=1).split(_CHUNK):
        nearest_Bk, index_Bk = (part_BD @ memory_DM).topk(k, dim=1)
        scores_Bk, labels_Bk = nearest_Bk / temperature, labels_M[index_Bk]
        # Relative to the class's nearest neighbour: exp(s / temperature) overflows float32 below temperature 0.0113.
        peak_BK = part_BD.new_full((len(part_BD), classes), -torch.inf)
        peak_BK.scatter_reduce_(1, labels_Bk, scores_Bk, "amax")
        rest_Bk = (scores_Bk - peak_BK.gather(1, labels_Bk)).exp()
        yield peak_BK + torch.zeros_like(peak_BK).scatter_add_(1, labels_Bk, rest_Bk).log()


def voted_places(votes: Iterable[Tensor], labels_N: Tensor) -> Tensor:
    """The `places` of all images by their `knn_votes`, (N,)."""
    return torch.cat([places(part_BK, part_B) for part_BK, part_B in zip(votes, labels_N.split(_CHUNK), strict=True)])


@dataclass(frozen=True)
class Head:
    """A linear classifier of features, float32; its penalty, of `PENALTIES` the one with the highest held-out accuracy;
    and that, as a fraction (NaN if there are too few images to hold any out)."""

    weight_KD: Tensor
    bias_K: Tensor
    penalty: float
    accuracy: float


def fit_logistic(
    features_ND: Tensor,
    labels_N: Tensor,
    outputs: int,
    *,
    bias: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Head:
    """Multinomial logistic regression with the penalty that is best on held-out images, on the CPU.

    Classes may be without images; without a `bias`, `bias_K` is zeros. `check` is called before each fit; it may raise.
    """
    labels = labels_N.numpy()
    mean_D = features_ND.mean(0) if bias else torch.zeros(features_ND.shape[1])
    centred_ND = features_ND - mean_D
    scale = float(centred_ND.std()) or 1.0
    rotated, back = _rotated((centred_ND / scale).double())
    right, loss = np.zeros(len(PENALTIES)), np.zeros(len(PENALTIES))
    parts = _parts(labels)
    for fitted, held_out in parts:
        for place, (weight, shift) in enumerate(
            _path(rotated[fitted], labels[fitted], outputs, bias=bias, check=check)
        ):
            logits = rotated[held_out] @ weight.T + shift
            logits -= logits.max(1, keepdims=True)
            own = logits[np.arange(len(held_out)), labels[held_out]]
            right[place] += (logits.argmax(1) == labels[held_out]).sum() / len(labels)
            loss[place] += (np.log(np.exp(logits).sum(1)) - own).sum()
    best = min(range(len(PENALTIES)), key=lambda place: (-right[place], loss[place]))
    *_, (weight, shift) = _path(rotated, labels, outputs, PENALTIES[: best + 1], bias=bias, check=check)
    weight_KD = (torch.from_numpy(weight) @ back / scale).float()
    # The share that was held out: all images in folds.
    tried = sum(len(held_out) for _, held_out in parts) / len(labels)
    accuracy = float(right[best]) / tried if tried else math.nan
    return Head(weight_KD, torch.from_numpy(shift).float() - weight_KD @ mean_D, PENALTIES[best], accuracy)


def fit_each(
    features_ND: Tensor, true_NK: Tensor, *, bias: bool = True, check: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """A logistic regression for each class, for images with several labels (1 where a class is true, else 0): float32
    weights (K, D) and biases (K,). See `fit_logistic`."""
    weight_KD = torch.zeros(true_NK.shape[1], features_ND.shape[1])
    bias_K = torch.where(true_NK.bool().all(0), -_ABSENT, _ABSENT)
    for k in torch.nonzero(true_NK.bool().any(0) & ~true_NK.bool().all(0))[:, 0].tolist():
        head = fit_logistic(features_ND, true_NK[:, k].long(), 2, bias=bias, check=check)
        weight_KD[k], bias_K[k] = head.weight_KD.diff(dim=0)[0], head.bias_K.diff()[0]
    return weight_KD, bias_K


def _rotated(features_ND: Tensor) -> tuple[np.ndarray, Tensor]:
    """The features in a basis (the second) of as many directions as there are images, if these are fewer: the penalty
    is the same in it, and the products are smaller."""
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
    features: np.ndarray,
    labels: np.ndarray,
    outputs: int,
    penalties: tuple[float, ...] = PENALTIES,
    *,
    bias: bool,
    check: Callable[[], None],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields weights (K, D) and biases (K,) for each penalty, each found from the one before."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=200, tol=1e-3, warm_start=True, fit_intercept=bias)
    for penalty in penalties:
        check()
        model.C = 1.0 / (penalty * len(labels))
        with warnings.catch_warnings():
            # A nearly converged head is trained further, or judged by what it gets right.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(features, labels)
        weight, shift = np.zeros((outputs, features.shape[1])), np.full(outputs, _ABSENT if bias else 0.0)
        if len(model.classes_) == 2:
            # One row for both, the difference.
            weight[model.classes_] = np.concatenate([-model.coef_, model.coef_]) / 2
            shift[model.classes_] = np.concatenate([-model.intercept_, model.intercept_]) / 2
        else:
            weight[model.classes_], shift[model.classes_] = model.coef_, model.intercept_
        yield weight, shift


def fit_head(run: Run, after_batch: Callable[[], None], check: Callable[[], None]) -> None:
    """Fit the head to the training images' features and write it into the network; all ranks call this.

    `after_batch` is called after each batch on every rank, `check` by the main rank alone while it fits; both may
    raise.
    """
    parts, train = run.parts, run.parts.sources["train"]
    if len(train) > _MOST_IMAGES:
        rows = np.random.default_rng(run.config.seed).choice(len(train), _MOST_IMAGES, replace=False)
        train = Subset(train, np.sort(rows))
    scorer, layer = run.scorer(after_batch), parts.network.last_layer()
    outputs, bias = layer.out_features, layer.bias is not None
    features_ND, labels_N = collect_features(scorer, parts.network, train, "train")
    sets_LK = parts.step.sets_LK
    if sets_LK is None:
        held_ND, held_N = collect_features(scorer, parts.network, parts.sources["val"], "val")

    def fit() -> tuple[Tensor, Tensor] | None:
        if sets_LK is None and len(labels_N.unique()) == 1:
            return None
        numbers: dict[str, float] = {"images": len(labels_N)}
        if sets_LK is not None:
            fitted = fit_each(features_ND, sets_LK.cpu()[labels_N], bias=bias, check=check)
            told = "class by class"
        else:
            head = fit_logistic(features_ND, labels_N, outputs, bias=bias, check=check)
            fitted, k = (head.weight_KD, head.bias_K), min(_NEIGHBOURS, len(labels_N))
            votes = knn_votes(held_ND, features_ND, labels_N, classes=outputs, k=k, temperature=_TEMPERATURE)
            knn = 100.0 * (voted_places(votes, held_N) < 1).double().mean().item()
            numbers |= {"penalty": head.penalty, "held_out_top1": 100.0 * head.accuracy, "knn_top1": knn}
            right = f"{100.0 * head.accuracy:.2f}% of held-out ones right"
            told = "too few to hold any out" if math.isnan(head.accuracy) else right
            told = f"{told}; {k} nearest neighbours: val top-1 {knn:.2f}%"
        run.display.note(f"head: fitted to the features of {len(labels_N):,} images, {told}")
        run.folder.add_record("event", 0, 0.0, event="head fitted", **numbers)
        return fitted

    fitted = on_main(run.world, fit)
    if fitted is None:
        return
    weights, name = parts.step.weights, parts.network.head_name
    state = weights.state_dict()
    with torch.no_grad():
        for parameter, values in zip(("weight", "bias"), fitted, strict=True):
            if (key := f"{name}.{parameter}") in state:
                assign(state[key], values)
        weights.load_state_dict(state)
        if parts.step.ema is not None:
            parts.step.ema.load(weights.live())
