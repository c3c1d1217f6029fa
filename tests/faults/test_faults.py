"""A short slice of each family; `make faults` takes half an hour for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_falls_short(tmp_path: Path) -> None:
    """In a process without pytest's threads and handlers, since it forks."""
    command = [sys.executable, "-m", "tests.faults", "--seed", "0", "--minutes", "1.5"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 short" in done.stdout
