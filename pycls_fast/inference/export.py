"""Export a checkpoint to a file that other programs read, and see that it computes the same."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pycls_fast.errors import DONE, UserError, one_of, refuse, refusing
from pycls_fast.files import BEST, user_path
from pycls_fast.inference.classifier import Classifier, load
from pycls_fast.inference.predict import report_unreadable
from pycls_fast.models.export_formats import FORMATS, SUFFIXES, About, compare_with_file, drawn_images, quantize
from pycls_fast.train.display import human
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.load_weights import open_trained
from pycls_fast.train.saved_weights import (
    Weights,
    about_weights,
    check_output,
    preprocessing,
    replacing,
    written_files,
)
from pycls_fast.train.tasks.score import ROWS

# Values of `dtype`, which are those of tensors where a file has nothing else.
_OF_TENSORS = ("null", "float32", "bfloat16", "float16")
_DTYPES = {"onnx": ("null", "int8"), "openvino": ("null",), "program": ("null",)}
# A protocol buffers file holds 2 GiB; some of it is reserved for the graph.
_ONNX_LIMIT = 2**31 - 2**24
# What is put beside an ONNX file, and into timm's folder.
_CARD = "README.md"
_SCRIPT = Path(__file__).with_name("run_onnx.py")
# As a share of the largest logit. In float32 a ViT has 1e-6.
_MOST_ERROR = 1e-3
# Images for int8, half of them to fit it; of the others so many percent have to keep their class.
_FEWEST, _INT8_PERCENT = 4, 80


def export(
    source: str,
    output: str,
    *,
    which: str = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    format: str | None = None,  # noqa: A002  # the key that the user types
    images: Sequence[str] = (),
) -> int:
    """Write a checkpoint in another format, unless it does not compute what the network does, and print what was
    written; for the arguments see `ExportVerb`.

    Peak memory: for "safetensors" the exported tensors and one tensor as saved; for others the model three times.
    """
    path, by_suffix = user_path(output), {suffix: name for name, suffix in SUFFIXES.items() if suffix}
    kind = format or by_suffix.get(path.suffix, "safetensors")
    one_of("format", kind, SUFFIXES)
    one_of("dtype", dtype or "null", _DTYPES.get(kind, _OF_TENSORS), more=f" with format={kind}")
    check_output(path, kind, overwrite=overwrite)
    if images and kind == "safetensors":
        raise UserError("images: safetensors holds the weights alone, which nothing runs; leave it out")
    if dtype == "int8" and not images:
        raise UserError("images: dtype=int8 measures the ranges of features; give a folder of some 200 images")
    weights, agreement = open_trained(source, kind=which), ""
    with replacing(path) as file:
        if kind == "safetensors":
            save_file(weights.read(None if dtype is None else getattr(torch, dtype)), file, about_weights(weights))
        else:
            # Each library raises its own kinds of errors.
            with refusing(f"output: the network cannot be written as {kind}", Exception, use="choose another format"):
                agreement = f"; {_write_model(source, weights, kind, dtype, images, file)}"
        if kind == "timm" and not (path / _CARD).exists():
            (file / _CARD).write_text(model_card(weights), encoding="utf-8", errors="backslashreplace")
        size = sum(each.stat().st_size for each in written_files(file))
    script = path.parent / _SCRIPT.name
    if kind == "onnx" and (overwrite or not script.exists()):
        shutil.copyfile(_SCRIPT, script)
    count = sum(math.prod(spec.shape) for spec in weights.specs.values())
    print(weights)
    print(f"{path}: {len(weights.specs)} tensors, {human(count)} numbers, {human(size, 'B')}{agreement}")
    if kind == "timm":
        print(f"open it with timm.create_model('local-dir:{path}', pretrained=True)")
    return DONE


def _write_model(source: str, weights: Weights, kind: str, dtype: str | None, images: Sequence[str], path: Path) -> str:
    """Export the network itself, with explicit attention: operations that every reader of the file supports. Returns
    how well the file agrees with it."""
    classifier = load(source, which=weights.kind, device="cpu", fast=False)
    network = classifier.network
    size = sum(4 * parameter.numel() for parameter in network.parameters())
    if kind == "onnx" and size >= _ONNX_LIMIT:
        raise UserError(f"format: an ONNX file holds 2 GiB and this model has {human(size, 'B')}; use program or timm")
    how = preprocessing(classifier.config.model_dump(mode="json"))
    texts = about_weights(weights) | {"outputs": "sigmoid" if classifier.has_sigmoid else "softmax"}
    about = About(classifier.classes, how, texts)
    pictures_NCHW = _crops(classifier, images) if images else drawn_images(about)
    if dtype not in (None, "int8"):
        network.to(getattr(torch, str(dtype)))
    FORMATS[kind](network, path, about)
    if dtype == "int8":
        if len(pictures_NCHW) < _FEWEST:
            raise UserError(f"images: {len(pictures_NCHW)} are too few; dtype=int8 needs {_FEWEST}, better 200")
        # The others tell what it costs.
        ranges_NCHW, pictures_NCHW = pictures_NCHW[::2], pictures_NCHW[1::2]
        quantize(path, ranges_NCHW)
    same, error = compare_with_file(network, path, about, pictures_NCHW)
    of = f"{same} of {len(pictures_NCHW)} {'' if images else 'drawn '}images have the network's class"
    fits = error <= _MOST_ERROR
    if dtype == "int8":
        of, fits = f"{of} (at least {_INT8_PERCENT}% have to)", 100 * same >= _INT8_PERCENT * len(pictures_NCHW)
    text = f"{of}, logits differ by at most {error:.1e} of the largest"
    if not fits:
        raise UserError(f"output: not written, as the file does not compute what the network does: {text}")
    return text


def _crops(classifier: Classifier, images: Sequence[str]) -> Tensor:
    """Images as the network sees them, uint8 (N, 3, H, W), in an order that mixes classes, without unreadable ones."""
    source, unreadable = classifier.given(images), list[tuple[str, str]]()
    batches = list(classifier.batches(source, skip=lambda *one: unreadable.append(one)))
    report_unreadable(unreadable, len(source))
    if not batches:
        refuse(["images: none can be read; give others"])
    found = torch.cat([batch.images_BHWC for batch in batches])
    order_N = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return found[order_N].permute(0, 3, 1, 2).contiguous()


_HEADER = """---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm]
---
"""


def model_card(weights: Weights) -> str:
    """Markdown: where the weights come from, their scores in their run's own evaluation, classes and preprocessing."""
    assert weights.config is not None
    assert weights.classes is not None
    source = str(weights.config.get("weights"))
    # A path is of no use to others.
    tuned = f", fine-tuned from `{source}`" if source.startswith(("timm:", "torchvision:", "hf:")) else ""
    average = "the moving average of the weights" if weights.kind == "ema" else "the weights"
    trained = f"Trained by pycls_fast{tuned}: {average}, after step {weights.step}."
    text = f"{_HEADER}\n{f'The weights `{source}`.' if weights.step is None else trained}\n"
    measured = _measured(weights)
    if measured:
        text += "\n| measured in training | |\n|---|---|\n"
        for key, (name, form) in ROWS.items():
            text += f"| {name} | {form.format(measured[key])} |\n" if measured.get(key) is not None else ""
    about = {"classes": weights.classes, "preprocessing": preprocessing(weights.config)}
    for title, value in about.items():
        # On one line, so that no name ends the block.
        text += f"\n{title.capitalize()}:\n\n```json\n{json.dumps(value, ensure_ascii=False)}\n```\n"
    return text


def _measured(weights: Weights) -> Mapping[str, Any]:
    """The evaluation of these weights, if they lie in their run's folder."""
    path, asked = Path(weights.path), (weights.step, weights.kind, "val")
    if path.is_dir() or path.name == f"{BEST}.safetensors":
        run = path.parents[1] if path.is_dir() else path.parent
        for record in RunFolder(run).records("eval"):
            if (record["step"], record.get("weights"), record.get("split")) == asked:
                return record
    return {}
