"""Export a checkpoint to other programs: `pycls-fast export weights=RUN output=FILE.safetensors [format=...]`.

    weights=   a run folder (its best checkpoint), a checkpoint (RUN/checkpoints/step_000000100), saved by any number
               of ranks under any strategy, or an exported file
    format=    safetensors: the weights with the network's plain parameter names; weights=FILE loads them here
               timm:        a folder that timm.create_model('local-dir:FOLDER', pretrained=True) opens
               onnx:        FILE.onnx, images (B, C, size, size) as bytes -> logits (pip install -e '.[onnx]')
               program:     FILE.pt2 of torch.export, with the same input and output
    output=    the file (or folder) to write
    which=     auto (the average of the weights if there is one), model or ema
    dtype=     float32, bfloat16 or float16 for all floating-point tensors (default: as saved); safetensors and timm
    overwrite= true: overwrite an existing file; of a folder, only the files of the export
    imports=   if weights= is an exported file of a model of your own: the modules that register it ([MODULE])

All formats carry class names and preprocessing (image_size, crop_ratio, crop, interpolation, mean, std), as JSON
strings in their metadata, for timm in config.json; onnx and program include the normalisation. The safetensors file
also has the model's settings and the whole configuration.
"""

from typing import Annotated, Literal, NoReturn

from pydantic import Field

from pycls_fast.config import ModuleNames, Section, command_line


class Options(Section):
    """Keys of this tool."""

    weights: Annotated[str, Field(min_length=1)]
    output: Annotated[str, Field(min_length=1)]
    format: Literal["safetensors", "timm", "onnx", "program"] = "safetensors"
    which: Literal["auto", "model", "ema"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    overwrite: bool = False
    imports: ModuleNames = ()


def main(options: Options) -> int:
    """Export and print what was written."""
    # torch takes seconds to import; mistakes on the command line are reported before that.
    from pycls_fast.config.imports import import_modules
    from pycls_fast.train.export import export

    import_modules(options.imports)
    return export(
        options.weights,
        options.output,
        which=options.which,
        dtype=options.dtype,
        overwrite=options.overwrite,
        format=options.format,
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, default=None, options=Options, about=__doc__)
