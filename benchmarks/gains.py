"""What options beside the defaults gain: `python benchmarks/gains.py DATA WEIGHTS OUT [key=value ...]`.

DATA, WEIGHTS and tasks as in `benchmarks/finetune.py`, with the images of its seed 0. OUT is a folder: what was trained
there is not trained again. A row is a default `finetune` with one more option, trained with the same seeds and scored
on the task's test images. `task=10x100@64`, `seeds=3` and `rows=tta,calibrate,int8,soup,crop,lora,labels` choose.

Rows: `tta=flip` when scoring; `calibrate`; `int8`, exported as ONNX in int8; `soup`, the mean of the weights of all
seeds; `crop`, whole images (squashed or with a border) in training and scoring; `lora`: the head alone, and with
low-rank factors in the rest; `labels`: several of each image (`finetune_multi_label`), what CIFAR-10's classes are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from finetune import PATHS, call, lay_out, place, scores_of, seven_classes, split
from words import command_words

# Of airplane, automobile, bird, cat, deer, dog, frog, horse, ship and truck.
LABELS = ("vehicle;flies", "vehicle;wheels", "animal;flies", "animal;pet", "animal;hooves", "animal;pet",
          "animal;water", "animal;hooves", "vehicle;water", "vehicle;wheels")  # fmt: skip
LORA = ("optim.trainable=head", "optim.lora_rank=8")


class Bench:
    """The trainings and scores of one task.

    Args:
        parts: (file, label) of train, val and test.
    """

    def __init__(
        self, parts: dict[str, list[tuple[Path, int]]], weights: Path, size: int, seeds: int, folder: Path
    ) -> None:
        self.folder, self.seeds = folder, range(seeds)
        self.given = lay_out(folder, parts, weights, size)
        for part, items in parts.items():
            of = {label: LABELS[label] if label < len(LABELS) else label for _, label in items}
            lines = ["path,label", *(f"{place(folder, part, file, label)},{of[label]}" for file, label in items)]
            (folder / f"{part}.csv").write_text("\n".join(lines))
        self.call, self.score = partial(call, folder), partial(scores_of, folder)

    def train(self, name: str, *options: str, experiment: str = "finetune") -> list[str]:
        """The runs of all seeds, called `name`."""
        runs = [f"{name}_{seed}" for seed in self.seeds]
        for seed, run in enumerate(runs):
            if not (self.folder / run / "summary.json").is_file():
                self.call("train", "--config-name", experiment, *self.given, f"seed={seed}", f"run_dir={run}", *options)
        return runs

    def row(self, name: str, scores: list[dict[str, float]], keys: tuple[str, ...] = ("top1",)) -> None:
        """Print the means over seeds, and of each the standard deviation."""
        cells = []
        for key in keys:
            values = [score[key] for score in scores]
            spread = f" ± {np.std(values, ddof=1):.3g}" if len(values) > 1 else ""
            cells.append(f"{key} {np.mean(values):.4g}{spread}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    every = "tta,calibrate,int8,soup,crop,lora,labels"
    paths, asked = command_words(__doc__, *PATHS, task="10x100@64", seeds="3", rows=every)
    root, weights, out = (Path(path).resolve() for path in paths)
    task, rows = asked["task"], asked["rows"].split(",")
    size = int(task.partition("@")[2])
    out.mkdir(parents=True, exist_ok=True)
    weights = seven_classes(root, out) if task.startswith("vit:") else weights
    bench = Bench(split(root, task, 0), weights, size, int(asked["seeds"]), out / task.replace(":", "-"))
    runs = bench.train("default")
    sure = ("top1", "loss", "calibration_error")
    bench.row("default", [bench.score(run) for run in runs], sure)
    if "tta" in rows:
        bench.row("tta=flip", [bench.score(run, "tta=flip") for run in runs], sure)
    if "calibrate" in rows:
        for run in runs:
            bench.call("calibrate", f"weights={run}", f"output={run}/calibrated.safetensors", "overwrite=true")
        bench.row("calibrate", [bench.score(f"{run}/calibrated.safetensors") for run in runs], sure)
    if "int8" in rows:
        for run in runs:
            bench.call("export", f"weights={run}", f"output={run}/int8.onnx", "dtype=int8", "images=[data/train]",
                       "overwrite=true")  # fmt: skip
        bench.row("export dtype=int8", [bench.score(f"{run}/int8.onnx") for run in runs], sure)
    if "soup" in rows:
        first, *others = runs
        for method in ("uniform", "greedy"):
            bench.call("soup", f"weights={first}", f"others=[{','.join(others)}]", f"method={method}",
                       "output=soup.safetensors", "overwrite=true")  # fmt: skip
            bench.row(f"soup, {method}", [bench.score("soup.safetensors")], sure)
    for crop in ("squash", "border") if "crop" in rows else ():
        options = (f"augment.crop={crop}", f"augment.eval_crop={crop}", "augment.eval_crop_ratio=1")
        bench.row(f"crop={crop}", [bench.score(run) for run in bench.train(crop, *options)])
    if "lora" in rows:
        bench.row("linear_probe", [bench.score(run) for run in bench.train("head", experiment="linear_probe")])
        bench.row(" ".join(LORA), [bench.score(run) for run in bench.train("lora", *LORA)])
    if "labels" in rows:
        tables = [f"data.{name}={bench.folder}/{name}.csv" for name in ("train", "val")]
        several = bench.train("labels", *tables, experiment="finetune_multi_label")
        tested = (f"data.val={bench.folder}/test.csv", "split=val")
        for option in ([], ["tta=flip"]):
            scores = [bench.score(run, *option, data=tested) for run in several]
            bench.row(" ".join(["finetune_multi_label", *option]), scores, ("map", "f1"))


if __name__ == "__main__":
    main()
