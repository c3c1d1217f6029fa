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


@pytest.mark.parametrize(
    ("markers", "seen"),
    [("not slow and not cuda", False), ("", False), ("cuda and not slow", True), ("slow or cuda", True)],
)
def test_it_is_hidden(markers: str, seen: bool) -> None:
    assert is_about_cuda(markers) == seen
