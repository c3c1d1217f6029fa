"""Nodes with different copies of the data, different commands or different disks: no rank trains."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.integration.runs import ROOT, TINY, run_process, under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import os, runpy, sys
sys.argv = [{tool!r}, *sys.argv[1:], *{own!r}[int(os.environ["RANK"])]]
runpy.run_path({tool!r}, run_name="__main__")
"""


def write_images(root: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")


def test_ranks_with_other_labels_end_with_one_line(tmp_path: Path) -> None:
    """As many images, but one of them in the other class."""
    write_images(tmp_path / "first", {"a": 30, "b": 40})
    write_images(tmp_path / "second", {"a": 31, "b": 39})
    own = [[f"data.root={tmp_path / name}"] for name in ("first", "second")]
    script = tmp_path / "tool.py"
    script.write_text(SCRIPT.format(tool=str(ROOT / "tools" / "train_net.py"), own=own))
    common = ("data=folder", *TINY, "data.global_batch_size=8", "data.num_workers=0", "schedule.max_steps=1")
    command = under_torchrun([sys.executable, str(script), *common, f"run_dir={tmp_path / 'run'}"], 2)
    done = run_process(command, cwd=tmp_path, expect=1)
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: data.root: checksum of the train labels: ")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


FOLDERS = """
import os, runpy, sys
os.chdir({folders!r}[int(os.environ["RANK"])])
sys.argv = [{tool!r}, *sys.argv[1:]]
runpy.run_path({tool!r}, run_name="__main__")
"""


def test_ranks_that_do_not_share_the_run_folder_end_with_one_line(tmp_path: Path, digits: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    script = tmp_path / "tool.py"
    script.write_text(FOLDERS.format(tool=str(ROOT / "tools" / "train_net.py"), folders=list(map(str, folders))))
    common = ("--config-name", "vit_digits", *TINY, f"data.root={digits}", "data.num_workers=0", "schedule.max_steps=2")
    command = under_torchrun([sys.executable, str(script), *common, "run_dir=run"], 2)
    done = run_process(command, cwd=tmp_path, expect=1)
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: run_dir: run on rank 1 ")
    assert not any((folder / "run" / "metrics.jsonl").exists() for folder in folders)
