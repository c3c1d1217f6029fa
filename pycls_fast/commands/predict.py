"""Classify images: `pycls-fast predict RUN IMAGES... [key=value ...]`.

RUN          a run folder (its best checkpoint), a checkpoint (RUN/checkpoints/step_000000100), or a safetensors file
             from pycls-fast export; each includes class names and preprocessing
IMAGES       files, folders (searched recursively), patterns in quotes ('cats/*.jpg', '**/*.png'), or - for a list of
             files on standard input

    format=      table, json, csv (written row by row), or sheet: a contact sheet with the predictions
    output=      a file; default: standard output, for sheet predictions.png (then predictions_2.png, ...)
    topk=5       number of classes per image
    which=       auto (the average of the weights if there is one), model or ema
    device=      auto, cpu or cuda
    precision=   fp32, amp_bf16, amp_fp16, bf16 or fp16
    batch_size=  images at a time (64)
    num_workers= processes that read and decode (none for few images, else one per core)
    imports=     for an exported file of a model of your own: the modules that register it ([MODULE])

Unreadable files are listed at the end. Exit status: 0, or 2 if no image could be read.
"""

from typing import Annotated, Literal, NoReturn

from pydantic import Field

from pycls_fast.config import ModuleNames, Section, command_line
from pycls_fast.errors import UserError

Positive = Annotated[int, Field(gt=0)]


class Options(Section):
    """Keys of this tool."""

    run: Annotated[str, Field(min_length=1)]
    images: tuple[str, ...] = ()
    format: Literal["table", "json", "csv", "sheet"] = "table"
    output: str | None = None
    topk: Positive = 5
    which: Literal["auto", "model", "ema"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "amp_bf16", "amp_fp16", "bf16", "fp16"] = "fp32"
    batch_size: Positive | None = None
    num_workers: Annotated[int, Field(ge=0)] | None = None
    imports: ModuleNames = ()


def main(options: Options) -> int:
    """Predict and write."""
    if not options.images:
        raise UserError("images: none were given; give files, folders or patterns after the run")
    # torch takes seconds to import; mistakes on the command line are reported before that.
    from pycls_fast.config.imports import import_modules
    from pycls_fast.inference.predict import predict

    given = dict(options)
    import_modules(given.pop("imports"))
    return predict(**given)


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, default=None, options=Options, about=__doc__, words=("run", "images"))
