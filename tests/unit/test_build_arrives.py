"""Building a network reads every setting of its section, and every switch that applies to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.speed import CATALOGUE, SwitchName
from tests.unit.test_conflicts import EXPERIMENTS


class Reads(dict[SwitchName, str]):
    """Resolved switches, with those that have been read."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.read: set[SwitchName] = set()

    def __getitem__(self, key: SwitchName) -> str:
        self.read.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[SwitchName]:
        raise AssertionError("all of them are copied")


def of_kind(kind: str) -> RunConfig:
    name, *overrides = EXPERIMENTS[kind]
    return load_config(name, overrides)


def switches_read(kind: str) -> set[SwitchName]:
    config = of_kind(kind)
    chosen = Reads(build.switches(config, torch.device("cpu")))
    build.model(config, 10, chosen, empty=kind != "timm")
    return chosen.read


def test_each_network_reads_the_switches_that_apply_to_it() -> None:
    read = {kind: switches_read(kind) for kind in EXPERIMENTS}
    of_networks = set().union(*read.values())
    for kind, found in read.items():
        assert found == {switch.name for switch in CATALOGUE if kind in switch.applies_to} & of_networks, kind


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
