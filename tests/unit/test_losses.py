"""Losses on label pairs against dense targets, in float64; losses that weigh images by their class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from timm.loss import AsymmetricLossMultiLabel, SoftTargetCrossEntropy
from timm.loss import BinaryCrossEntropy as TimmBinaryCrossEntropy
from torch import Tensor

from pycls_fast import build
from pycls_fast.losses import (
    AsymmetricLoss,
    BinaryCrossEntropy,
    ClassWeighted,
    CrossEntropy,
    FusedLoss,
    LossFunction,
    Targets,
    balanced_weights,
)
from pycls_fast.speed import Speed
from tests.factories import config_of

BATCH, CLASSES = 9, 6
Share = float | Tensor | None
MIXES: list[Share] = [None, 0.0, 0.3, 1.0, torch.tensor(0.6, dtype=torch.float64)]


def logits(scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(BATCH, CLASSES, generator=generator, dtype=torch.float64)


def targets(lam: Share) -> Targets:
    labels_B = torch.tensor([0, 5, 2, 2, 1, 4, 3, 0, 5])
    if lam is None:
        return Targets(labels_B)
    # Some images are mixed with one of their own class.
    mixed_B = labels_B.roll(1)
    assert 0 < int((labels_B == mixed_B).sum()) < BATCH
    return Targets(labels_B, mixed_B, lam)


def dense(given: Targets, smoothing: float) -> Tensor:
    """(1 - s) t + s / K, row by row."""
    rows = torch.zeros(BATCH, CLASSES, dtype=torch.float64)
    for row in range(BATCH):
        rows[row, given.labels_B[row]] += given.lam
        if given.mixed_B is not None:
            rows[row, given.mixed_B[row]] += 1 - given.lam
    return (1 - smoothing) * rows + smoothing / CLASSES


def value_and_gradient(loss: Callable[[Tensor], Tensor], logits_BK: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits_BK.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def assert_same(ours: LossFunction, given: Targets, theirs: Callable[[Tensor], Tensor]) -> None:
    for logits_BK in (logits(), logits(200.0)):
        value, gradient = value_and_gradient(lambda x: ours(x, given), logits_BK)
        expected, expected_gradient = value_and_gradient(theirs, logits_BK)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


by_mix = pytest.mark.parametrize("lam", MIXES)


@by_mix
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_dense_targets(smoothing: float, lam: Share) -> None:
    given = targets(lam)
    probabilities_BK = dense(given, smoothing)
    ours = CrossEntropy(smoothing)
    assert_same(ours, given, lambda x: F.cross_entropy(x, probabilities_BK))
    assert_same(ours, given, lambda x: SoftTargetCrossEntropy()(x, probabilities_BK))


@by_mix
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_binary_cross_entropy_is_that_of_dense_targets(reduction: str, smoothing: float, lam: Share) -> None:
    given = targets(lam)
    target_BK = dense(given, smoothing)
    ours = BinaryCrossEntropy(smoothing, reduction)
    torch.testing.assert_close(ours.dense(given, logits()), target_BK, rtol=1e-15, atol=1e-15)

    def by_hand(x: Tensor) -> Tensor:
        loss_BK = -target_BK * F.logsigmoid(x) - (1 - target_BK) * F.logsigmoid(-x)
        return loss_BK.sum() / (BATCH * CLASSES if reduction == "mean" else BATCH)

    assert_same(ours, given, by_hand)
    timm = TimmBinaryCrossEntropy(smoothing=0.0, sum_classes=reduction == "sum")
    assert_same(ours, given, lambda x: timm(x, target_BK))


@by_mix
@pytest.mark.parametrize(("smoothing", "threshold"), [(0.0, 0.0), (0.1, 0.2)])
def test_binary_cross_entropy_with_a_threshold_is_timms(smoothing: float, threshold: float, lam: Share) -> None:
    given = targets(lam)
    target_BK = dense(given, smoothing)
    timm = TimmBinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)
    ours = BinaryCrossEntropy(smoothing, threshold=threshold)
    assert_same(ours, given, lambda x: timm(x, target_BK))
    fused = FusedLoss(ours, backend="eager")
    assert torch.equal(fused(logits(), given), ours(logits(), given))


@pytest.mark.parametrize("loss", [CrossEntropy(0.1), BinaryCrossEntropy(0.1), BinaryCrossEntropy(0.1, "sum")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lam", [None, 0.3])
def test_half_precision_logits_are_computed_in_float32(loss: LossFunction, dtype: torch.dtype, lam: Share) -> None:
    half_BK = logits(20.0).to(dtype)
    given = targets(lam)
    value, gradient = value_and_gradient(lambda x: loss(x, given), half_BK)
    expected, expected_gradient = value_and_gradient(lambda x: loss(x, given), half_BK.float())
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, expected_gradient.to(dtype))
    # Not the half-precision value: exp and sum in 8 bits of mantissa are visibly another number.
    exact = loss(half_BK.double(), given)
    assert abs(value.item() - exact.item()) <= 1e-6 * abs(exact.item())
    assert loss(half_BK.double(), given).dtype == torch.float64


def squared(logits_BK: Tensor, targets: Targets) -> Tensor:
    """One of the user's own, of which those of the two labels do not mix into that of their mixture."""
    one_hot_KK = torch.eye(CLASSES, dtype=logits_BK.dtype)
    target_BK = targets.lam * one_hot_KK[targets.labels_B]
    if targets.mixed_B is not None:
        target_BK = target_BK + (1.0 - targets.lam) * one_hot_KK[targets.mixed_B]
    return (logits_BK - target_BK).square().mean()


class TestFused:
    """The compiled loss; with a backend that runs the captured operators as they are, and with the compiler."""

    PLAIN = (CrossEntropy(), CrossEntropy(0.1), BinaryCrossEntropy(0.1), BinaryCrossEntropy(0.0, "sum"))

    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("plain", [*PLAIN, squared], ids=lambda plain: getattr(plain, "__name__", str(plain)))
    def test_the_same_values_and_gradients_in_float64(self, plain: LossFunction) -> None:
        fused = FusedLoss(plain, backend="aot_eager")
        for lam in MIXES:
            assert_same(fused, targets(lam), lambda x, lam=lam: plain(x, targets(lam)))  # type: ignore[misc]

    def test_a_new_share_compiles_nothing(self) -> None:
        calls = []

        def backend(graph: Any, inputs: Any) -> Any:
            calls.append(graph)
            return graph.forward

        fused = FusedLoss(CrossEntropy(0.1), backend=backend)
        for lam in (None, 0.2, 0.7, torch.tensor(0.4), None, 0.9):
            fused(logits(), targets(lam))
        assert len(calls) == 2
        fused = FusedLoss(BinaryCrossEntropy(threshold=0.2), backend=backend)
        for lam in (0.2, 0.7, torch.tensor(0.4, dtype=torch.float64), 0.9):
            fused(logits(), targets(lam))
        assert len(calls) == 3

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("plain", PLAIN, ids=str)
    def test_compiled_it_errs_as_rounding_does(self, plain: LossFunction, dtype: torch.dtype) -> None:
        fused = FusedLoss(plain)
        given = targets(0.3)
        rounded_BK = logits().to(dtype)
        exact = value_and_gradient(lambda x: plain(x, given), rounded_BK.double())
        reference = value_and_gradient(lambda x: plain(x, given), rounded_BK)
        found = value_and_gradient(lambda x: fused(x, given), rounded_BK)
        assert found[0].dtype == torch.float32
        assert found[1].dtype == dtype
        for right, own, new in zip(exact, reference, found, strict=True):
            allowed = 4 * (own.double() - right).norm() + 4 * torch.finfo(torch.float32).eps * right.norm()
            assert (new.double() - right).norm() <= allowed


def test_weights_are_those_of_scikit_learn() -> None:
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert balanced_weights(torch.bincount(labels)).tolist() == pytest.approx(expected.tolist())
    with_none = balanced_weights(torch.tensor([5, 0, 2, 1]))
    assert with_none.tolist() == pytest.approx([expected[0], 1.0, expected[1], expected[2]])


@by_mix
@pytest.mark.parametrize("plain", [CrossEntropy(0.1), BinaryCrossEntropy(0.1), BinaryCrossEntropy(0.1, "sum")])
def test_every_image_counts_as_its_classes_weigh(plain: CrossEntropy | BinaryCrossEntropy, lam: Share) -> None:
    """A mixed image by both; the mean is that of the images, whatever is in a batch."""
    weights_K = torch.tensor([0.5, 2.0, 3.0, 10.0, 1.0, 100.0], dtype=torch.float64)
    given = targets(lam)

    def by_hand(labels_B: Tensor) -> Tensor:
        rows = zip(logits(), labels_B, strict=True)
        return torch.stack([weights_K[label] * plain(row[None], Targets(label[None])) for row, label in rows]).mean()

    expected = by_hand(given.labels_B)
    if given.mixed_B is not None:
        expected = given.lam * expected + (1 - given.lam) * by_hand(given.mixed_B)
    torch.testing.assert_close(ClassWeighted(plain, weights_K)(logits(), given), expected)


def test_the_configuration_weighs() -> None:
    train: Any = SimpleNamespace(class_counts=lambda: np.array([5, 2, 1]), label_sets=None)
    made = build.loss(config_of("loss.class_weights=auto"), Speed(), torch.device("cpu"), 5, train)
    assert isinstance(made, ClassWeighted)
    assert made.plain == CrossEntropy(0.1)
    assert made.weights_K.tolist() == pytest.approx([8 / 15, 8 / 6, 8 / 3, 1.0, 1.0])


SETS_BK = (torch.arange(BATCH * CLASSES) % 7 % 3 == 0).double().reshape(BATCH, CLASSES)


@pytest.mark.parametrize(("positive", "negative", "margin"), [(0.0, 4.0, 0.05), (1.0, 4.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_asymmetric_loss_is_timms(positive: float, negative: float, margin: float) -> None:
    own = AsymmetricLoss(gamma_positive=positive, gamma_negative=negative, margin=margin)
    theirs = AsymmetricLossMultiLabel(negative, positive, margin)
    loss, gradient = value_and_gradient(lambda x: own(x, Targets(SETS_BK)), logits())
    # timm computes in float32.
    expected, its_gradient = value_and_gradient(lambda x: theirs(x, SETS_BK), logits())
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own.each(logits(), SETS_BK).mean(), loss)


class _Several:
    """Eight images; the classes of how many each is."""

    label_sets = np.ones((1, 4), dtype=bool)

    def __len__(self) -> int:
        return 8

    def class_counts(self) -> np.ndarray:
        return np.array([4, 1, 8, 0])


@pytest.mark.parametrize(("name", "kind"), [("bce", BinaryCrossEntropy), ("asymmetric", AsymmetricLoss)])
def test_present_classes_weigh_where_images_have_several_labels(name: str, kind: type[BinaryCrossEntropy]) -> None:
    train: Any = _Several()
    own = ["data.label_separator=;", "data.source=manifest", "loss.class_weights=auto", "loss.label_smoothing=0"]
    made = build.loss(config_of(f"loss={name}", *own), Speed(), torch.device("cpu"), CLASSES, train)
    assert isinstance(made, kind)
    assert made.positive_K is not None
    # A class of all images, and one of none.
    assert made.positive_K.tolist() == pytest.approx([1.0, 7.0, 0.01, 8.0, 1.0, 1.0])
    weights_K = made.positive_K.double()
    plain = made if name == "bce" else AsymmetricLoss(0.0, "mean", None, made.positive_K, 0.0, 0.0, 0.0)
    loss, gradient = value_and_gradient(lambda x: plain(x, Targets(SETS_BK)), logits())
    expected, its_gradient = value_and_gradient(
        lambda x: F.binary_cross_entropy_with_logits(x, SETS_BK, pos_weight=weights_K), logits()
    )
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-7, atol=1e-9)
    mixed = Targets(SETS_BK, SETS_BK.roll(1, 0), 0.3)
    torch.testing.assert_close(FusedLoss(plain, backend="eager")(logits(), mixed), plain(logits(), mixed))


def test_the_asymmetric_loss_has_finite_gradients() -> None:
    logits_BK = torch.tensor([[-200.0, 200.0, 0.0, -200.0, 200.0]]).requires_grad_()
    for power in (0.0, 0.5, 1.0, 4.0):
        loss = AsymmetricLoss(gamma_positive=power, gamma_negative=power, margin=0.0)
        value = loss(logits_BK, Targets(torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]])))
        assert value.isfinite()
        assert torch.autograd.grad(value, logits_BK)[0].isfinite().all()


@pytest.mark.parametrize("plain", [BinaryCrossEntropy(), BinaryCrossEntropy(0.1, "sum"), AsymmetricLoss(0.1)])
@by_mix
def test_several_labels_are_mixed_as_their_targets(plain: BinaryCrossEntropy, lam: Share) -> None:
    one = plain(logits(), Targets(F.one_hot(targets(None).labels_B, CLASSES).double()))
    torch.testing.assert_close(one, plain(logits(), targets(None)))
    if lam is None:
        return
    mixed = plain(logits(), Targets(SETS_BK, SETS_BK.roll(1, 0), lam))
    dense_BK = lam * SETS_BK + (1 - lam) * SETS_BK.roll(1, 0)
    torch.testing.assert_close(mixed, plain(logits(), Targets(dense_BK)))
    torch.testing.assert_close(
        FusedLoss(plain, backend="eager")(logits(), Targets(SETS_BK, SETS_BK.roll(1, 0), lam)), mixed
    )
