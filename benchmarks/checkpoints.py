"""Saving and loading a training state: how long training waits, and how long the disk takes.

Command:  python benchmarks/checkpoints.py
Result:   docs/results/checkpoints.md has the table of one machine; the ratios carry over, the times do not.

One process, weights of a ViT and AdamW's moments. In turns: `torch.save` of one flushed file (the
reference), a synchronous checkpoint, a checkpoint that a thread writes while training continues, and a load with all
checksums. "While saving" is the time of a matrix product beside the writing thread, over that without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.report.statistics import paired_ratio, spread
from pycls_fast.parallel import ALONE
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import State
from pycls_fast.train.environment import provenance_lines
from pycls_fast.train.saving import Saver


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_b16", help="an experiment of configs/ (default: vit_b16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of the matrix product")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    state = training_state(options.model)
    found, _ = checkpoint.split(state)
    size = sum(tensor.nbytes for tensor in found.values())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = measure(state, Path(folder), options.rounds)
    print(f"- State: {options.model} and AdamW, {size / 1e9:.2f} GB in {len(found)} tensors; {options.rounds} rounds")
    print("\n".join(provenance_lines(torch.device("cpu"))), end="\n\n")
    print("| what | seconds (p10 to p90) | times torch.save (p10 to p90) |")
    print("|---|---|---|")
    for name, seconds in times.items():
        shown = spread(seconds)
        # Ratios of seconds, not of rates: above 1 is slower.
        ratio = paired_ratio(times["torch.save, one file"], seconds).spread
        print(
            f"| {name} | {shown.p50:.3f} ({shown.p10:.3f} to {shown.p90:.3f}) | "
            f"{ratio.p50:.2f} ({ratio.p10:.2f} to {ratio.p90:.2f}) |"
        )


def training_state(name: str) -> State:
    """Random weights and optimizer moments of an experiment."""
    config = load_config(name, ["data.root=."])
    network = build.model(config, 1000, build.switches(config, torch.device("cpu")))
    model = dict(network.state_dict())
    moments = {n: {"exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)} for n, p in model.items()}
    return {"step": 1, "model": model, "ema": None, "optimizer": moments, "classes": [], "config": {}}


def measure(state: State, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each operation, without the first round."""
    times: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        begun = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - begun)

    def one_file() -> None:
        with (folder / "one.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def waited_for(path: Path) -> None:
        found, plain = checkpoint.split(state)
        checkpoint.write(found, plain, path, 1, keep=2, world=ALONE)

    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def product() -> float:
        begun = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - begun

    for number in range(rounds + 1):
        timed("torch.save, one file", one_file)
        path = folder / "waited"
        timed("checkpoint, waited for", partial(waited_for, path))
        opened = checkpoint.open_checkpoint(path / "step_000000001")
        into = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in opened.specs.items()}
        timed("checkpoint, checked", partial(checkpoint.open_checkpoint, path / "step_000000001"))
        timed("checkpoint, read", partial(opened.read, into))
        del into
        shutil.rmtree(path)
        alone = sorted(product() for _ in range(20))[10]
        saver = Saver(folder / "thread", ALONE, keep=2, asynchronous=True)
        saver.save(state, 1)
        beside = []
        while not saver.done:
            beside.append(product())
        saved = saver.finish()
        assert saved is not None
        times.setdefault("checkpoint by a thread, training waits", []).append(saved.blocked_seconds)
        times.setdefault("checkpoint by a thread, in all", []).append(saved.seconds)
        times.setdefault("a product of 1024 x 1024 alone", []).append(alone)
        times.setdefault("the same while a thread saves", []).append(sorted(beside)[len(beside) // 2])
        shutil.rmtree(folder / "thread")
        if number == 0:
            times.clear()
    return times


if __name__ == "__main__":
    main()
