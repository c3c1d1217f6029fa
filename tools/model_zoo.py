"""Write `docs/zoo.md`, one row per experiment with a fixed data set: `python tools/model_zoo.py`.

Published numbers are in `pycls_fast/published.yaml`, numbers measured here in `docs/results/top1.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycls_fast import published
from pycls_fast.config import Section, command_line, load_config
from pycls_fast.config.run import Source
from pycls_fast.published import IMAGENET_TRAINING_IMAGES, Published

# FLOP/s in bfloat16, dense: NVIDIA's data sheet of the H100 SXM.
H100_PEAK = 989e12

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "zoo.md"
MEASURED = _DOCS / "results" / "top1.json"

_HEAD = """\
# Model zoo

Made by `python tools/model_zoo.py`. Each experiment is a file `configs/NAME.yaml` with its command, hardware and
source; a test compares its values with the source's. Top-1 accuracy in percent on ImageNet-1k's 50,000 validation
images, one crop, as published: no recipe of this table has been trained here yet.

```
python tools/train_net.py --config-name deit_s16 data.root=/path/to/imagenet
pycls-fast test --config-name deit_s16 weights=timm:deit_small_patch16_224.fb_in1k data.root=/path/to/imagenet
```

M: millions of parameters with 1,000 classes. GMACs: billions of multiply-adds of one image (FLOPs are twice as many).
h: hours on one H100 by arithmetic, three forward passes an image at its bfloat16 peak; published runs reach a fifth
to a third of it. Weights: those that others have published for the experiment, with the score that their library
gives. Files without `timm:` or `torchvision:` are linked from the source's page.

| experiment | model | M | GMACs | px | epochs | h | top-1 | source | weights (top-1) |
|---|---|---|---|---|---|---|---|---|---|
"""


def page(measured: Sequence[Mapping[str, Any]]) -> str:
    """The whole page.

    Args:
        measured: entries of `top1.json`: `experiment` or `weights`, with `top1`, `hardware`, `date`, `command`, and
            optionally `minutes` and a `note`.
    """
    return "".join([_HEAD, *map(_line, _rows()), "\n", "## Measured here\n\n", *map(_run, measured)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _rows() -> Iterator[Sequence[object]]:
    for name, known in published.EXPERIMENTS.items():
        config = load_config(name, ["data.root=/path/to/imagenet"])
        epochs = config.schedule.epochs
        top1 = "" if known.top1 is None else f"{known.top1:g}"
        size = (f"{known.parameters:g}", f"{known.gmacs:g}", known.size, epochs, hours(known, config.data, epochs))
        yield (f"`{name}`", _network(config.model.model_dump()), *size, top1, known.source, _weights(known.weights))


def _weights(name: str) -> str:
    score = published.WEIGHTS.get(name)
    return f"`{name}`" + (f" ({score.top1:.2f})" if score is not None else "") if name else ""


def _network(model: Mapping[str, Any]) -> str:
    if model["kind"] == "resnet":
        return f"ResNet-{model['depth']}"
    if model["kind"] == "timm":
        return str(model["name"])
    stem = "conv" if model["stem"] == "conv" else f"/{model['patch_size']}"
    return f"ViT {stem} {model['width']} x {model['depth']}"


def hours(known: Published, data: Source, epochs: int) -> str:
    """Hours on one H100 at its peak for training on ImageNet-1k, at three forward passes per image."""
    sizes = data.training_image_sizes
    parts = pairwise([*sizes, epochs])
    areas = sum((last - first) * (sizes[first] / known.size) ** 2 for first, last in parts)
    hours = 3 * 2e9 * known.gmacs * areas * IMAGENET_TRAINING_IMAGES / H100_PEAK / 3_600
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.2g}"


def _run(entry: Mapping[str, Any]) -> str:
    """How one of our own numbers was measured."""
    name = entry.get("experiment") or entry.get("weights")
    minutes = f"{entry['minutes']:g} min on " if "minutes" in entry else ""
    note = f" ({entry['note']})" if "note" in entry else ""
    return (
        f"- `{name}`: {entry['top1']:.2f}{note}, {minutes}{entry['hardware']}, {entry['date']}: `{entry['command']}`\n"
    )


def main(options: Section) -> int:
    """Write the page."""
    PAGE.write_text(page(json.loads(MEASURED.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    command_line(main, default=None, about=__doc__)
