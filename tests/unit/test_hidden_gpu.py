"""Tests and figures of a CPU are those of a CPU on a machine with a GPU, too."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import is_about_cuda
from tests.integration.runs import environment


def test_neither_a_test_nor_its_processes_see_a_gpu(request: pytest.FixtureRequest) -> None:
    if is_about_cuda(request.config.option.markexpr):
        pytest.skip("with tests of a GPU")
    assert not torch.cuda.is_available()
    assert environment()["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("markers", ["not slow and not cuda", "slow", "not slow", ""])
def test_it_is_hidden(markers: str) -> None:
    assert not is_about_cuda(markers)


@pytest.mark.parametrize("markers", ["cuda", "cuda and not slow", "cuda or slow", "slow or cuda"])
def test_it_is_seen(markers: str) -> None:
    assert is_about_cuda(markers)
