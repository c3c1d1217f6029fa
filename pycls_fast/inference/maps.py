"""Draw attention, rollout, features and class maps over the given images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pycls_fast.data.batch import Batch
from pycls_fast.errors import DONE, MISTAKE, UserError
from pycls_fast.inference.classifier import Classifier, float32_convolutions, load
from pycls_fast.inference.images import GivenImages
from pycls_fast.inference.predict import collect, percent, report_unreadable
from pycls_fast.models import maps
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.train.contact_sheet import Cell, write_sheets
from pycls_fast.train.folder import output_file

MOST_IMAGES = 200
"""Images per call: all their maps are in memory at once."""

# A colour map that remains readable in greyscale.
_COLOURS = mpl.colormaps["inferno"]
_BATCH, _OPACITY = 8, 0.7
_KINDS = {"attention": maps.attention_maps, "rollout": maps.attention_rollout, "features": maps.patch_features}


def draw_maps(
    run: str,
    images: Sequence[str],
    *,
    kind: str | None,
    output: str | None,
    heads: bool,
    which: str,
    device: str,
) -> int:
    """Write a sheet with one row per image: the crop that the network sees, and its maps; returns the exit status.

    For the arguments see `MapsVerb`.
    """
    source = GivenImages(collect(images))
    if len(source) > MOST_IMAGES:
        raise UserError(f"images: {len(source):,} are more than the {MOST_IMAGES} that are drawn at once; give fewer")
    path = output_file(output or f"{kind or 'maps'}.png")
    # Attention maps are computed explicitly; all other layers may use the fast kernels.
    classifier = load(run, which=which, device=device)
    kind = kind or ("attention" if isinstance(classifier.network, VisionTransformer) else "class")
    unreadable: list[tuple[str, str]] = []
    batches = classifier.batches(source, batch_size=_BATCH, skip=lambda *one: unreadable.append(one))
    found = [_mapped(classifier, batch, kind) for batch in batches]
    if found:
        pictures = np.concatenate([pictures_BHWC for pictures_BHWC, *_ in found])
        names = [source.name(index) for _, indices, *_ in found for index in indices]
        titles = [title for *_, titles, _ in found for title in titles]
        values = torch.cat([values for *_, values in found])
        rows = _rows(pictures, names, titles, values, kind=kind, heads=heads)
        columns = len(rows[0])
        cells = [cell for row in rows for cell in row]
        for file in write_sheets(cells, path, columns=columns, page=columns * max(120 // columns, 1)):
            print(file)
    report_unreadable(unreadable, len(source))
    return DONE if found else MISTAKE


@torch.no_grad()
def _mapped(classifier: Classifier, batch: Batch, kind: str) -> tuple[np.ndarray, list[int], list[str], Tensor]:
    """The network's input pictures, their positions, predictions as titles, and maps (B, ..., h, w) or features."""
    network, inputs_BCHW = classifier.network, classifier.inputs(batch)
    scores_BK = classifier.scores(batch).double()
    labels_B = scores_BK.argmax(dim=1)
    probabilities_B = classifier.probabilities(scores_BK).amax(dim=1)
    titles = [
        f"{percent(probability)}%  {classifier.class_name(label)}"
        for label, probability in zip(labels_B.tolist(), probabilities_B.tolist(), strict=True)
    ]
    with float32_convolutions():
        if kind == "class":
            values = maps.class_maps(network, inputs_BCHW, labels_B)
        else:
            values = _KINDS[kind](network, inputs_BCHW)
    return batch.images_BHWC.cpu().numpy(), batch.indices_B.tolist(), titles, values.float().cpu()


def _rows(
    pictures_BHWC: np.ndarray, names: Sequence[str], titles: Sequence[str], values: Tensor, *, kind: str, heads: bool
) -> list[list[Cell]]:
    """One row of cells per image."""
    if kind == "features":
        # Computed over all images together, so that a colour means the same in each.
        values = maps.principal_components(values)
    rows = []
    for picture_HWC, name, title, value in zip(pictures_BHWC, names, titles, values, strict=True):
        picture = Image.fromarray(picture_HWC)
        row = [Cell(picture, title, [Path(name).name])]
        if kind == "features":
            row.append(Cell(_under(picture, value.double().numpy()), "features", ["first 3 components"]))
            parts = []
        elif value.ndim == 2:
            parts = [(kind, value)]
        else:
            each = [(f"head {i}", one) for i, one in enumerate(value, start=1)] if heads else []
            parts = [("all heads", value.mean(dim=0)), *each]
        for what, map_hw in parts:
            largest = float(map_hw.max())
            heat_hwC = _COLOURS(map_hw.numpy() / max(largest, 1e-12))[..., :3]
            row.append(Cell(_under(picture, heat_hwC), what, [f"largest: {largest:.2g}"]))
        rows.append(row)
    return rows


def _under(picture: Image.Image, colours_hwC: np.ndarray) -> Image.Image:
    """The picture under a grid of RGB values from 0 to 1; in grey, so that all colour comes from the map."""
    small = Image.fromarray((255 * colours_hwC).round().astype(np.uint8))
    over = small.resize(picture.size, Image.Resampling.BICUBIC)
    return Image.blend(picture.convert("L").convert("RGB"), over, _OPACITY)
