"""Networks made with the help of others: soups of weights, temperature scaling, distillation."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import one_hot

import pycls_fast
from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.inference.export import export
from pycls_fast.parallel.world import ALONE
from pycls_fast.train.distill import Distillation, build_distillation
from pycls_fast.train.saved_weights import open_weights, write_weights
from pycls_fast.train.tasks import combine
from pycls_fast.train.tasks.combine import best_temperature, calibrate, greedy, likelihood_loss, soup
from pycls_fast.train.tasks.score import score
from tests.factories import load_run_config
from tests.integration.runs import TINY, command, records, run_process, under_torchrun


@pytest.fixture
def words(digits: Path) -> list[str]:
    return [*TINY, f"data.root={digits}", "data.num_workers=0", "runtime.device=cpu", "precision=fp32"]


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_temperature_has_the_lowest_loss(sigmoid: bool) -> None:
    torch.manual_seed(0)
    true_NK = torch.randn(4000, 5) * 2
    labels_N = torch.multinomial(true_NK.softmax(1), 1)[:, 0]
    scores_NK = 2.5 * true_NK
    targets = one_hot(labels_N) if sigmoid else labels_N
    hot = best_temperature(scores_NK, targets)
    near = [likelihood_loss(scores_NK, targets, hot * factor) for factor in (0.98, 1.0, 1.02)]
    assert near[1] < min(near[0], near[2])
    if not sigmoid:
        # That of the softmax which the labels were drawn from.
        assert hot == pytest.approx(2.5, rel=0.05)
        # The log-likelihood's derivative: scores are on average what the probabilities expect of them.
        expected_N = (scores_NK * (scores_NK / hot).softmax(1)).sum(1)
        assert expected_N.mean() == pytest.approx(float(scores_NK.gather(1, labels_N[:, None]).mean()), rel=1e-4)


@pytest.mark.parametrize("scores_NK", [torch.eye(4), -torch.eye(4), torch.full((4, 4), torch.nan)])
def test_scores_without_a_best_temperature_are_refused(scores_NK: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"^split: 4 images, which are half of it, have no best temperature"):
        best_temperature(scores_NK, torch.arange(4))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_the_written_weights_are_calibrated(
    loss: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = pycls_fast.train_net("vit_digits", [*words, f"loss={loss}"], optim__lr=0.002, run_dir=tmp_path / "run")
    config, file = load_run_config(run.run_dir, [f"weights={run.run_dir}"]), tmp_path / "calibrated.safetensors"
    capsys.readouterr()
    assert calibrate(config, str(file), split="val", overwrite=False) == 0
    printed = capsys.readouterr().out
    hot = float(printed.split("temperature")[1].split(",")[0])
    assert not 0.99 < hot < 1.01
    before, after = pycls_fast.load(run.run_dir, device="cpu"), pycls_fast.load(file, device="cpu")
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    logits_NK = before.logits(list(images))
    torch.testing.assert_close(after.logits(list(images)), logits_NK / hot, rtol=1e-3, atol=1e-3)
    changed = {name for name, value in load_file(file).items() if not value.equal(load_file(run.best)[name])}
    assert changed == {"head.weight", "head.bias"}
    # Other programs get the same numbers.
    export(str(file), str(tmp_path / "m.pt2"), format="program")
    program = torch.export.load(tmp_path / "m.pt2").module()
    exported_BK = program(torch.from_numpy(images[:2]).permute(0, 3, 1, 2).contiguous())
    torch.testing.assert_close(exported_BK, logits_NK[:2] / hot, rtol=1e-3, atol=1e-3)
    # What does harm to the other images is not used.
    monkeypatch.setattr(combine, "best_temperature", lambda *scores: 50.0)
    assert calibrate(config, str(file), split="val", overwrite=True) == 0
    assert "1, nothing changed: 50.0000, fitted to" in capsys.readouterr().out
    torch.testing.assert_close(pycls_fast.load(file, device="cpu").logits(list(images)), logits_NK)


def test_the_greedy_soup_keeps_what_does_not_harm() -> None:
    best, good, bad, copy = (SimpleNamespace(accuracy=value) for value in (80.0, 70.0, 60.0, 80.0))
    asked: list[list[Any]] = []

    def top1(chosen: Any) -> float:
        asked.append(list(chosen))
        # The bad one spoils every mean, the good one improves it.
        return 10.0 if bad in chosen and len(chosen) > 1 else max(x.accuracy for x in chosen) + len(chosen) - 1

    assert greedy([bad, good, best, copy], top1) == [best, copy, good]  # type: ignore[list-item]
    assert asked[4:] == [[best, copy], [best, copy, good], [best, copy, good, bad]]


@pytest.mark.slow
def test_the_mean_of_runs(words: list[str], digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        pycls_fast.train_net("vit_digits", words, seed=seed, optim__lr=0.002, run_dir=tmp_path / str(seed))
        for seed in (0, 1)
    )
    config, made = load_run_config(a.run_dir, [f"weights={a.run_dir}"]), tmp_path / "soup.safetensors"
    how: dict[str, Any] = {"split": "val", "which": "auto", "overwrite": True}
    soup(config, [str(b.best)], str(made), method="uniform", **how)
    for name, tensor in load_file(made).items():
        torch.testing.assert_close(tensor, (load_file(a.best)[name] + load_file(b.best)[name]) / 2)
    # Of networks that began elsewhere the mean is no network, and the greedy soup is the better one of the two.
    soup(config, [str(b.run_dir)], str(made), method="greedy", **how)
    better = max((a, b), key=lambda run: run.metrics["top1"])
    assert pycls_fast.load(made, device="cpu").predict(digits) == better.predict(digits)
    fold = pycls_fast.train_net("vit_digits", [*words, "data.split_seed=1"], run_dir=tmp_path / "fold")
    with pytest.raises(UserError, match=r"^others: .*fold.* has another random split than .* images of split=val"):
        soup(config, [str(fold.run_dir)], str(made), method="greedy", **how)
    capsys.readouterr()
    soup(config, [str(fold.run_dir)], str(made), method="uniform", **how)
    said = capsys.readouterr().out
    assert re.search(r"not scored: .*fold.* has another random split than .* images of split=val; use other", said)
    assert "top-1" not in said
    # Files say it as runs do, and a soup that it is of several splits.
    names = [open_weights(each).train_names for each in (a.best, a.run_dir, b.best, fold.best, made)]
    assert names[0] == names[1] == names[2]
    assert names[0] != names[3]
    assert names[4] == "several"
    assert score(load_run_config(a.run_dir, [f"weights={made}"]), "val", None) == 0
    assert "the random split is not the one that" in capsys.readouterr().out
    other = pycls_fast.train_net("vit_digits", [*words, "model.depth=1"], run_dir=tmp_path / "other")
    normalised, heads = tmp_path / "normalised.safetensors", tmp_path / "heads.safetensors"
    opened = open_weights(b.best)
    assert opened.config is not None
    data = {**opened.config["data"], "mean": [0.1, 0.2, 0.3]}
    write_weights(normalised, replace(opened, config={**opened.config, "data": data}), load_file(b.best))
    changed = {**opened.config, "model": {**opened.config["model"], "heads": 1}}
    write_weights(heads, replace(opened, config=changed), load_file(b.best))
    for each in (other.run_dir, normalised, heads):
        with pytest.raises(UserError, match=r"^others: .* has another model, classes or means than"):
            soup(config, [str(each)], str(made), method="uniform", **how)
    config = load_run_config(a.run_dir, [f"weights={a.run_dir}", "data.image_size=16"])
    with pytest.raises(UserError, match=r"^weights: .*: 1 tensors differ, the first is positions.value with shape"):
        soup(config, [str(b.run_dir)], str(made), method="uniform", **how)


@pytest.mark.parametrize("hard", [False, True])
def test_the_loss_is_that_of_the_papers(hard: bool) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    images, logits = torch.randn(7, 3, 2, 2).double(), torch.randn(7, 5).double().requires_grad_()
    factor, shift = torch.rand(2, 3, 1, 1).double()
    loss = Distillation(teacher, nullcontext, 0.3, 4.0, hard, factor, shift, 5)
    found = loss(torch.tensor(2.0).double(), logits, images)
    taught = teacher(images * factor + shift).detach()
    # Hinton et al. write cross-entropy with the soft targets: the same but for the teacher's entropy, a constant.
    soft = (taught / 4).softmax(1)
    entropy = -(soft * soft.log()).sum(1).mean()
    one_hot = F.one_hot(taught.argmax(1), 5).double()
    own = 16 * (F.cross_entropy(logits / 4, soft) - entropy) if not hard else F.cross_entropy(logits, one_hot)
    torch.testing.assert_close(found, 0.7 * 2.0 + 0.3 * own)
    (gradient,) = torch.autograd.grad(found, logits)
    (expected,) = torch.autograd.grad(0.3 * own, logits)
    torch.testing.assert_close(gradient, expected)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    # Spare outputs of either network change nothing.
    spare = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)).double()
    spare[1].load_state_dict({name: torch.cat([v, v[:3]]) for name, v in teacher[1].state_dict().items()})
    more = Distillation(spare, nullcontext, 0.3, 4.0, hard, factor, shift, 5)
    assert torch.equal(more(torch.tensor(2.0).double(), F.pad(logits, (0, 2), value=9.0), images), found)


def own_and_its_target(words: list[str], *its: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the teacher says of images in the normalisation of the configuration, and the same images in `its`."""
    config = load_config("vit_digits", words)
    switches = build.switches(config, ALONE.device)
    loss = build_distillation(config, build.sources(config, ALONE)["train"], ALONE, switches)
    pixels = torch.rand(4, 3, 8, 8)
    own, theirs = (
        (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        for mean, std in ((config.data.mean, config.data.std), its)
    )
    return loss.target(own), theirs


OTHER = ["data.mean=[0.4,0.5,0.6]", "data.std=[0.3,0.2,0.25]"]


@pytest.mark.slow
def test_a_run_with_a_teacher(words: list[str], tmp_path: Path) -> None:
    teacher = pycls_fast.train_net("vit_digits", words, run_dir=tmp_path / "teacher", optim__lr=0.002)
    # A network with the teacher's weights says the same about augmented and mixed images.
    words += ["augment.mixup_alpha=0.8", "optim.lr=1e-12", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    distill = {"teacher": teacher.run_dir, "share": 1.0}
    same = pycls_fast.train_net(
        "vit_digits", words, run_dir=tmp_path / "same", weights=teacher.run_dir, distill=distill
    )
    assert records(same.run_dir, "train")[0]["loss"] == pytest.approx(0.0, abs=1e-5)
    # Another network, which gets images of another normalisation.
    data = teacher.classifier.config.data
    given = [*words, *OTHER, "model.width=16", f"distill.teacher={teacher.run_dir}"]
    target, its = own_and_its_target(given, data.mean, data.std)
    torch.testing.assert_close(target, teacher.classifier.network(its), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"^distill.teacher: .*teacher does not take 9 px images \(image_size has to"):
        own_and_its_target([*given, "data.image_size=9", "model.patch_size=3"])
    with pytest.raises(UserError, match=r"^distill.teacher: .*nowhere is neither a weights file nor a run folder"):
        own_and_its_target([*given, f"distill.teacher={tmp_path / 'nowhere'}"])


@pytest.mark.slow
def test_a_distillation_token_learns_from_the_teacher(words: list[str], tmp_path: Path) -> None:
    """It alone, if the labels have no share: the class token's half of the head stays zero. Ranks do the same."""

    def run(name: str, *more: str, ranks: int = 1) -> list[dict[str, Any]]:
        training = command(*words, f"run_dir={name}", *more)
        run_process(under_torchrun(training, ranks) if ranks > 1 else training, cwd=tmp_path)
        return [*records(tmp_path / name, "train"), *records(tmp_path / name, "eval")]

    run("teacher", "optim.lr=0.002")
    taught = [
        *("distill.teacher=teacher", "distill.targets=hard", "distill.share=1.0", "model.distillation_token=true"),
        *("model.classifier=token", "optim=sgd", "optim.lr=0.05", "optim.weight_decay=0", "schedule.max_steps=6"),
        *("optim.accumulation_steps=2", "runtime.log_every_steps=1"),
    ]
    alone = run("alone", *taught)
    head = pycls_fast.load(tmp_path / "alone").network.head.weight
    own, its = head.chunk(2, dim=1)
    assert not own.any()
    assert its.any()
    for degree, strategy in (("pipeline", "ddp"), ("tensor", "fsdp")):
        together = run(degree, *taught, f"parallel={strategy}", f"parallel.{degree}_degree=2", ranks=2)
        for mine, theirs in zip(together, alone, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.slow
def test_a_teacher_of_timm(words: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("test_efficientnet", num_classes=10)
    # Else nearly all that a network of random weights says is its bias.
    nn.init.normal_(theirs.classifier.weight)
    file = tmp_path / "test_efficientnet.safetensors"
    save_file(theirs.state_dict(), file)
    about = theirs.default_cfg
    # A switch of the network that is trained, which this one does not have.
    words += ["speed.attention=reference", f"distill.teacher={file}"]
    target, its = own_and_its_target([*words, *OTHER], about["mean"], about["std"])
    with torch.no_grad():
        expected = theirs.eval()(its)
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
