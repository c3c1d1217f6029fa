"""Write `docs/zoo.md`, one row per experiment with a fixed data set: `python tools/model_zoo.py`.

Published numbers are in `pycls_fast/published.yaml`, numbers measured here in `docs/results/top1.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from pycls_fast import published
from pycls_fast.config import Verb, command_line, load_config
from pycls_fast.data.choices import Source
from pycls_fast.published import IMAGENET_TRAINING_IMAGES, Published

# FLOP/s in bfloat16, dense: NVIDIA's data sheet of the H100 SXM.
H100_PEAK = 989e12

_DOCS = Path(__file__).parents[1] / "docs"
PAGE = _DOCS / "zoo.md"
MEASURED = _DOCS / "results" / "top1.json"

_HEAD = """\
# Model zoo

Made by `python tools/model_zoo.py`. Each experiment is a file `configs/NAME.yaml` with its command, hardware and
source; a test compares its values with the source's. Published top-1 is in percent on ImageNet-1k's 50,000 validation
images, one crop of 224 pixels or those in the name: no recipe of this table has been trained here yet.

M: millions of parameters with 1,000 classes. GMACs: billions of multiply-adds of one image. h: hours on one H100, three
forward passes an image at its bfloat16 peak; published runs reach a fifth to a third of it. Weights: what others have
published, with their library's score where it differs; files are linked from the source's page. Score them with
`pycls-fast test --config-name EXPERIMENT weights=NAME data.root=PATH`.

| experiment | M | GMACs | epochs | h | top-1 | source | weights |
|---|---|---|---|---|---|---|---|
"""
_MEASURED_HEAD = """
## Measured here, by `--config-name`
"""


def page(measured: Sequence[Mapping[str, Any]]) -> str:
    """The whole page.

    Args:
        measured: entries of `top1.json`: `experiment`, `top1`, `hardware`, `date`, `command`, and optionally
            `minutes` and a `note`.
    """
    ours = [
        f"\n{hardware}:\n\n{''.join(map(_run, runs))}" for hardware, runs in groupby(measured, lambda e: e["hardware"])
    ]
    return "".join([_HEAD, *map(_line, _rows()), _MEASURED_HEAD, *ours])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _rows() -> Iterator[Sequence[object]]:
    for name, known in published.EXPERIMENTS.items():
        config = load_config(name, ["data.root=/path/to/imagenet"])
        epochs = config.schedule.epochs
        top1 = "" if known.top1 is None else f"{known.top1:g}"
        size = (f"{known.parameters:g}", f"{known.gmacs:g}", epochs, hours(known, config.data, epochs))
        yield (f"`{name}`", *size, top1, known.source, _weights(known))


def _weights(known: Published) -> str:
    score = published.WEIGHTS.get(known.weights)
    if score and known.top1 and round(score.top1, 1) != round(known.top1, 1):
        # Some are meant to be tested at another size than that of the published number.
        size = f" at {score.size} px" if score.size != known.size else ""
        return f"`{known.weights}` ({score.top1:.2f}{size})"
    return f"`{known.weights}`" if known.weights else ""


def hours(known: Published, data: Source, epochs: int) -> str:
    """Hours on one H100 at its peak for training on ImageNet-1k, at three forward passes per image."""
    sizes = data.training_image_sizes
    parts = pairwise([*sizes, epochs])
    areas = sum((last - first) * math.prod(sizes[first]) / known.size**2 for first, last in parts)
    hours = 3 * 2e9 * known.gmacs * areas * IMAGENET_TRAINING_IMAGES / H100_PEAK / 3_600
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.2g}"


def _run(entry: Mapping[str, Any]) -> str:
    """How one of our own numbers was measured."""
    minutes = f", {entry['minutes']:g} min" if "minutes" in entry else ""
    note = f" ({entry['note']})" if "note" in entry else ""
    given = entry["command"].removeprefix("python tools/train_net.py").removeprefix(" --config-name ")
    return f"- `{given or entry['experiment']}`: {entry['top1']:.2f}{note}{minutes}, {entry['date']}\n"


class ZooVerb(Verb, experiment=None):
    """Write docs/zoo.md: `python tools/model_zoo.py`."""

    def __call__(self) -> int:
        PAGE.write_text(page(json.loads(MEASURED.read_text(encoding="utf-8"))), encoding="utf-8")
        print(PAGE)
        return 0


if __name__ == "__main__":
    command_line(ZooVerb)
