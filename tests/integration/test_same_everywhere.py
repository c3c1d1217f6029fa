"""Nodes with different copies of the data, different commands or different disks: no rank trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.factories import class_folders
from tests.integration.runs import ROOT, TINY, run_process, under_torchrun

pytestmark = pytest.mark.slow

# Each rank in a folder of its own.
SCRIPT = """
import os, runpy, sys
os.chdir(["first", "second"][int(os.environ["RANK"])])
sys.argv = [{tool!r}, *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("second", "run_dir", "error"),
    [
        # As many images, but one of them in the other class.
        ({"a": 31, "b": 39}, "../run", "data.root: train: "),
        ({"a": 30, "b": 40}, "run", "run_dir: run on rank 1 "),
    ],
)
def test_ranks_that_differ_end_with_one_line(tmp_path: Path, second: dict[str, int], run_dir: str, error: str) -> None:
    class_folders(tmp_path / "first" / "images", a=30, b=40)
    class_folders(tmp_path / "second" / "images", **second)
    script = tmp_path / "tool.py"
    script.write_text(SCRIPT.format(tool=str(ROOT / "tools" / "train_net.py")))
    common = ("data=folder", *TINY, "data.global_batch_size=8", "data.num_workers=0", "schedule.max_steps=1")
    chosen = ("data.root=images", f"run_dir={run_dir}")
    done = run_process(under_torchrun([sys.executable, str(script), *common, *chosen], 2), cwd=tmp_path, expect=1)
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {error}")
    assert not list(tmp_path.glob("**/metrics.jsonl"))
