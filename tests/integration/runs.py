"""Whole runs on the digits: in this process, as a process, and under torchrun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycls_fast.config import RunConfig, load_config
from pycls_fast.files import checkpoints
from pycls_fast.train import train
from pycls_fast.train.tasks.score import score
from tests.factories import load_checkpoint
from tests.processes import Started

ROOT = Path(__file__).parents[2]

# Small enough for a step in milliseconds, with everything random switched on: what is exact here is exact at large.
TINY = (
    "model.width=32", "model.depth=2", "model.mlp_width=32", "data.image_size=8", "model.patch_size=2",
    "data.global_batch_size=64", "schedule.epochs=2", "schedule.warmup_epochs=1", "runtime.log_every_steps=1",
    "runtime.eval_every_epochs=1", "trackers=[]", "runtime.progress=plain",
)  # fmt: skip


def run(run_dir: Path, digits: Path, *overrides: str, config_name: str = "vit_digits") -> int:
    """Train on the digits in this process."""
    return train(load_config(config_name, [*TINY, f"data.root={digits}", f"run_dir={run_dir}", *overrides]))


def scored(config: RunConfig, split: str = "val", **how: Any) -> dict[str, Any]:
    """What `score` writes down."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores.json"
        assert score(config, split, str(file), **how) == 0
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def environment(package: Path = ROOT) -> dict[str, str]:
    """One thread a process, the checkout (or another folder) first on the path, and no rank left over from anything."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(*overrides: str, tool: str = "train_net", config_name: str | None = "vit_digits") -> list[str]:
    """The command line of a tool."""
    name = [] if config_name is None else ["--config-name", config_name]
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *name, *overrides]


def installed(folder: Path) -> tuple[Path, Path]:
    """What the checkout's source archive unpacks to, and where pip installs the wheel built from that."""
    clone, site = folder / "clone", folder / "site"
    for name in ("pycls_fast", "configs", "tools"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, clone)

    def build(where: Path, kind: str) -> None:
        code = f"import setuptools.build_meta as b; b.build_{kind}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=where, check=True, capture_output=True)

    build(clone, "sdist")
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    sources = folder / archive.name.removesuffix(".tar.gz")
    build(sources, "wheel")
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return sources, site


def run_process(
    arguments: Sequence[str], *, cwd: Path, expect: int | None = 0, package: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end, with more variables of the environment; the status has to be the expected one. The test's own
    limit is the limit here."""
    started, pipe, own = Started(), subprocess.PIPE, environment(package) | variables
    process = started(list(arguments), cwd=cwd, env=own, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = process.communicate()
    finally:
        # Ranks outlive their launcher if the test is ended.
        started.end()
    if expect is not None:
        assert process.returncode == expect, f"status {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def under_torchrun(arguments: Sequence[str], ranks: int) -> list[str]:
    """The same command as several ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, *arguments[1:]]


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of one kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until a run that goes on in a process has recorded the step."""
    done, file = 0, run_dir / "metrics.jsonl"
    while done < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        done = max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint of a run folder."""
    return load_checkpoint(next(checkpoints(run_dir / "checkpoints")))


def assert_same_records(run_dir: Path, reference: Path) -> None:
    """The same losses and accuracies, step by step."""
    for kind, names in (("train", ("step", "loss", "grad_norm", "lr")), ("eval", ("step", "weights", "loss", "top1"))):
        ours, theirs = ([[r[name] for name in names] for r in records(folder, kind)] for folder in (run_dir, reference))
        assert ours == theirs
