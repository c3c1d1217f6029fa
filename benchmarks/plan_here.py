"""The plan against short trainings on this machine's CPU, one to four gloo ranks: `python benchmarks/plan_here.py`.

In each of three rounds `plan calibrate` measures the machine; then each layout is planned and timed in turn, in
float32, on 16 images in memory on all ranks. Use a quiet machine. What ranks hold and exchange is compared by
`test_plan_ranks.py`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from provenance import provenance_lines
from words import command_words

from pycls_fast.config import load_config
from pycls_fast.plan import cluster as clusters
from pycls_fast.plan.calibrate import calibrate
from pycls_fast.plan.layout import Layout
from pycls_fast.plan.search import Search

MODELS = {
    "ViT-S/16": ("vit_s16", "model.drop_path=0"),
    "ResNet-18": ("resnet18",),
}
COMMON = (
    *("data=synthetic", "data.image_size=96", "data.global_batch_size=16", "augment=none"),
    *("optim.accumulation_steps=1", "speed.compile=off"),
)
BOTH = (Layout(), Layout(replicate=2), Layout(shard=2), Layout(replicate=4))
VIT = (Layout(tensor=2), Layout(pipeline=2, accumulation=4), Layout(pipeline=2, accumulation=4, schedule="gpipe"))
ROUNDS = 3


def timed(name: str, overrides: list[str], ranks: int, folder: Path) -> float:
    """Images/s of a training step on all ranks."""
    file = folder / "time.json"
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    keys = ["mode=train", "steps=3", "warmup_steps=1", "seconds=2", "repeats=1", f"output={file}", "runtime.threads=1"]
    command = [*launcher, "pycls_fast", "time", "--config-name", name, *overrides, *keys]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    train = json.loads(file.read_text())["train"]
    return float(train["images_per_step"] / train["step_seconds_p50"])


def main() -> None:
    command_words(__doc__)
    print(*provenance_lines(torch.device("cpu")), "", sep="\n")
    layouts = [
        (model, replace(layout, precision="fp32"))
        for model in MODELS
        for layout in (*BOTH, *(VIT if model.startswith("ViT") else ()))
    ]
    planned: dict[tuple[str, Layout], list[float]] = defaultdict(list)
    found: dict[tuple[str, Layout], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(ROUNDS):
            file = Path(temporary) / f"{turn}.yaml"
            calibrate(file)
            for model, layout in layouts:
                name, *keys = MODELS[model]
                chosen, ranks = [*COMMON, *keys], layout.data * layout.tensor * layout.pipeline
                search = Search(
                    load_config(name, [*chosen, "precision=fp32"]), clusters.cluster(f"{file}:herex{ranks}")
                )
                planned[model, layout].append(search.outcome(layout).images_per_second)
                found[model, layout].append(timed(name, [*chosen, *layout.overrides], ranks, file.parent))
    print("| model | layout | planned, images/s | measured | error |", "|---|---|---|---|---|", sep="\n")
    errors = []
    for model, layout in layouts:
        (plan, plans), (median, spread) = map(_median_and_spread, (planned[model, layout], found[model, layout]))
        errors.append(abs(plan / median - 1))
        print(f"| {model} | {layout} | {plan:.1f} ({plans}) | {median:.1f} ({spread}) | {plan / median - 1:+.0%} |")
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def _median_and_spread(values: list[float]) -> tuple[float, str]:
    return statistics.median(values), f"{min(values):.1f} to {max(values):.1f}"


if __name__ == "__main__":
    main()
