"""Exported files as other programs run them, compared with the network that they were made of; int8."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import refusing
from pycls_fast.files import PROGRAMS
from pycls_fast.models.export import About, Deployable
from pycls_fast.network import Network

Run = Callable[[Tensor], Tensor]
"""Bytes (B, C, H, W), uint8 -> logits (B, K)."""
TEXTS = ("classes", "preprocessing", "weights", "step", "config")
"""What a file says of itself, as far as it is read again."""
# Images at a time.
_BATCH = 32
# Else onnxruntime reports what it runs to its makers, and leaves a file in the folder of temporary ones.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def _onnx(path: Path) -> tuple[Run, Mapping[str, str]]:
    with refusing("weights: an ONNX file needs onnxruntime", ImportError, use="pip install 'pycls_fast[onnx]'"):
        import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    return lambda images_BCHW: torch.from_numpy(session.run(["logits"], {"images": images_BCHW.numpy()})[0]), texts


def _openvino(path: Path) -> tuple[Run, Mapping[str, str]]:
    with refusing("weights: OpenVINO's file needs openvino", ImportError, use="pip install 'pycls_fast[openvino]'"):
        import openvino
    model = openvino.Core().read_model(path)
    # By itself it computes in bfloat16 where a CPU can.
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    texts = {key: model.get_rt_info(key).astype(str) for key in TEXTS if model.has_rt_info(key)}
    return lambda images_BCHW: torch.from_numpy(compiled(images_BCHW.numpy())[0].copy()), texts


def _program(path: Path) -> tuple[Run, Mapping[str, str]]:
    # The function alone: a program is no module that can be set to evaluation.
    return torch.export.load(path).module().forward, {}


_OPENERS = dict(zip(PROGRAMS, (_onnx, _openvino, _program), strict=True))


def open_exported(path: Path) -> tuple[Run, Mapping[str, str]]:
    """A file that other programs run, and what it says of itself (`About.texts`).

    Raises:
        UserError: what runs it is missing, or it cannot be read.
    """
    # Each library raises its own kinds.
    with refusing(f"weights: {path} cannot be read", Exception):
        return _OPENERS[path.suffix](path)


class ExportedNetwork(Network):
    """An exported file on the CPU, in place of the network that it was made of.

    Args:
        run: of `open_exported`.
        mean, std: those of the images that it gets, which the file normalises itself.
    """

    def __init__(self, run: Run, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self._run = run
        self._mean_C11, self._std_C11 = (torch.tensor(each)[:, None, None] for each in (mean, std))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) of whole numbers, float32 -> logits (B, K)."""
        bytes_BCHW = (255.0 * (images_BCHW.cpu() * self._std_C11 + self._mean_C11)).round().to(torch.uint8)
        with refusing("weights: the file cannot be run", Exception):
            return self._run(bytes_BCHW).to(images_BCHW.device)


def drawn_images(about: About) -> Tensor:
    """Images with structures of all sizes, as photographs have them: uint8 (16, 3, H, W), the same each time."""
    generator, size = torch.Generator().manual_seed(0), about.size
    total = torch.zeros(16, 3, *size)
    for cells in (1, 2, 4, 8, 16, max(size)):
        noise = torch.randn(16, 3, cells, cells, generator=generator)
        total += nn.functional.interpolate(noise, tuple(size), mode="bilinear")
    return (127.5 + 40.0 * total).clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def compared(model: Network, path: Path, about: About, images_NCHW: Tensor) -> tuple[int, float]:
    """For how many images an exported file has the network's class, and the largest difference of its logits, as a
    share of the network's largest logit.

    Args:
        path: an exported file, or timm's folder.
        images_NCHW: uint8.
    """
    # timm's folder may have any name.
    run: Run = Deployable(_from_timm(path), about) if path.is_dir() else open_exported(path)[0]
    network, parts = Deployable(model, about), images_NCHW.split(_BATCH)
    expected_NK, found_NK = (torch.cat([each(part) for part in parts]) for each in (network, run))
    same = int((expected_NK.argmax(1) == found_NK.argmax(1)).sum())
    # A head of zeros, with which a training may begin, has no score but 0.
    return same, float((expected_NK - found_NK).abs().max() / (expected_NK.abs().max() or 1.0))


def _from_timm(folder: Path) -> Any:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def quantize(path: Path, images_NCHW: Tensor) -> None:
    """Compute an ONNX file's products in int8: weights by output, activations by their ranges on these uint8 images.

    Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, 2018;
    onnxruntime's static quantization, with QuantizeLinear and DequantizeLinear around each operator. A `UserError` if
    it is missing.
    """
    with refusing("dtype: int8 needs onnxruntime", ImportError, use="pip install 'pycls_fast[onnx]'"):
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._batches: Iterator[Tensor] = iter(images_NCHW.split(_BATCH))

        def get_next(self) -> dict[str, Any] | None:
            images_BCHW = next(self._batches, None)
            return None if images_BCHW is None else {"images": images_BCHW.numpy()}

    simplified = path.with_stem("simplified")
    quant_pre_process(path, simplified)
    quantize_static(simplified, path, Reader(), per_channel=True, weight_type=QuantType.QInt8)
    simplified.unlink()
