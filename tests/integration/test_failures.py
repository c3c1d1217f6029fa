"""A rank dies or hangs: torchrun starts all of them again, and the run ends as if nothing had happened. A node is gone:
the agents that are left meet again, and fewer ranks go on with the same epoch.

What every step was given is compared with the order of the data: each image once an epoch, whoever died when.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.data.sampling import epoch_order
from pycls_fast.files import checkpoints, step_of
from pycls_fast.train import checkpoint
from tests.factories import assert_same_bits
from tests.integration.runs import (
    ROOT,
    TINY,
    assert_same_records,
    command,
    environment,
    newest_checkpoint,
    records,
    wait_for_step,
)
from tests.processes import Started

pytestmark = pytest.mark.slow

STEPS, BATCH, IMAGES = 44, 64, 1438
OVERRIDES = (*TINY, "optim.ema_decay=0.9", "data.num_workers=0", "runtime.checkpoint_every_steps=4")


class Launch:
    """torchrun around faulty_train.py, in a folder of its own: `seen/` for the records, `runs/` as by default."""

    def __init__(
        self, started: Started, folder: Path, digits: Path, *overrides: str,
        ranks: int = 2, restarts: int = 3, launcher: Sequence[str] = ("--standalone",), **fault: Any,
    ) -> None:  # fmt: skip
        self.folder = folder
        (folder / "seen").mkdir(parents=True, exist_ok=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc_per_node", str(ranks)]
        tool = str(ROOT / "tests" / "integration" / "faulty_train.py")
        training = [tool, *command(*OVERRIDES, f"data.root={digits}", *overrides)[2:]]
        self.process = started(
            [*torchrun, "--max-restarts", str(restarts), *training],
            cwd=folder,
            env={**environment(), "SEEN": str(folder / "seen"), "FAULT": json.dumps(fault)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self, expect: int = 0) -> str:
        """Wait for the end; what was printed."""
        out, _ = self.process.communicate()
        assert self.process.returncode == expect, out
        return out

    @property
    def run_dir(self) -> Path:
        """The one run folder."""
        (found,) = (self.folder / "runs" / "vit_digits").iterdir()
        return found


def seen(folder: Path) -> dict[int, list[int]]:
    """Images by step, as the last process that computed the step was given them, from all ranks."""
    latest: dict[tuple[int, str], tuple[float, list[int]]] = {}
    for file in sorted((folder / "seen").glob("*.jsonl")):
        rank = file.name.partition(".")[0]
        for record in map(json.loads, file.read_text().splitlines()):
            key = (record["step"], rank)
            latest[key] = max(latest.get(key, (0.0, [])), (record["time"], record["indices"]))
    steps: dict[int, list[int]] = {}
    for (step, _), (_, indices) in sorted(latest.items()):
        steps.setdefault(step, []).extend(indices)
    return steps


def assert_every_image_once(steps: dict[int, list[int]]) -> None:
    per_epoch = IMAGES // BATCH
    assert sorted(steps) == list(range(STEPS))
    for epoch in range(STEPS // per_epoch):
        order = epoch_order(0, epoch, IMAGES)
        for place in range(per_epoch):
            expected = sorted(order[place * BATCH : (place + 1) * BATCH].tolist())
            assert sorted(steps[epoch * per_epoch + place]) == expected
        images = [index for place in range(per_epoch) for index in steps[epoch * per_epoch + place]]
        assert len(set(images)) == len(images) == per_epoch * BATCH


def assert_whole(launch: Launch) -> None:
    """One run folder, with every step, evaluation and image once."""
    assert_every_image_once(seen(launch.folder))
    assert [record["step"] for record in records(launch.run_dir, "train")] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records(launch.run_dir, "eval") if r["weights"] == "ema"] == [22, 44]
    # Whatever was killed when, what has a name is whole.
    for path in checkpoints(launch.run_dir / "checkpoints"):
        assert checkpoint.open_checkpoint(path).plain["step"] == step_of(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Launch]:
    """Two ranks from beginning to end."""
    launch = Launch(processes := Started(), tmp_path_factory.mktemp("undisturbed"), digits)
    launch.end()
    assert_whole(launch)
    yield launch
    processes.end()


def assert_same_end(launch: Launch, reference: Launch) -> None:
    ours, theirs = newest_checkpoint(launch.run_dir), newest_checkpoint(reference.run_dir)
    for part in ("model", "ema", "optimizer"):
        assert_same_bits(ours[part], theirs[part])
    assert_same_records(launch.run_dir, reference.run_dir)


@pytest.mark.parametrize("at", ["step", "before write_data", "in state.json", "after _publish"])
def test_rank_0_killed(tmp_path: Path, digits: Path, started: Started, undisturbed: Launch, at: str) -> None:
    """In a step, and in a save; no run_dir is given, and the run finds its folder again."""
    launch = Launch(started, tmp_path, digits, kind="die", at=at, step=12, rank=0)
    out = launch.end()
    assert (tmp_path / "seen" / "fault.happened").exists()
    # At step 12 exactly when the name was given before the kill. A kill in the step itself does not wait for the save
    # of step 8, which goes on beside the steps.
    published = {"after _publish": "12", "step": "[48]"}.get(at, "8")
    assert re.search(rf"at step {published}, epoch", out), out
    assert_whole(launch)
    assert_same_end(launch, undisturbed)


def test_one_of_eight_ranks_that_divide_a_model_killed(tmp_path: Path, digits: Path, started: Started) -> None:
    """Pipeline 2 x tensor 2 x shard 2: all start again, and no bit is another."""
    keys = ("parallel=fsdp", "parallel.tensor_degree=2", "parallel.pipeline_degree=2", "optim.accumulation_steps=2")
    reference = Launch(started, tmp_path / "reference", digits, *keys, ranks=8)
    reference.end()
    launch = Launch(started, tmp_path / "killed", digits, *keys, ranks=8, kind="die", at="step", step=12, rank=5)
    assert re.search(r"at step [48], epoch", launch.end())
    assert [record["step"] for record in records(launch.run_dir, "train")] == list(range(1, STEPS + 1))
    assert_same_end(launch, reference)


def test_a_hang_names_the_ranks_and_is_started_again(
    tmp_path: Path, digits: Path, started: Started, undisturbed: Launch
) -> None:
    launch = Launch(started, tmp_path, digits, "parallel.timeout_seconds=3", kind="hang", at="step", step=6, rank=1)
    out = launch.end()
    lines = [line for line in out.splitlines() if line.startswith("error:")]
    assert "ranks have waited for others for 3 s; where each is:" in lines[0]
    assert "rank 0: for" in lines[1]
    assert "computing step 6" in lines[1]
    assert "waiting for other ranks" in lines[1]
    assert "computing step 6, in act (tests/integration/faulty_train.py" in lines[2]
    assert_whole(launch)
    assert_same_end(launch, undisturbed)


def test_one_write_that_fails_is_repeated(tmp_path: Path, digits: Path, started: Started) -> None:
    """Rank 1 cannot write the checkpoint of step 8; it or a later step is saved instead, and the run continues."""
    launch = Launch(started, tmp_path, digits, kind="full", at="before write_data", step=8, rank=1, restarts=0)
    out = " ".join(launch.end().split())
    found = re.findall(r"could not be written \(No space left on device\).*?; saving step (\d+) instead", out)
    assert len(found) == 1
    saved = [record["step"] for record in records(launch.run_dir, "checkpoint")]
    assert saved[:2] == [4, int(found[0])]
    assert 8 < saved[1] <= 12
    assert saved[-1] == STEPS
    assert_whole(launch)


def test_a_full_disk_ends_all_ranks_with_one_line(tmp_path: Path, digits: Path, started: Started) -> None:
    """Rank 1 finds the disk full while a thread writes, and again; the last whole checkpoint stays."""
    launch = Launch(started, tmp_path, digits, kind="full", at="before write_data", step=8, rank=1, times=2, restarts=0)
    out = launch.end(expect=1)
    assert out.count("error: ") == 1
    (error,) = (line for line in out.splitlines() if line.startswith("error: "))
    assert re.search(r"step_0000000(09|1\d): the checkpoint could not be written \(No space left on device\)", error)
    assert sorted(path.name for path in (launch.run_dir / "checkpoints").iterdir()) == ["step_000000004"]


def test_stopped_on_two_ranks_goes_on_with_one(tmp_path: Path, digits: Path, started: Started) -> None:
    """In the middle of an epoch: the same epoch goes on, every image once."""
    run_dir = tmp_path / "run"
    first = Launch(started, tmp_path, digits, f"run_dir={run_dir}")
    wait_for_step(first.process, run_dir, 10)
    first.process.send_signal(signal.SIGTERM)
    first.process.communicate()
    stopped = newest_checkpoint(run_dir)["step"]
    assert 8 <= stopped < STEPS
    for file in (tmp_path / "seen").glob("*.jsonl"):
        # What came after the checkpoint is done again, by others.
        kept = [line for line in file.read_text().splitlines() if json.loads(line)["step"] < stopped]
        file.write_text("".join(f"{line}\n" for line in kept))
    Launch(started, tmp_path, digits, f"run_dir={run_dir}", ranks=1).end()
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 1
    assert_every_image_once(seen(tmp_path))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


def two_nodes(started: Started, folder: Path, digits: Path) -> list[subprocess.Popen[str]]:
    """Two torchruns of one rank, as on nodes of their own: `--nnodes 1:2`; the first keeps the meeting place. Both have
    done some steps."""
    own, port, agents = (f"run_dir={folder / 'run'}", "runtime.checkpoint_every_steps=1"), free_port(), []
    for is_host in ("true", "false"):
        launcher = (
            "--nnodes", "1:2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "elastic",
            "--rdzv_conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,"
            f"is_host={is_host}",
        )  # fmt: skip
        agents.append(Launch(started, folder, digits, *own, ranks=1, launcher=launcher, pause=0.3).process)
    wait_for_step(agents[0], folder / "run", 6)
    return agents


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def test_a_node_is_gone_and_the_other_goes_on(tmp_path: Path, digits: Path, started: Started) -> None:
    first, second = two_nodes(started, tmp_path, digits)
    # The node with its agent and its rank, at once.
    for pid in (*children(second.pid), second.pid):
        os.kill(pid, signal.SIGKILL)
    out, _ = first.communicate()
    assert first.returncode == 0, out
    assert [record["step"] for record in records(tmp_path / "run", "train")] == list(range(1, STEPS + 1))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 1
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
    first, second = two_nodes(started, tmp_path, digits)
    (rank,) = children(second.pid)
    os.kill(rank, signal.SIGKILL)
    out, _ = first.communicate()
    assert first.returncode == 0, out
    assert "resumed from" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2
