"""What the configuration says of ranks, strategies and sources arrives where they are made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from pycls_fast import build
from pycls_fast.build import device as build_device
from pycls_fast.build import network as build_network
from pycls_fast.config import RunConfig, load_config
from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.base import Images
from pycls_fast.parallel import ALONE, StrategySettings, World
from tests.unit.test_build import REFERENCE, record, vit, world


def test_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def start(**settings: Any) -> AbstractContextManager[World]:
        calls.append(settings)
        return nullcontext(ALONE)

    monkeypatch.setattr(build_device, "start_world", start)
    degrees = ("parallel.shard_degree=3", "parallel.replicate_degree=5")
    own = ("runtime.device=cpu", "parallel.backend=gloo", "parallel.timeout_seconds=77")
    with build.world(vit("parallel=hsdp", *degrees, *own)) as ranks:
        assert ranks is ALONE
    assert calls == [
        {
            "device": "cpu", "backend": "gloo", "timeout_seconds": 77, "strategy": "hsdp", "shard_degree": 3,
            "replicate_degree": 5, "tensor_degree": 1,
        }
    ]  # fmt: skip


class TestStrategy:
    def wrapped(
        self, monkeypatch: pytest.MonkeyPatch, config: RunConfig, chosen: dict[str, str], ranks: int = 2
    ) -> dict[str, Any]:
        """The call of `wrap_model`, its settings without what is made for them: groups and optimizer."""
        calls = record(monkeypatch, "wrap_model", build_network)
        switches = REFERENCE.replace(**chosen)
        build.wrap(config, build.model(config, 10, switches, empty=True), world(size=ranks), switches)
        (call,) = calls
        assert call["settings"].groups
        return {
            **{name: call[name] for name in ("strategy", "compiled", "compile_mode")},
            "settings": replace(call["settings"], groups=(), make_optimizer=None),
        }

    def test_ddp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = vit(
            "parallel=ddp", "parallel.compression=powersgd", "parallel.powersgd_rank=3",
            "parallel.powersgd_start_step=7", "parallel.static_graph=true",
        )  # fmt: skip
        chosen = {"compile": "blocks", "compile_mode": "max-autotune"}
        assert self.wrapped(monkeypatch, config, chosen) == {
            "strategy": "ddp",
            "compiled": "blocks",
            "compile_mode": "max-autotune",
            "settings": StrategySettings(
                compression="powersgd", powersgd_rank=3, powersgd_start_step=7, static_graph=True
            ),
        }  # fmt: skip

    def test_sharded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = load_config(
            "resnet_digits",
            [
                "parallel=fsdp", "parallel.reshard_after_forward=false", "parallel.prefetch_units=3",
                "parallel.sync_batchnorm=true", "precision=fp16_master",
            ],
        )  # fmt: skip
        assert self.wrapped(monkeypatch, config, {"param_offload": "cpu"}) == {
            "strategy": "fsdp",
            "compiled": "off",
            "compile_mode": "default",
            "settings": StrategySettings(
                reshard_after_forward=False, prefetch_units=3, sync_batchnorm=True, compute=torch.float16,
                wide_norms=True, param_offload=True,
            ),
        }  # fmt: skip

    def test_nothing_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = self.wrapped(monkeypatch, vit(), {}, ranks=1)
        assert (alone["strategy"], alone["settings"]) == ("single", StrategySettings())


class Seen(Source, name="seen"):
    """A source of a user's own file."""

    opened: ClassVar[list[tuple[str, Opening]]] = []

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        self.opened.append((root, how))
        return {}


class TestSources:
    def opened(self, *overrides: str, **how: bool) -> tuple[str, Opening]:
        build.sources(vit("data=seen", "seed=4", *overrides), ALONE, **how)
        return Seen.opened.pop()

    def test_a_dataset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert self.opened("data.root=s3://somebody/birds") == ("s3://somebody/birds", Opening(seed=4, processes=4))
        assert self.opened("data.root=/birds", whole=True)[1].whole
        assert self.opened("data.root=/birds", index_all=True) == ("/birds", Opening(4, index_all=True, processes=4))
