"""A node is gone: torchrun's agents that are left meet again, and fewer ranks go on with the same epoch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, command, environment
from tests.integration.test_failures import OVERRIDES, STEPS, assert_every_image_once, seen, wait_for_step
from tests.started import Started

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


def agent(started: Started, folder: Path, port: int, *training: str, is_host: bool) -> subprocess.Popen[str]:
    """A torchrun of one rank, as on a node of its own: `--nnodes 1:2`; the host keeps the meeting place."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1",
        "--max-restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "elastic",
        "--rdzv_conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,"
        f"is_host={str(is_host).lower()}",
    ]  # fmt: skip
    return started(
        [*launcher, str(ROOT / "tests" / "integration" / "faulty_train.py"), *training],
        cwd=folder,
        env={**environment(), "SEEN": str(folder / "seen"), "FAULT": json.dumps({"pause": 0.3})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def test_a_node_is_gone_and_the_other_goes_on(tmp_path: Path, digits: Path, started: Started) -> None:
    (tmp_path / "seen").mkdir()
    run_dir = tmp_path / "run"
    overrides = (*OVERRIDES, f"data.root={digits}", f"run_dir={run_dir}", "runtime.checkpoint_every_steps=1")
    training = command(*overrides)[2:]
    port = free_port()
    first, second = (agent(started, tmp_path, port, *training, is_host=is_host) for is_host in (True, False))
    wait_for_step(tmp_path, 6, first)
    # The node with its agent and its rank, at once.
    for pid in (*children(second.pid), second.pid):
        os.kill(pid, signal.SIGKILL)
    out, _ = first.communicate()
    assert first.returncode == 0, out
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, STEPS + 1))
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 1
    assert "resumed from" in out
    # What two ranks began one rank has done again, from the newest checkpoint on.
    resumed = int(out.rsplit("resumed from", 1)[1].split("at step ")[1].split(",")[0])
    for file in (tmp_path / "seen").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        alone = file.name.startswith("0.") and len(lines) == STEPS - resumed and lines[0]["step"] == resumed
        kept = lines if alone else [line for line in lines if line["step"] < resumed]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    assert_every_image_once(seen(tmp_path))


def test_a_rank_is_gone_and_both_nodes_start_again(tmp_path: Path, digits: Path, started: Started) -> None:
    """Only one of the agents counts this as a failure of its own; the ranks meet nevertheless."""
    (tmp_path / "seen").mkdir()
    overrides = (*OVERRIDES, f"data.root={digits}", f"run_dir={tmp_path / 'run'}", "runtime.checkpoint_every_steps=1")
    training, port = command(*overrides)[2:], free_port()
    first, second = (agent(started, tmp_path, port, *training, is_host=is_host) for is_host in (True, False))
    wait_for_step(tmp_path, 6, first)
    (rank,) = children(second.pid)
    os.kill(rank, signal.SIGKILL)
    out, _ = first.communicate()
    assert first.returncode == 0, out
    assert "resumed from" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
