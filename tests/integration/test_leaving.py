"""Ranks that leave with an error while others wait for them: what they print, and that they end.

gloo's groups are destroyed at once. NCCL's wait for ranks that are in a collective, as this stand-in does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.runs import run_process, under_torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import time
import torch.distributed as dist
from pycls_fast.config import Verb, command_line
from pycls_fast.errors import UserError

destroy = dist.destroy_process_group
def destroy_like_nccl():
    print("destroyed", flush=True)
    time.sleep({wait})
    destroy()
dist.destroy_process_group = destroy_like_nccl

class Own(Verb):
    def __call__(self, config):
        from pycls_fast import build
        with build.world(config) as world:
            world.barrier()
            if world.rank >= {first}:
                raise {error}
            world.barrier()
        return 0

command_line(Own)
"""


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        ('ValueError("broken")', ("ValueError: broken", "(rank 1 of 2)")),
        ('UserError("the disk: full")', ("error: rank 1: the disk: full",)),
    ],
)
def test_a_rank_that_leaves_with_an_error_prints_it_and_ends(
    tmp_path: Path, error: str, lines: tuple[str, ...]
) -> None:
    script = tmp_path / "tool.py"
    script.write_text(SCRIPT.format(wait=300, first=1, error=error))
    done = run_process(under_torchrun([sys.executable, str(script)], 2), cwd=tmp_path, expect=1)
    printed = done.stderr.splitlines()
    for line in lines:
        assert printed.count(line) == 1, done.stderr
    assert "destroyed" not in done.stdout


def test_ranks_that_leave_together_destroy_their_group(tmp_path: Path) -> None:
    """Although the nodes' agents count restarts differently."""
    script = tmp_path / "tool.py"
    count = 'import os\nos.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]\n'
    script.write_text(count + SCRIPT.format(wait=0, first=0, error='UserError("the disk: full")'))
    done = run_process(under_torchrun([sys.executable, str(script)], 2), cwd=tmp_path, expect=1)
    assert done.stdout.count("destroyed") == 2
    assert done.stderr.count("the disk: full") == 1
