"""Exported files as other programs run them, compared with the network that they were made of; int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import refusing
from pycls_fast.models.export import About, Deployable
from pycls_fast.network import Network

Run = Callable[[Tensor], Tensor]
"""Bytes (B, C, H, W), uint8 -> logits (B, K)."""
# Images at a time.
_BATCH = 32


def _onnx(path: Path) -> Run:
    with refusing("exported: needs onnxruntime", ImportError, use="pip install 'pycls_fast[onnx]'"):
        import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images_BCHW: torch.from_numpy(session.run(["logits"], {"images": images_BCHW.numpy()})[0])


def _openvino(path: Path) -> Run:
    with refusing("exported: needs openvino", ImportError, use="pip install 'pycls_fast[openvino]'"):
        import openvino
    # By itself it computes in bfloat16 where a CPU can.
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images_BCHW: torch.from_numpy(compiled(images_BCHW.numpy())[0].copy())


def _program(path: Path) -> Run:
    # The function alone: a program is no module that can be set to evaluation.
    forward: Run = torch.export.load(path).module().forward
    return forward


_RUNNERS: dict[str, Callable[[Path], Run]] = {".onnx": _onnx, ".xml": _openvino, ".pt2": _program}


class ExportedNetwork(nn.Module):
    """An exported file on the CPU, in place of the network that it was made of.

    Args:
        path: `.onnx`, `.xml` (OpenVINO) or `.pt2`.
        mean, std: those of the images that it gets, which the file normalises itself.

    Raises:
        UserError: what runs it is missing, or it cannot be read.
    """

    def __init__(self, path: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Each library raises its own kinds.
        with refusing(f"exported: {path} is no .onnx, .xml or .pt2 file that can be read", Exception):
            self._run = _RUNNERS[path.suffix](path)
        self._mean_C11, self._std_C11 = (torch.tensor(each)[:, None, None] for each in (mean, std))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) of whole numbers, float32 -> logits (B, K)."""
        bytes_BCHW = (255.0 * (images_BCHW.cpu() * self._std_C11 + self._mean_C11)).round().to(torch.uint8)
        return self._run(bytes_BCHW).to(images_BCHW.device)


def drawn_images(about: About, count: int = 16) -> Tensor:
    """Images with structures of all sizes, as photographs have them: uint8 (N, 3, H, W), the same each time."""
    generator, size = torch.Generator().manual_seed(0), about.size
    total = torch.zeros(count, 3, *size)
    for cells in (1, 2, 4, 8, 16, max(size)):
        noise = torch.randn(count, 3, cells, cells, generator=generator)
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
    run: Run = Deployable(_from_timm(path), about) if path.is_dir() else _RUNNERS[path.suffix](path)
    network, parts = Deployable(model, about), images_NCHW.split(_BATCH)
    expected_NK, found_NK = (torch.cat([each(part) for part in parts]) for each in (network, run))
    same = int((expected_NK.argmax(1) == found_NK.argmax(1)).sum())
    # A head of zeros, with which a training may begin, has no score but 0.
    return same, float((expected_NK - found_NK).abs().max() / (expected_NK.abs().max() or 1.0))


def _from_timm(folder: Path) -> Any:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def quantize(path: Path, images_NCHW: Tensor) -> None:
    """Compute an ONNX file's products in int8: weights by output, activations by their ranges on these images.

    Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, 2018;
    onnxruntime's static quantization, with QuantizeLinear and DequantizeLinear around each operator.

    Args:
        path: of `to_onnx`, replaced.
        images_NCHW: uint8.

    Raises:
        UserError: onnxruntime is missing.
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
