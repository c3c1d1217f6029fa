"""Which workload decides most a minute: `python benchmarks/ledger_quick.py OUT [cifar10=FOLDER] [pairs=4] [jobs=2]`.

Trains pairs with one seed that differ by one part in a million, as the ledger's pairs do, and prints for each candidate
the top-1, the standard deviation of a run within its pair (no less than independent images would make it), its variance
as a multiple of theirs, the minutes of a training, and the minutes after which a difference of 0.25 points is decided
with 90% chance. What OUT has is not trained again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from words import command_words

from pycls_fast.config.keys import text_override
from pycls_fast.ledger.report.effects import Pair, deviation_of, floor_of, resolution, runs_that_resolve
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder

MARGIN = 0.25
HALVES = ["data.val_fraction=0.5", "data.num_workers=0", "runtime.eval_every_epochs=1000", "trackers=[]"]
MUON = ["optim=muon", "optim.lr=6e-3", "optim.lr_batch_size=null", "optim.weight_decay=0.05", "optim.clip_norm=1.0"]
# An experiment and its changes; ViTs, because most switches are theirs.
CANDIDATES = {
    "vit_digits, 20 epochs": ["vit_digits", *HALVES, "schedule.epochs=20"],
    "vit_digits, 40 epochs": ["vit_digits", *HALVES, "schedule.epochs=40"],
    "vit_digits, 40 epochs at twice the rate": ["vit_digits", *HALVES, "schedule.epochs=40", "optim.lr=4e-3"],
    "vit_digits, 80 epochs": ["vit_digits", *HALVES, "schedule.epochs=80"],
    "vit_digits, 40 epochs with Muon": ["vit_digits", *HALVES, "schedule.epochs=40", *MUON],
    "ledger_quick": ["ledger_quick", "trackers=[]"],
}
ONCE = ["data.num_workers=0", "runtime.eval_every_epochs=1000", "trackers=[]", "speed.compile=off"]
# Of all images, in which one is 0.01 points.
CIFAR10 = {
    "CIFAR-10 at 16 px, the digits' ViT, 4 epochs": ["model=vit_digits", "data.image_size=16", "schedule.epochs=4"],
    "CIFAR-10 at 16 px, 2 epochs": ["data.image_size=16", "schedule.epochs=2"],
}
TWINS = ("[0.9,0.999]", "[0.9000009,0.999]")


def train(folder: Path, experiment: str, overrides: list[str]) -> None:
    """One training in a process with one thread."""
    if (folder / "summary.json").is_file():
        return
    words = ["train", "--config-name", experiment, text_override("run_dir", str(folder)), *overrides]
    command = [sys.executable, "-m", "pycls_fast", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def pair_of(folders: list[Path]) -> Pair:
    """What two trainings with one seed say."""
    one, two = (Predictions.load(RunFolder(folder).predictions) for folder in folders)
    right, other = one.predicted_N == one.labels_N, two.predicted_N == two.labels_N
    difference = 100.0 * (float(right.mean()) - float(other.mean()))
    return Pair((("change",), ()), difference, int((right != other).sum()), len(right))


def main() -> None:
    """Train every candidate and print the table."""
    (place,), options = command_words(__doc__, "OUT", cifar10="", pairs="4", jobs="2")
    out = Path(place)
    pairs_each, jobs = int(options["pairs"]), int(options["jobs"])
    candidates = dict(CANDIDATES)
    if options["cifar10"]:
        root = text_override("data.root", options["cifar10"])
        candidates |= {name: ["vit_cifar10", root, *ONCE, *overrides] for name, overrides in CIFAR10.items()}
    print("| workload | top-1 | deviation within a pair | times independent images | min a run | min to decide 0.25 |")
    print("|---|---|---|---|---|---|")
    for name, (experiment, *overrides) in candidates.items():
        folders = [[out / f"{name}-{seed}-{twin}" for twin in range(2)] for seed in range(pairs_each)]
        with ThreadPoolExecutor(jobs) as pool:
            each = [
                pool.submit(train, folder, experiment, [*overrides, f"seed={seed}", f"optim.betas={betas}"])
                for seed, pair in enumerate(folders)
                for folder, betas in zip(pair, TWINS, strict=True)
            ]
            for future in each:
                future.result()
        summaries = [json.loads((folder / "summary.json").read_text()) for pair in folders for folder in pair]
        pairs = [pair_of(pair) for pair in folders]
        deviation, ratio = deviation_of(pairs), np.var([p.difference for p in pairs], ddof=1) / 2 / floor_of(pairs)
        minutes = float(np.mean([summary["wall_seconds"] for summary in summaries])) / 60
        top1 = float(np.mean([summary["final"]["top1"] for summary in summaries]))
        needed = runs_that_resolve(resolution(2 * deviation), 1, MARGIN) * minutes / jobs
        print(f"| {name} | {top1:.2f} | {deviation:.2f} | {ratio:.1f} | {minutes:.1f} | {needed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
