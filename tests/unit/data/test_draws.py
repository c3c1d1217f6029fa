"""Seeded draws."""

from __future__ import annotations

import traceback

import pytest
import torch

from pycls_fast.data.draws import seed_generators


def test_a_seeded_step_draws_as_after_manual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(5)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("torch formats the Python stack"))
    seed_generators(7, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)
