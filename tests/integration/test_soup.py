"""Soups of weights: the mean, and which of several weights the greedy one takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pycls_fast
from pycls_fast.errors import UserError
from pycls_fast.train.tasks.combine import greedy, soup
from tests.factories import load_run_config
from tests.integration.runs import TINY


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
