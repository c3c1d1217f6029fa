"""Building a network reads every setting of its section."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from tests.unit.test_conflicts import EXPERIMENTS


def of_kind(kind: str) -> RunConfig:
    name, *overrides = EXPERIMENTS[kind]
    return load_config(name, overrides)


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_each_network_reads_its_settings(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_kind(kind)
    section, read = type(config.model), set()
    chosen = build.switches(config, torch.device("cpu"))

    def noting(settings: Any, key: str) -> Any:
        read.add(key)
        return object.__getattribute__(settings, key)

    monkeypatch.setattr(section, "__getattribute__", noting)
    build.model(config, 10, chosen, empty=kind != "timm")
    # The number of outputs is an argument.
    assert set(section.model_fields) - read <= {"kind", "num_classes"}
