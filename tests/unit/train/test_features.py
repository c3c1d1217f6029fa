"""The head that is fitted to features."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pycls_fast import build
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import ALONE
from pycls_fast.speed import Speed
from pycls_fast.train.features import PENALTIES, collect_features, fit_each, fit_logistic
from pycls_fast.train.signals import Stopped
from tests.factories import config_of


def clusters(counts: list[int], width: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres = torch.randn(len(counts), width, generator=torch.Generator().manual_seed(9))
    return centres[labels] + spread * torch.randn(len(labels), width, generator=generator) + 3.0, labels


@pytest.mark.parametrize("counts", [[30, 30], [20, 20, 20], [40, 5, 5], [300, 300, 500]])
@pytest.mark.parametrize("bias", [True, False])
def test_it_classifies_what_it_has_not_seen(counts: list[int], bias: bool) -> None:
    """One without a bias is fitted as it will be used: the bias of another one is not left out."""
    features, labels = clusters(counts, 64, 0.7)
    head = fit_logistic(features, labels, len(counts), bias=bias)
    others, other_labels = clusters(counts, 64, 0.7, seed=1)
    right = ((others @ head.weight_KD.T + head.bias_K).argmax(1) == other_labels).double().mean()
    assert right > 0.95
    assert head.accuracy == pytest.approx(float(right), abs=0.06)
    assert head.penalty in PENALTIES
    assert head.bias_K.any() == bias
    weight_KD, bias_K = fit_each(features, F.one_hot(labels), bias=bias)
    assert ((others @ weight_KD.T + bias_K).argmax(1) == other_labels).double().mean() > 0.95


def test_it_is_the_optimum_of_its_penalty() -> None:
    """The gradient of the penalised loss is nearly zero, in float64. With fewer images than features: another basis."""
    features, labels = clusters([12, 9, 10], 64, 2.0)
    head = fit_logistic(features, labels, 3)
    centred = (features - features.mean(0)).double()
    scale = centred.float().std().double()
    weight = (head.weight_KD.double() * scale).requires_grad_(True)
    bias = (head.bias_K.double() + head.weight_KD.double() @ features.mean(0).double()).requires_grad_(True)
    loss = torch.nn.functional.cross_entropy((centred / scale) @ weight.T + bias, labels)
    loss = loss + head.penalty / 2 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, (weight, bias)):
        assert gradient.abs().max() < 2e-3


def test_classes_without_images_are_never_predicted() -> None:
    features, labels = clusters([20, 20], 16, 0.5)
    head = fit_logistic(features, 2 * labels + 1, 5)
    assert set((features @ head.weight_KD.T + head.bias_K).argmax(1).tolist()) == {1, 3}


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [1, 1, 1], [1, 9]])
def test_hardly_any_images(counts: list[int]) -> None:
    features, labels = clusters(counts, 16, 0.1)
    head = fit_logistic(features, labels, len(counts))
    assert torch.isfinite(head.weight_KD).all()
    assert ((features @ head.weight_KD.T + head.bias_K).argmax(1) == labels).double().mean() >= 0.6


def test_a_head_for_images_with_several_labels() -> None:
    """Each class as scikit-learn fits it alone; classes of no image and of every one are told from the others."""
    features, labels = clusters([30, 30, 30], 16, 1.5)
    true_NK = torch.stack([labels == 0, labels != 1, labels < 0, labels >= 0], dim=1).float()
    weight_KD, bias_K = fit_each(features, true_NK)
    logits_NK = features @ weight_KD.T + bias_K
    assert ((logits_NK > 0) == true_NK.bool()).float().mean() > 0.97
    for k in (0, 1):
        alone = fit_logistic(features, true_NK[:, k].long(), 2)
        log_p_N2 = torch.log_softmax(features @ alone.weight_KD.T + alone.bias_K, dim=1)
        torch.testing.assert_close(
            torch.nn.functional.logsigmoid(logits_NK[:, k]), log_p_N2[:, 1], rtol=1e-3, atol=1e-4
        )
    assert (logits_NK[:, 2] == -20).all()
    assert (logits_NK[:, 3] == 20).all()


def test_weights_that_are_not_finite_are_one_line() -> None:
    config = config_of()
    network = build.model(config, 10, Speed())

    def logits(*_: object) -> Iterator[tuple[SimpleNamespace, None]]:
        network(torch.full((2, 3, 16, 16), torch.nan))
        yield SimpleNamespace(labels_B=torch.tensor([0, 1])), None

    source: Any = None
    scorer: Any = SimpleNamespace(world=ALONE, damaged=SimpleNamespace(report=lambda: None), logits=logits)
    with pytest.raises(UserError, match=r"^weights: features of some images are not finite"):
        collect_features(scorer, network, source, "train")


def test_the_fit_can_be_stopped() -> None:
    """Not only before it: it may take minutes."""
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        fit_logistic(torch.eye(6), torch.arange(6) % 2, 2, check=check)
