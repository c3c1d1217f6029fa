"""Soups of weights and temperature scaling: the mean, the best temperature, and the files that have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import one_hot

import pycls_fast
from pycls_fast.errors import UserError
from pycls_fast.inference.export import export
from pycls_fast.train.tasks.combine import best_temperature, calibrate, greedy, likelihood_loss, soup
from tests.factories import load_run_config
from tests.integration.runs import TINY


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
    loss: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"data.root={digits}", "data.num_workers=0", "runtime.device=cpu", "precision=fp32", f"loss={loss}"]
    run = pycls_fast.train_net("vit_digits", words, optim__lr=0.002, run_dir=tmp_path / "run")
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
def test_the_mean_of_runs(digits: Path, tmp_path: Path) -> None:
    words = [*TINY, f"data.root={digits}", "data.num_workers=0", "runtime.device=cpu"]
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
    other = pycls_fast.train_net("vit_digits", [*words, "model.depth=1"], run_dir=tmp_path / "other")
    with pytest.raises(UserError, match=r"^others: .* has other tensors or classes than"):
        soup(config, [str(other.run_dir)], str(made), method="uniform", **how)
