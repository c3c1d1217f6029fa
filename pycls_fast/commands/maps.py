"""Where a network looks, as pictures: `pycls-fast maps RUN IMAGES... [key=value ...]`.

RUN and IMAGES as for `pycls-fast predict`. Draws one row per image: the crop that the network sees with its prediction,
and over it

    kind=attention   attention of the class token (else the mean over the patches, or the pooling's own query) in the
                     last block, for each head (heads=false: only their mean)
    kind=rollout     attention through all blocks (Abnar and Zuidema 2020)
    kind=features    the last features of each patch: their first three principal components over all given images as
                     red, green and blue
    kind=class       evidence for the predicted class (Grad-CAM), for ResNets

    output=          a PNG file; default: attention.png, ...
    opacity=0.7      opacity of the map over the image
    which=           auto (the average of the weights if there is one), model or ema
    device=          auto, cpu or cuda
"""

from typing import Annotated, Literal, NoReturn

from pydantic import Field

from pycls_fast.config import Section, command_line
from pycls_fast.errors import UserError


class Options(Section):
    """Keys of this tool."""

    run: Annotated[str, Field(min_length=1)]
    images: tuple[str, ...] = ()
    kind: Literal["attention", "rollout", "features", "class"] = "attention"
    output: str | None = None
    heads: bool = True
    opacity: Annotated[float, Field(ge=0.0, le=1.0)] = 0.7
    which: Literal["auto", "model", "ema"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


def main(options: Options) -> int:
    """Compute and draw."""
    if not options.images:
        raise UserError("images: none were given; give files, folders or patterns after the run")
    # torch takes seconds to import; mistakes on the command line are reported before that.
    from pycls_fast.inference.map_pictures import draw_maps

    return draw_maps(**dict(options))


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, default=None, options=Options, about=__doc__, words=("run", "images"))
