"""The limit of `data.shard_cache` against the shards that are read at the same time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pycls_fast import build
from pycls_fast.build.sources import check_shard_cache
from pycls_fast.config import load_config
from pycls_fast.data import SyntheticSource
from pycls_fast.errors import UserError
from pycls_fast.parallel import ALONE
from pycls_fast.train.building import build_parts
from pycls_fast.train.display import Display
from tests.unit.test_build import world

REMOTE = ("data.source=tar", "data.root=s3://bucket", "data.shard_cache=/shards")


class Shards(SyntheticSource):
    """Remote shards of 1 GiB."""

    prefers_blocks = True

    def __init__(self, count: int) -> None:
        super().__init__(1_000 * count, 8, 2, 0)
        self.block_ends = torch.arange(1, count + 1).mul(1_000).numpy()
        self.copied_shards = SimpleNamespace(sizes=[2**30] * count)


def check(count: int, limit: float, *overrides: str, ranks: int = 1) -> None:
    config = load_config("vit_digits", [*REMOTE, f"data.shard_cache_gib={limit}", *overrides])
    check_shard_cache(config, Shards(count), world(size=ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "ranks", "overrides", "needed"),
    [
        (200, 1, ["data.global_batch_size=64"], 64),
        (200, 1, ["data.global_batch_size=96"], 32),
        (5, 1, ["data.global_batch_size=64"], 5),
        # Nodes of two ranks.
        (200, 2, ["data.global_batch_size=64"], 64),
        (200, 8, ["data.global_batch_size=64"], 16),
        (200, 8, ["data.global_batch_size=192", "augment.repeats=3"], 48),
        (200, 4, ["data.global_batch_size=192", "augment.repeats=3"], 64),
    ],
)
def test_a_limit_below_what_is_read_at_once(
    count: int, ranks: int, overrides: list[str], needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 2)))
    check(count, needed, *overrides, ranks=ranks)
    with pytest.raises(UserError) as caught:
        check(count, needed - 0.5, *overrides, ranks=ranks)
    (line,) = caught.value.lines
    assert line.startswith(
        f"data.shard_cache_gib: {needed - 0.5:g} is less than the {needed} GiB of the {needed} shards that a node reads"
    )
    # A full shuffle is the user's own choice.
    check(count, needed - 0.5, *overrides, "data.shuffle=full", ranks=ranks)


def test_training_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(build, "sources", lambda config, world: dict.fromkeys(("train", "val"), Shards(5)))
    keys = [*REMOTE, "data.shard_cache_gib=1", "data.num_workers=0", "data.global_batch_size=64"]
    with pytest.raises(UserError, match=r"^data.shard_cache_gib"):
        build_parts(load_config("vit_digits", keys), ALONE, Display(speaks=False, mode="plain"))
