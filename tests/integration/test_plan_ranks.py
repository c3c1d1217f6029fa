"""What the plan says of divided models, against four ranks that exchange."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.plan.cluster import cluster
from pycls_fast.plan.search import Search
from tests.integration.plan_worker import CLASSES, LAYOUTS, configured
from tests.integration.runs import run_process, under_torchrun

# Norms of gradients and losses; what routers' losses send.
SMALL = {"all_reduce": 100, "send": 16}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    worker = [sys.executable, str(Path(__file__).with_name("plan_worker.py")), str(folder)]
    run_process(under_torchrun(worker, 4), cwd=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fullest_rank_holds_what_the_plan_says(ranks: list[dict[str, dict[str, Any]]], layout: str) -> None:
    planned, held, counted = (max(rank[layout][key] for rank in ranks) for key in ("planned", "held", "counted"))
    assert planned == pytest.approx(held, rel=0.1)
    # What a run says itself.
    assert planned == pytest.approx(counted, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_exchange_what_the_plan_says(ranks: list[dict[str, dict[str, Any]]], layout: str) -> None:
    """To the byte, except what is small."""
    chosen = LAYOUTS[layout]
    planned, counted = (
        Search(configured(chosen), cluster("h100x4"), CLASSES).exchanged_bytes(chosen),
        ranks[0][layout]["exchanged"],
    )
    for kind in planned.keys() | counted.keys():
        assert planned.get(kind, 0) == pytest.approx(counted.get(kind, 0), abs=SMALL.get(kind, 0)), kind
