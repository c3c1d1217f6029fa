"""The profile of a few steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.unit.train.test_loop import run


@pytest.mark.slow
def test_three_steps_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The memory of the first two is counted, in every operator.
    run(tmp_path, "runtime.profile_step=3", "speed=reference")
    out = capsys.readouterr().out
    assert "steps 3 to 5: operators by time on the CPU, ms per step" in out
    # Each of the two layers has a matrix product for query, key and value.
    assert "aten::addmm" in out
    with gzip.open(tmp_path / "profile" / "step_3.json.gz") as file:
        trace = json.load(file)
    updates = [event for event in trace["traceEvents"] if str(event.get("name")).startswith("Optimizer.step")]
    assert len(updates) == 3
