"""Nearest neighbours against scikit-learn's, heads that are fitted to features, what a sweep of rates says."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.neighbors import KNeighborsClassifier

import pycls_fast
from pycls_fast import build
from pycls_fast.data.sampling import EvalSampler
from pycls_fast.errors import UserError
from pycls_fast.optim.owned_weights import OwnedWeights
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.train.agreement import BUSY
from pycls_fast.train.evaluate import places
from pycls_fast.train.features import collect_features, knn_votes
from pycls_fast.train.head import PENALTIES, _some, fit_each, fit_head, fit_logistic, sigmoid_shift
from pycls_fast.train.signals import Stopped
from pycls_fast.train.tasks import lr_range
from pycls_fast.train.tasks.lr_range import LrRange, interpret, lr_range_test
from pycls_fast.train.tasks.score import score_neighbours
from tests.factories import config_of
from tests.unit.inference.conftest import VIT, make_run


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0), (200, 0.3)])
def test_equals_scikit_learn(k: int, temperature: float) -> None:
    generator = np.random.RandomState(k)
    labels = generator.randint(0, 6, 200)
    centres = generator.randn(6, 12)
    memory = (centres[labels] + 2 * generator.randn(200, 12)) * generator.uniform(0.1, 10, (200, 1))
    # More than one chunk.
    features = 2 * generator.randn(1500, 12)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(memory, labels)
    parts = list(knn_votes(
        torch.from_numpy(features), torch.from_numpy(memory), torch.from_numpy(labels),
        classes=6, k=k, temperature=temperature,
    ))  # fmt: skip
    # All votes at once would be (images, classes).
    assert [len(part) for part in parts] == [1024, 476]
    votes = torch.cat(parts)
    assert votes.dtype == torch.float64
    shares = votes.softmax(dim=1)
    np.testing.assert_allclose(shares.numpy(), reference.predict_proba(features), rtol=1e-9, atol=1e-12)
    assert (votes.argmax(dim=1).numpy() == reference.predict(features)).all()


@pytest.mark.parametrize("temperature", [0.07, 0.01, 0.005, 0.0001])
def test_single_precision_votes_as_double_does(temperature: float) -> None:
    """exp(1 / temperature) is beyond float32 from the second temperature on, and beyond float64 in the last."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (200,), generator=generator)
    memory = torch.randn(6, 12, generator=generator)[labels] + torch.randn(200, 12, generator=generator)
    features = memory[:50] + 0.5 * torch.randn(50, 12, generator=generator)
    single, double = (
        next(knn_votes(features.to(dtype), memory.to(dtype), labels, classes=6, k=40, temperature=temperature))
        for dtype in (torch.float32, torch.float64)
    )
    similarity = torch.nn.functional.cosine_similarity(features.double()[:, None], memory.double(), dim=2)
    nearest, index = similarity.topk(40, dim=1)
    for label in range(6):
        scores = (nearest / temperature).masked_fill(labels[index] != label, -torch.inf)
        torch.testing.assert_close(double[:, label], scores.logsumexp(dim=1))
    torch.testing.assert_close(single.double() * temperature, double * temperature, rtol=0.0, atol=1e-6)
    assert torch.equal(places(single, labels[:50]), places(double, labels[:50]))
    # Few of the classes without a neighbour, many with one whose vote is small beside the others'.
    assert 0.5 < single.isfinite().float().mean() < 1.0


@pytest.mark.slow
def test_scores_are_scikit_learns_on_the_features_of_a_run(tmp_path: Path, digits: Path) -> None:
    """Features that drop-path would change."""
    images = tmp_path / "images"
    for split, numbers in (("train", slice(0, 20)), ("val", slice(20, 40))):
        for folder in digits.iterdir():
            (images / split / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[numbers]:
                (images / split / folder.name / file.name).symlink_to(file)
    settings = [
        *VIT, "model.drop_path=0.5", "data=folder", f"data.root={images}", "data.num_workers=0",
        "runtime.device=cpu",
    ]  # fmt: skip
    run = make_run(tmp_path / "run", *settings, classes=list("0123456789"))
    classifier, labels = pycls_fast.load(run), np.repeat(np.arange(10), 20)
    memory, features = (classifier.features(images / split).double().numpy() for split in ("train", "val"))
    config = config_of(*settings, f"weights={run}")
    found = []
    for temperature in (0.01, 1.0):
        reference = KNeighborsClassifier(
            15, metric="cosine", algorithm="brute", weights=lambda distance, t=temperature: np.exp(-distance / t)
        ).fit(memory, labels)
        output = tmp_path / "knn.json"
        assert score_neighbours(config, k=15, temperature=temperature, split="val", output=str(output)) == 0
        record = json.loads(output.read_text())
        found.append(record["top1"])
        low, high = record["intervals"]["top1"]
        assert found[-1] - 8 < low < found[-1] < high < found[-1] + 8
        # One of the 200 images may be between two classes.
        assert found[-1] == pytest.approx(100 * (reference.predict(features) == labels).mean(), abs=0.6)
    assert abs(found[0] - found[1]) > 2


RATES = np.geomspace(1e-6, 10, 141).tolist()


def curve(rate: float) -> float:
    """Falls fastest per factor at 1e-3, is lowest at about 0.1, and back above its start a little later."""
    return 2.3 - 1.5 / (1 + (1e-3 / rate) ** 2) + 40 * rate**3


def test_finds_the_steepest_place_and_the_divergence() -> None:
    verdict = interpret(RATES, [curve(rate) for rate in RATES])
    assert verdict.suggested is not None
    assert verdict.lowest is not None
    assert verdict.diverges is not None
    # Smoothing lags by some steps, each a factor of 1.12.
    assert 1e-3 < verdict.suggested < 4e-3
    assert 0.03 < verdict.lowest < 0.3
    assert verdict.lowest < verdict.diverges < 1.0
    # A loss that never falls suggests nothing.
    verdict = interpret(RATES, [1 + rate for rate in RATES])
    assert verdict.suggested is None
    assert verdict.diverges is not None
    assert interpret(RATES[:1], [math.inf]).suggested is None


def test_scatter_alone_suggests_nothing() -> None:
    noise_RS = np.random.default_rng(0).normal(1.0, 0.1, (200, len(RATES)))
    # Falls by three times the scatter, as little as after a head that was fitted.
    falls_S = 0.3 / (1 + (1e-3 / np.array(RATES)) ** 2)
    alone, falling = ([interpret(RATES, list(each)) for each in losses] for losses in (noise_RS, noise_RS - falls_S))
    assert sum(each == LrRange(None, None, None) for each in alone) > 190
    assert sum(each.suggested is not None for each in falling) > 195
    assert interpret(RATES, [*noise_RS[0, :-1], math.nan]) == LrRange(None, None, RATES[-1])


def test_the_last_losses_do_not_flatten_the_picture_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **how: drawn.append(self) or Path(file).touch())
    losses = [curve(rate) for rate in RATES]
    lr_range._draw(tmp_path / "x.png", "x", interpret(RATES, losses), RATES, losses)
    assert max(losses) > 10_000
    assert drawn[0].axes[0].get_ylim()[1] < 4


@pytest.mark.slow
def test_the_rates_grow_with_the_batch_and_are_told_as_optim_lr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[dict[str, Any]] = []

    def note(step: Any, **changed: Any) -> Any:
        changes.append(changed)
        return dataclasses.replace(step, **changed)

    monkeypatch.setattr(lr_range, "replace", note)
    config = config_of(
        "data=synthetic", "data.image_size=16", "data.num_workers=0", "data.synthetic_train_images=24",
        "data.synthetic_classes=3", "data.global_batch_size=8", "optim.lr_batch_size=4", "runtime.progress=plain",
    )  # fmt: skip
    assert lr_range_test(config, steps=3, lr_min=1e-4, lr_max=1e-2, output=str(tmp_path)) == 0
    assert json.loads((tmp_path / "lr_find.json").read_text())["lr"] == pytest.approx([1e-4, 1e-3, 1e-2])
    assert (tmp_path / "lr_find.png").stat().st_size > 5000
    (changed,) = changes
    assert [changed["schedule"](number) for number in range(3)] == pytest.approx([2e-4, 2e-3, 2e-2])


@pytest.mark.slow
def test_rates_are_swept_from_a_head_that_is_fitted_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As training is: a random head bears higher ones."""
    before = ("data=synthetic", "data.image_size=16", "data.num_workers=0", "data.synthetic_classes=3",
              "data.synthetic_train_images=24", "data.global_batch_size=8", "runtime.progress=plain")  # fmt: skip
    assert train(config_of(*before, "schedule.max_steps=1", "trackers=[]", f"run_dir={tmp_path / 'run'}")) == 0
    own = (f"weights={tmp_path / 'run'}", "data.synthetic_classes=4", "augment.mix_probability=0")
    losses = {}
    for head in ("probe", "small"):
        file, config = tmp_path / head / "lr_find.json", config_of(*before, *own, f"head={head}")
        assert lr_range_test(config, steps=3, lr_min=1e-9, lr_max=1e-8, output=str(file.parent)) == 0
        losses[head] = json.loads(file.read_text())["loss"]
    assert capsys.readouterr().out.count("head: fitted to the features of 24 images") == 1
    # A new head of zeros has the same logit for each class.
    assert losses["small"] == pytest.approx(3 * [math.log(4)], rel=1e-3)
    assert losses["probe"][0] != pytest.approx(math.log(4), rel=0.1)


def clusters(counts: list[int], width: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres = torch.randn(len(counts), width, generator=torch.Generator().manual_seed(9))
    return centres[labels] + spread * torch.randn(len(labels), width, generator=generator) + 3.0, labels


@pytest.mark.parametrize(
    ("counts", "bias"), [([30, 30], True), ([20, 20, 20], False), ([40, 5, 5], True), ([300, 300, 500], True)]
)
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
    check = Mock()
    weight_KD, bias_K = fit_each(features, F.one_hot(labels), bias=bias, check=check)
    # Other ranks wait, and a signal may come.
    assert check.call_count > 10
    assert ((others @ weight_KD.T + bias_K).argmax(1) == other_labels).double().mean() > 0.95


@pytest.mark.parametrize(("counts", "power"), [([12, 9, 10], 1.0), ([24, 4, 9], 0.0), ([24, 4, 9], 0.5)])
def test_it_is_the_optimum_of_its_penalty(counts: list[int], power: float) -> None:
    """The gradient of the penalised loss is nearly zero, in float64. With fewer images than features: another basis."""
    features, labels = clusters(counts, 64, 2.0)
    head = fit_logistic(features, labels, 3, power=power)
    centred = (features - features.mean(0)).double()
    scale = centred.float().std().double()
    weight = (head.weight_KD.double() * scale).requires_grad_(True)
    bias = (head.bias_K.double() + head.weight_KD.double() @ features.mean(0).double()).requires_grad_(True)
    weight_K = torch.tensor(counts).double() ** (power - 1.0)
    loss = torch.nn.functional.cross_entropy((centred / scale) @ weight.T + bias, labels, weight_K)
    loss = loss + head.penalty / 2 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, (weight, bias)):
        assert gradient.abs().max() < 2e-3


def test_classes_without_images_are_never_predicted() -> None:
    features, labels = clusters([20, 20], 16, 0.5)
    head = fit_logistic(features, 2 * labels + 1, 5)
    assert set((features @ head.weight_KD.T + head.bias_K).argmax(1).tolist()) == {1, 3}


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [1, 1, 1], [1, 9], [1] * 21])
def test_hardly_any_images(counts: list[int]) -> None:
    features, labels = clusters(counts, 16, 0.1)
    head = fit_logistic(features, labels, len(counts))
    assert torch.isfinite(head.weight_KD).all()
    assert ((features @ head.weight_KD.T + head.bias_K).argmax(1) == labels).double().mean() >= 0.6


@pytest.mark.parametrize("power", [1.0, 0.0])
def test_a_head_for_images_with_several_labels(power: float) -> None:
    """Each class as scikit-learn fits it alone; classes of no image and of every one are told from the others."""
    features, labels = clusters([30, 30, 30], 16, 1.5)
    true_NK = torch.stack([labels == 0, labels != 1, labels < 0, labels >= 0], dim=1).float()
    weight_KD, bias_K = fit_each(features, true_NK, power=power)
    logits_NK = features @ weight_KD.T + bias_K
    assert ((logits_NK > 0) == true_NK.bool()).float().mean() > 0.97
    for k in (0, 1):
        alone = fit_logistic(features, true_NK[:, k].long(), 2, power=power)
        log_p_N2 = torch.log_softmax(features @ alone.weight_KD.T + alone.bias_K, dim=1)
        torch.testing.assert_close(
            torch.nn.functional.logsigmoid(logits_NK[:, k]), log_p_N2[:, 1], rtol=1e-3, atol=1e-4
        )
    assert (logits_NK[:, 2] == -20).all()
    assert (logits_NK[:, 3] == 20).all()


def test_the_logits_of_a_softmax_become_those_of_sigmoids() -> None:
    features, labels = clusters([30, 30, 30, 30], 16, 1.5)
    head, true_NK = fit_logistic(features, labels, 4), F.one_hot(labels).float()
    logits_NK = (features @ head.weight_KD.T + head.bias_K).double()
    losses = {
        by: float(F.binary_cross_entropy_with_logits(logits_NK - by, true_NK.double()))
        for by in (0.0, *(sigmoid_shift(logits_NK) + step for step in (-0.1, 0.0, 0.1)))
    }
    assert min(losses, key=losses.__getitem__) == sigmoid_shift(logits_NK)
    assert losses[0.0] > 1.4 * min(losses.values())


def test_weights_that_are_not_finite_are_one_line() -> None:
    config = config_of()
    network = build.model(config, 10, Speed())

    def logits(*_: object) -> Iterator[tuple[SimpleNamespace, None]]:
        network(torch.full((2, 3, 16, 16), torch.nan))
        yield SimpleNamespace(labels_B=torch.tensor([0, 1]), indices_B=torch.tensor([0, 1])), None

    source: Any = None
    scorer: Any = SimpleNamespace(world=ALONE, damaged=SimpleNamespace(need_images=lambda *_: None), logits=logits)
    with pytest.raises(UserError, match=r"^weights: features of some images are not finite"):
        collect_features(scorer, network, source, "train")


def test_features_have_the_order_of_the_images() -> None:
    """On any number of ranks: the folds in which a head's penalty is chosen are cut from it."""
    network = build.model(config_of(), 10, Speed()).eval()
    images, labels = torch.rand(7, 3, 16, 16), torch.arange(7) % 3
    parts: list[Any] = []

    class Rank(World):
        def gather(self, value: Any) -> list[Any]:
            parts.append(value)
            return parts

    def collected(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last rank gets, after the others have sent theirs."""
        parts.clear()
        for rank in range(size):
            sampler = EvalSampler(7, batch_size=4 // size, rank=rank, world_size=size)

            def logits(*_: object, sampler: EvalSampler = sampler) -> Iterator[tuple[SimpleNamespace, None]]:
                for keys in sampler:
                    indices_B = torch.tensor([index for _, index in keys])
                    network(images[indices_B])
                    yield SimpleNamespace(labels_B=labels[indices_B], indices_B=indices_B), None

            source: Any = None
            world, damaged = Rank(rank, size, torch.device("cpu")), SimpleNamespace(need_images=lambda *_: None)
            scorer: Any = SimpleNamespace(world=world, damaged=damaged, logits=logits)
            found = collect_features(scorer, network, source, "train")
        return found

    for ours, alone in zip(collected(2), collected(1), strict=True):
        torch.testing.assert_close(ours, alone)


def test_a_head_is_fitted_to_images_of_rare_classes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycls_fast.train.head._MOST_IMAGES", 12)
    labels = np.array([0] * 50 + [1, 2, 3] + [4] * 50)
    rows = _some(labels, 0)
    assert len(set(rows.tolist())) == 12
    assert set(labels[rows].tolist()) == {0, 1, 2, 3, 4}
    assert not np.array_equal(rows, _some(labels, 1))


def test_the_fit_can_be_stopped() -> None:
    """Not only before it: it may take minutes."""
    with pytest.raises(Stopped):
        fit_logistic(torch.eye(6), torch.arange(6) % 2, 2, check=Mock(side_effect=[None, None, Stopped]))


@dataclasses.dataclass(frozen=True)
class Wire(World):
    """Ranks one after the other: the next one gets what rank 0 has sent."""

    sent: list[Any] = dataclasses.field(default_factory=list)

    def from_main(self, value: Any) -> Any:
        if not self.is_main:
            return self.sent.pop(0)
        self.sent.append(value)
        return value


def test_other_ranks_hear_that_the_fit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend ends a wait that is longer than its timeout, and all fits together may be."""
    features = torch.eye(6), torch.arange(6) % 2
    monkeypatch.setattr("pycls_fast.train.head.collect_features", lambda *_: features)
    sent: list[Any] = []
    ends = []
    for rank in range(2):
        network = SimpleNamespace(head_name="head", last_layer=lambda: torch.nn.Linear(6, 2))
        weights = OwnedWeights(torch.nn.ModuleDict({"head": torch.nn.Linear(6, 2)}))
        step = SimpleNamespace(sets_LK=None, ema=None, weights=weights)
        world, sources = Wire(rank, 2, torch.device("cpu"), sent=sent), {"train": range(6), "val": range(6)}
        parts: Any = SimpleNamespace(step=step, network=network, sources=sources, config=config_of("loss=bce"))
        scorer: Any = SimpleNamespace(world=world)
        fit_head(parts, scorer, lambda: None, lambda *_, **__: None)
        assert sent.count(BUSY) >= len(PENALTIES) * (rank == 0)
        ends.append([tensor.clone() for tensor in weights.state_dict().values()])
    assert sent == []
    (weight_KD, bias_K), other = ends
    assert weight_KD.any()
    assert torch.equal(weight_KD, other[0])
    # With loss=bce each class has a sigmoid.
    assert (features[0] @ weight_KD.T + bias_K).sigmoid().sum(1).mean() == pytest.approx(1)
