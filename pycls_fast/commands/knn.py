"""Classify by nearest neighbours, untrained: `pycls-fast knn model=vit_b16 weights=SOURCE data.root=PATH`.

Compares features before the head; the k=20 nearest training images vote with exp(similarity / temperature). The
configuration is the one stored with the weights, if there is one; else that of the experiment finetune. Weights of timm
and torchvision are scored with their own preprocessing; `preprocessing=config` uses the configuration's instead.
"""

from typing import Annotated, Literal, NoReturn

from pydantic import Field

from pycls_fast.config import RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool only."""

    k: Annotated[int, Field(gt=0)] = 20
    """The number of neighbours that vote."""
    temperature: Annotated[float, Field(gt=0.0)] = 0.07
    """A vote counts exp(similarity / temperature)."""
    split: str = "val"
    """The split that is classified by the neighbours in train."""
    output: str | None = None
    """A JSON file for the numbers."""
    preprocessing: Literal["weights", "config"] = "weights"
    """Whose preprocessing published weights get: their own, or the configuration's."""


def main(config: RunConfig, options: Options) -> int:
    """Score the features on a split."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train.tasks.knn import score_neighbours

    return score_neighbours(
        config,
        k=options.k,
        temperature=options.temperature,
        split=options.split,
        output=options.output,
        own_preprocessing=options.preprocessing == "weights",
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, about=__doc__, default="finetune", options=Options, config_of_weights=True)
