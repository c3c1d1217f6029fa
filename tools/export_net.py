"""One file of weights from any checkpoint: `python tools/export_net.py weights=RUN output=FILE.safetensors`.

    weights=   a run folder (its best checkpoint), a checkpoint (RUN/checkpoints/step_000000100), saved by any number
               of ranks under any strategy, or an exported file
    output=    the file to write, in the safetensors format, with the network's plain parameter names
    which=     auto (the average of the weights where there is one), model or ema
    dtype=     float32 (left out: as saved), bfloat16 or float16, of all that is floating-point
    overwrite= true: write over an existing file

Besides the weights the file holds, as JSON texts in its metadata: classes, model, preprocessing (image_size,
crop_ratio, interpolation, mean, std), config, step, weights (model or ema), versions. It loads again with
weights=FILE.safetensors.
"""

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import Section, options_line


class Options(Section):
    """Keys of this tool."""

    weights: Annotated[str, Field(min_length=1)]
    output: Annotated[str, Field(min_length=1)]
    which: Literal["auto", "model", "ema"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    overwrite: bool = False


def main(options: Options) -> int:
    """Export and say what was written."""
    # torch takes seconds to import; a mistake on the command line is told before that.
    from pycls_fast.train.export import export

    return export(
        options.weights,
        options.output,
        which=options.which,
        dtype=options.dtype,
        overwrite=options.overwrite,
    )


if __name__ == "__main__":
    options_line(main, Options)
