"""Write `docs/MODEL_ZOO.md`, one row per experiment with a fixed data set: `python tools/model_zoo.py`.

Published numbers are in `pycls_fast/published.py`, numbers measured here in `docs/results/top1.json`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import pycls_fast.ctrl_c  # noqa: F401

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycls_fast import published
from pycls_fast.config import NoOptions, load_config, options_line
from pycls_fast.config.schema import Data
from pycls_fast.published import IMAGENET_TRAINING_IMAGES, Published

# FLOP/s in bfloat16, dense: NVIDIA's data sheet of the H100 SXM.
H100_PEAK = 989e12

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "MODEL_ZOO.md"
MEASURED = _DOCS / "results" / "top1.json"

_PLACE = ["data.root=/path/to/imagenet"]

_HEAD = """\
# Model zoo

Made by `python tools/model_zoo.py`. What was published comes from `pycls_fast/published.py`, what was measured here
from `docs/results/top1.json`, where every number has its command and hardware; `not yet`: nothing was measured.

Top-1 accuracy in percent on ImageNet-1k's 50,000 validation images, one crop, as published and, under `here`, as
measured here. Parameters with 1,000 classes. GMACs are billions of multiply-adds of one image at the size given (a
run's summary counts twice as many FLOPs). The tests count both on every experiment's network.

`H100 hours` is arithmetic, not a measurement: three forward passes for each image of a training, by the area that it is
trained at, at 989 TFLOP/s, the dense bfloat16 peak of one H100. In 16 bits and with every branch computed nothing is
faster (`precision=fp8` has twice the peak, and `speed.drop_path_compute=skip` leaves branches out). Published runs
reach 29 % of it with a ViT-g/14 (NeMo, 8 H100) and 18 % with a ResNet-50 (NVIDIA in MLPerf 3.0, 8 H100); the loader has
to keep up, too.
"""

_RECIPES = """\
## Recipes

Each is a file `configs/NAME.yaml`, which has its command, hardware, source (mostly with a commit) and how it
differs from the source; a test compares the values with the source's (`tests/unit/config/test_recipes.py`). Weights
without `timm:` or `torchvision:` are files linked from the source's page.

```
python tools/train_net.py --config-name deit_s16 data.root=/path/to/imagenet
```
"""

_SMALL = """\
## Small data sets

Recipes of our own, for trying things out: top-1 accuracy in percent on the data set's test images (of the digits: a
fifth, held out) after the last epoch, one run, and how long it took.

```
python tools/train_net.py --config-name resnet_cifar10 data.root=/path/to/cifar-10-batches-py
```
"""

_WEIGHTS = """\
## Published weights

Weights that others have published, with their own preprocessing, and their accuracy here:

```
python tools/test_net.py --config-name deit_s16 weights=timm:deit_small_patch16_224.fb_in1k data.root=/path/to/imagenet
```

The numbers are those of the library that offers the weights, evaluated by it, and may differ a little from the paper's.
Files come without preprocessing; `test_net` shows their number if they have kept their name and are scored with the
experiment of their row (`--config-name mae_finetune_b16 weights=path/to/mae_finetuned_vit_base.pth`).
"""


# Experiments on small data sets, and the names of these.
SMALL = {
    "vit_digits": "scikit-learn's digits",
    "resnet_digits": "scikit-learn's digits",
    "resnet_cifar10": "CIFAR-10",
    "vit_cifar10": "CIFAR-10",
}


def page(measured: Sequence[Mapping[str, Any]]) -> str:
    """The whole page.

    Args:
        measured: entries of `top1.json`: `experiment` (a recipe that was trained) or `weights` (that were scored), with
            `top1`, `hardware`, `date` and `command`; on a small data set also `minutes` of training, and optionally a
            `note` on the run.

    Raises:
        ValueError: an entry for an unknown experiment or unknown weights.
    """
    experiments = published.EXPERIMENTS.keys() | SMALL.keys()
    for entry in measured:
        if entry.get("experiment") not in experiments and entry.get("weights") not in published.WEIGHTS:
            raise ValueError(f"{MEASURED.name}: no experiment and no weights of that name: {entry}")
    parts = [
        [_HEAD],
        [_RECIPES, *_recipes(measured), ""],
        [_SMALL, *_small(measured), ""],
        [_WEIGHTS, *_weights(measured), ""],
        _runs(measured),
    ]
    return "\n".join(line for part in parts for line in part)


def _recipes(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = (
        "experiment",
        "model",
        "M parameters",
        "GMACs",
        "at px",
        "epochs",
        "H100 hours",
        "published",
        "source",
        "measured here",
    )
    yield f"| {' | '.join(columns)} | weights |"
    yield "|---" * len(columns) + "|---|"
    for name, known in published.EXPERIMENTS.items():
        config = load_config(name, _PLACE)
        top1 = "none" if known.top1 is None else f"{known.top1:g}"
        weights = f"`{known.weights}`" if known.weights else ""
        size = f"{known.parameters:g} | {known.gmacs:g} | {known.size}"
        length = f"{config.schedule.epochs} | {hours(known, config.data, config.schedule.epochs)}"
        ours = _ours(measured, "experiment", name)
        model = _network(config.model.model_dump())
        yield f"| `{name}` | {model} | {size} | {length} | {top1} | {known.source} | {ours} | {weights} |"


def hours(known: Published, data: Data, epochs: int) -> str:
    """Hours on one H100 at its peak for training on ImageNet-1k, at three forward passes per image."""
    sizes = data.training_image_sizes
    parts = pairwise([*sizes, epochs])
    areas = sum((last - first) * (sizes[first] / known.size) ** 2 for first, last in parts)
    hours = 3 * 2e9 * known.gmacs * areas * IMAGENET_TRAINING_IMAGES / H100_PEAK / 3_600
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.2g}"


def _small(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| experiment | model | images | at px | epochs | measured here | minutes | note |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, images in SMALL.items():
        config = load_config(name, ["data.root=/path/to/images"])
        entries = [entry for entry in measured if entry.get("experiment") == name]
        minutes = ", ".join(f"{entry['minutes']:g}" for entry in entries)
        notes = "; ".join(entry["note"] for entry in entries if "note" in entry)
        yield (
            f"| `{name}` | {_network(config.model.model_dump())} | {images} | {config.data.image_size} | "
            f"{config.schedule.epochs} | {_ours(measured, 'experiment', name)} | {minutes} | {notes} |"
        )


def _network(model: Mapping[str, Any]) -> str:
    if model["kind"] == "resnet":
        return f"ResNet-{model['depth']}"
    if model["kind"] == "timm":
        return str(model["name"])
    assert model["kind"] == "vit", f"the column 'model' of model.kind={model['kind']}"
    stem = "conv" if model["stem"] == "conv" else f"/{model['patch_size']}"
    return f"ViT {stem} {model['width']} x {model['depth']}"


def _weights(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| `weights=` | `--config-name` | px | published | source | here |"
    yield "|---|---|---|---|---|---|"
    experiment = {known.weights: name for name, known in published.EXPERIMENTS.items()}
    # The same networks under a second name.
    experiment |= {
        "timm:resnet50.tv_in1k": "torchvision_resnet50_v1",
        "timm:resnet50.tv2_in1k": "torchvision_resnet50_v2",
    }
    for name, score in published.WEIGHTS.items():
        yield (
            f"| `{name}` | `{experiment[name]}` | {score.size} | {score.top1:.2f} | {score.source} | "
            f"{_ours(measured, 'weights', name)} |"
        )


def _ours(measured: Sequence[Mapping[str, Any]], key: str, name: str) -> str:
    found = [f"{entry['top1']:.2f}" for entry in measured if entry.get(key) == name]
    return ", ".join(found) or "not yet"


def _runs(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How each of our own numbers was measured."""
    if not measured:
        return
    yield "## What was measured here"
    yield ""
    for entry in measured:
        name = entry.get("experiment") or entry.get("weights")
        note = f" ({entry['note']})" if "note" in entry else ""
        yield f"- `{name}`: {entry['top1']:.2f}{note}, {entry['hardware']}, {entry['date']}: `{entry['command']}`"
    yield ""


def main(options: NoOptions) -> int:
    """Write the page."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    PAGE.write_text(page(measured), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    options_line(main, NoOptions, about=__doc__)
