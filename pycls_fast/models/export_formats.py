"""Models as files for other programs: a folder for timm, ONNX, OpenVINO, torch.export; and such files, opened and run.

Exports include class names and preprocessing. All but timm's include the normalisation: they take cropped uint8 images.
A model that timm does not have, and a format whose library is missing, are a `UserError`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pycls_fast.errors import UserError, refusing
from pycls_fast.files import PROGRAMS
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.pretrained import to_resnet, to_timm_vit
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network
from pycls_fast.values import Size


@dataclass(frozen=True)
class About:
    """The description of a model in an exported file.

    Attributes:
        classes: names of the outputs, in their order.
        how: what is done to an image before the network sees it, under the names of the file's metadata
            (`train/saved_weights.py`, `preprocessing`).
        texts: the file's metadata, in strings, which all formats can hold.
    """

    classes: Sequence[str]
    how: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        return Size.of(self.how["image_size"])


class Deployable(nn.Module):
    """The model with normalisation in front: bytes (B, C, H, W), uint8, RGB -> logits (B, K), float32."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, model: nn.Module, about: About) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()
        self.register_buffer("mean_C11", 255.0 * torch.tensor(about.how["mean"]).view(-1, 1, 1))
        self.register_buffer("std_C11", 255.0 * torch.tensor(about.how["std"]).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.model((images.to(torch.float32) - self.mean_C11) / self.std_C11)


def to_timm(model: Network, folder: Path, about: About) -> None:
    """Write a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens, as the same function.

    With `num_classes=` and `in_chans=`, timm treats it like its own models: it initialises a new head (0: no head) and
    adapts the first layer. Outputs after the last class are named by their number.
    """
    import timm

    architecture, arguments, state = timm_form(model)
    known: Any = timm.get_pretrained_cfg(architecture)
    known = model.network.default_cfg if isinstance(model, TimmNetwork) else known.to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    # A file that holds our configuration is expected to have tensors in our names.
    texts = {key: text for key, text in about.texts.items() if key != "config"}
    # safetensors takes contiguous tensors that share no memory.
    saved = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    save_file(saved, folder / "model.safetensors", {**texts, "format": "pt"})
    height = about.size.height
    head = model.last_layer()
    names = [*about.classes, *(f"output {label}" for label in range(len(about.classes), head.out_features))]
    config = {
        "architecture": architecture,
        "num_classes": head.out_features,
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": head.out_features,
            # These tell timm what to drop and what to adapt.
            "classifier": known["classifier"],
            "first_conv": known.get("first_conv"),
            "input_size": [3, *about.size],
            "mean": list(about.how["mean"]),
            "std": list(about.how["std"]),
            # timm resizes to the size divided by this, rounded down.
            "crop_pct": math.nextafter(height / round(height / about.how["crop_ratio"]), 0),
            "crop_mode": about.how["crop"],
            "interpolation": about.how["interpolation"],
        },
        # timm would also read them in `pretrained_cfg`; transformers reads them only here.
        "label_names": names,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def timm_form(model: Network) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """timm's name for a model, the arguments that make timm build the same, and its tensors in timm's names.

    Raises:
        UserError: a model that timm does not have; names the option that prevents it.
    """
    state = dict(model.state_dict())
    if isinstance(model, TimmNetwork):
        return model.name, model.arguments, {name.removeprefix("network."): value for name, value in state.items()}
    if isinstance(model, ResNet):
        return _timm_resnet(model, state)
    if isinstance(model, VisionTransformer):
        return _timm_vit(model, state)
    raise _unlike_timm(type(model).__name__)


def _unlike_timm(what: str) -> UserError:
    return UserError(f"format: timm has no {what}; export as safetensors, onnx or program")


def _timm_vit(model: VisionTransformer, state: dict[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    block: Any = model.blocks[0]
    width, hidden = block.norm1.weight.shape[0], block.mlp.fc1.weight.shape[0]
    taught = model.distillation_token is not None
    for is_unknown_to_timm, key in (
        ("stem.convs.0.weight" in state, "model.stem=conv"),
        (any(".router." in name for name in state), "model.experts"),
        (model.pre_logits is not None, "model.pre_logits"),
        (taught and bool(model.registers), "model.distillation_token with model.registers"),
        (taught and model.position_tokens == "patches", "model.distillation_token with model.position_tokens=patches"),
        (model.norm.eps != 1e-6, f"model.norm_eps={model.norm.eps:g}"),
    ):
        if is_unknown_to_timm:
            raise _unlike_timm(key)
    # timm gets fixed positions in the place of learned ones.
    state.setdefault("positions.value", model.positions.value.detach())
    pooled_norm = model.classifier != "token" and model.classifier_norm == "after_pool"
    arguments = {
        "img_size": model.image_size.typed,
        "patch_size": state["stem.projection.weight"].shape[-1],
        "embed_dim": width,
        "depth": len(model.blocks),
        "num_heads": block.attention.heads,
        "mlp_ratio": hidden / width,
        "qk_norm": block.attention.query_norm is not None,
        "init_values": None if block.scale1 is None else block.scale1.start,
        "class_token": model.class_token is not None,
        "reg_tokens": 0 if model.registers is None else model.registers.value.shape[0],
        "no_embed_class": model.position_tokens == "patches",
        "global_pool": {"token": "token", "pooled": "avg", "map": "map"}[model.classifier],
        "fc_norm": pooled_norm,
    }
    if taught:
        # timm's distilled model takes no such arguments.
        for name in ("class_token", "reg_tokens", "fc_norm"):
            del arguments[name]
    name = "deit_base_distilled_patch16_224" if taught else "vit_base_patch16_224"
    return name, arguments, to_timm_vit(state, norm="fc_norm" if pooled_norm else "norm")[0]


def _timm_resnet(model: ResNet, state: dict[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    if model.stem.pool is None:
        raise _unlike_timm("model.stem=small")
    bottleneck = "stages.0.0.conv3.weight" in state
    first = state["stages.0.0.conv2.weight"].shape
    groups = first[0] // first[1] if bottleneck else 1
    arguments: dict[str, Any] = {
        "layers": [len(stage) for stage in model.stages],  # type: ignore[arg-type]
        "cardinality": groups,
        "base_width": first[0] // groups if bottleneck else 64,
        "avg_down": model.shortcut == "pool",
    }
    # With the stem of a ResNet-D.
    name = ("resnet50" if bottleneck else "resnet18") + ("d" if len(model.stem.deep) else "")
    return name, arguments, to_resnet(state, shortcut=model.shortcut)


def to_onnx(model: Network, path: Path, about: About) -> None:
    """Write an ONNX file: `images` (B, C, H, W), uint8 -> `logits` (B, K), with `about.texts` as metadata."""
    with refusing("format: onnx needs onnxscript", ImportError, use="pip install 'pycls_fast[onnx]'"):
        import onnxscript  # noqa: F401  # torch's exporter uses it
    exported, config = _exported(model, about), torch.fx.config
    before = config.do_not_emit_stack_traces
    # `_exported` has removed them, and torch would take the stack again at each node that it adds, for seconds.
    config.do_not_emit_stack_traces = True
    try:
        program = torch.onnx.export(
            exported,
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            # The exported program has only a number for the name of its axis.
            dynamic_shapes={"images": {0: "batch"}},
            # No step-by-step report from the exporter.
            verbose=False,
        )
    finally:
        config.do_not_emit_stack_traces = before
    assert program is not None
    program.model.metadata_props.update(about.texts)
    program.save(path)


def to_openvino(model: Network, path: Path, about: About) -> None:
    """Write OpenVINO's FILE.xml and FILE.bin, in float32: as `to_onnx`, with the texts as its `rt_info`."""
    with refusing("format: openvino needs openvino", ImportError, use="pip install 'pycls_fast[openvino]'"):
        import openvino
    program = openvino.convert_model(_exported(model, about))
    for port, name in ((program.inputs[0], "images"), (program.outputs[0], "logits")):
        port.get_tensor().set_names({name})
    program.reshape({"images": openvino.PartialShape([-1, 3, *about.size])})
    for name, text in about.texts.items():
        program.set_rt_info(text, name)
    openvino.save_model(program, path, compress_to_fp16=False)


def to_program(model: Network, path: Path, about: About) -> None:
    """Write a torch.export program (`.pt2`): as `to_onnx`, with the texts as extra files."""
    torch.export.save(_exported(model, about), path, extra_files=dict(about.texts))


def _exported(model: Network, about: About) -> torch.export.ExportedProgram:
    images = torch.zeros(2, 3, *about.size, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.export.export(
            Deployable(model, about), (images,), dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}}
        )
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            # The trace contains paths of source files on this machine.
            node.meta.pop("stack_trace", None)
    return program


FORMATS: dict[str, Callable[[Network, Path, About], None]] = {
    "timm": to_timm,
    "onnx": to_onnx,
    "openvino": to_openvino,
    "program": to_program,
}
"""Formats that are written from the model: name -> function of model, path and description.

"safetensors", in our names, needs only the tensors (`train/saved_weights.py`).
"""
SUFFIXES = {"safetensors": ".safetensors", "timm": "", "onnx": ".onnx", "openvino": ".xml", "program": ".pt2"}
"""Suffix of the path that each format writes; timm's is a folder."""


Predict = Callable[[Tensor], Tensor]
"""Bytes (B, C, H, W), uint8 -> logits (B, K)."""
TEXTS = ("classes", "preprocessing", "weights", "step", "config")
"""The metadata of a file that is read again."""
# Images at a time.
_BATCH = 32
# Otherwise onnxruntime reports what it runs to its makers, and leaves a file in the folder for temporary files.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def _onnx(path: Path) -> tuple[Predict, Mapping[str, str]]:
    with refusing("weights: an ONNX file needs onnxruntime", ImportError, use="pip install 'pycls_fast[onnx]'"):
        import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    return lambda images_BCHW: torch.from_numpy(session.run(["logits"], {"images": images_BCHW.numpy()})[0]), texts


def _openvino(path: Path) -> tuple[Predict, Mapping[str, str]]:
    with refusing("weights: OpenVINO's file needs openvino", ImportError, use="pip install 'pycls_fast[openvino]'"):
        import openvino
    model = openvino.Core().read_model(path)
    # By default it computes in bfloat16 if the CPU can.
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    texts = {key: model.get_rt_info(key).astype(str) for key in TEXTS if model.has_rt_info(key)}
    return lambda images_BCHW: torch.from_numpy(compiled(images_BCHW.numpy())[0].copy()), texts


def _program(path: Path) -> tuple[Predict, Mapping[str, str]]:
    # Only the function: an exported program is not a module that can be set to evaluation mode.
    return torch.export.load(path).module().forward, {}


_OPENERS = dict(zip(PROGRAMS, (_onnx, _openvino, _program), strict=True))


def open_exported(path: Path) -> tuple[Predict, Mapping[str, str]]:
    """An exported file as a function, and its metadata (`About.texts`).

    Raises:
        UserError: the library that runs it is missing, or it cannot be read.
    """
    # Each library raises its own kinds of errors.
    with refusing(f"weights: {path} cannot be read", Exception):
        return _OPENERS[path.suffix](path)


class ExportedNetwork(Network):
    """An exported file on the CPU, in place of the network that it was made from.

    Args:
        predict: from `open_exported`.
        mean, std: those with which its input images are normalised; this is undone, as the file normalises them itself.
    """

    def __init__(self, predict: Predict, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self._predict = predict
        self._mean_C11, self._std_C11 = (torch.tensor(each)[:, None, None] for each in (mean, std))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) of whole numbers, float32 -> logits (B, K)."""
        bytes_BCHW = (255.0 * (images_BCHW.cpu() * self._std_C11 + self._mean_C11)).round().to(torch.uint8)
        with refusing("weights: the file cannot be run", Exception):
            return self._predict(bytes_BCHW).to(images_BCHW.device)


def drawn_images(about: About) -> Tensor:
    """Images with structures of all sizes, as photographs have them: uint8 (16, 3, H, W), the same each time."""
    generator, size = torch.Generator().manual_seed(0), about.size
    total = torch.zeros(16, 3, *size)
    for cells in (1, 2, 4, 8, 16, max(size)):
        noise = torch.randn(16, 3, cells, cells, generator=generator)
        total += nn.functional.interpolate(noise, tuple(size), mode="bilinear")
    return (127.5 + 40.0 * total).clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def compare_with_file(model: Network, path: Path, about: About, images_NCHW: Tensor) -> tuple[int, float]:
    """The number of images for which an exported file predicts the network's class, and the largest difference of their
    logits, as a share of the network's largest logit.

    Args:
        path: an exported file, or timm's folder.
        images_NCHW: uint8.
    """
    exported: Predict
    if path.is_dir():
        # timm's folder may have any name.
        import timm

        exported = Deployable(timm.create_model(f"local-dir:{path}", pretrained=True), about)
    else:
        exported, _ = open_exported(path)
    network, parts = Deployable(model, about), images_NCHW.split(_BATCH)
    expected_NK, found_NK = (torch.cat([each(part) for part in parts]) for each in (network, exported))
    same = int((expected_NK.argmax(1) == found_NK.argmax(1)).sum())
    # The logits of a head of zeros, with which training may begin, are all 0.
    return same, float((expected_NK - found_NK).abs().max() / (expected_NK.abs().max() or 1.0))


def quantize(path: Path, images_NCHW: Tensor) -> None:
    """Compute an ONNX file's products in int8: weights by output, activations by their ranges on these uint8 images.

    Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, 2018;
    onnxruntime's static quantization, with QuantizeLinear and DequantizeLinear around each operator. A `UserError` if
    it is missing.
    """
    with refusing("dtype: int8 needs onnxruntime", ImportError, use="pip install 'pycls_fast[onnx]'"):
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = ({"images": images_BCHW.numpy()} for images_BCHW in images_NCHW.split(_BATCH))

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    simplified = path.with_stem("simplified")
    # It warns of each weight with a single axis, as those of norms, which it then quantizes as a whole.
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        quant_pre_process(path, simplified)
        quantize_static(simplified, path, Reader(), per_channel=True, weight_type=QuantType.QInt8)
    finally:
        logging.disable(before)
    simplified.unlink()
