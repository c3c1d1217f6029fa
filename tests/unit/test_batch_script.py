"""`tools/train.sbatch`: which ends of a run put the job into the queue again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pycls_fast.train.folder import RunFolder

SCRIPT = Path(__file__).parents[2] / "tools" / "train.sbatch"


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def record(folder: Path, event: str) -> str:
    """The line that a run writes."""
    RunFolder(folder).add_record("event", 1, 0.5, event=event, signal="SIGTERM")
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    return line


@pytest.mark.parametrize(
    ("earlier", "event", "restarts", "queued"),
    [
        ("", "stopped", 0, True),
        ("", "stopped", 20, False),
        ("", "resumed", 0, False),
        # A mistake, so the run did not start.
        ("", None, 0, False),
        # The run was stopped once more, or a mistake kept it from starting after it had been stopped.
        ("stopped", "stopped", 1, True),
        ("stopped", None, 1, False),
    ],
)
def test_only_a_stopped_run_is_queued_again(
    tmp_path: Path, earlier: str, event: str | None, restarts: int, queued: bool
) -> None:
    run = tmp_path / "run"
    for folder in (run, tmp_path / "new"):
        folder.mkdir()
    if earlier:
        record(run, earlier)
    line = "true" if event is None else f"echo '{record(tmp_path / 'new', event)}' >> {run}/metrics.jsonl"
    executable(
        tmp_path / "bin" / "srun", f"{line}\necho $1 ${{@: -3}}\n[ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT = 150 ] && exit 1"
    )
    executable(tmp_path / "bin" / "scontrol", f"[ $1 = requeue ] && echo $2 > {tmp_path}/queued; true")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "96",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_NODELIST": "n",
        "SLURM_NNODES": "1",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), str(run), "--config-name", "vit_h16"],
        env={**os.environ, **slurm, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"--cpus-per-task=96 --config-name vit_h16 run_dir={run}\n"
    assert (tmp_path / "queued").exists() == queued


@pytest.mark.parametrize("words", [[], ["--help"], ["--config-name", "vit_h16"]])
def test_without_a_run_it_says_how_it_is_called(words: list[str]) -> None:
    done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "sbatch --nodes=4 tools/train.sbatch /shared/runs/h16 --config-name vit_h16" in done.stdout
