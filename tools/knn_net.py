"""Classify by nearest neighbours, untrained: `python tools/knn_net.py model=vit_b16 weights=SOURCE data.root=PATH`.

Compares features before the head; the k=20 nearest training images vote with exp(similarity / temperature). The
configuration is the one stored with the weights, if there is one; else that of the experiment finetune. Weights of timm
and torchvision are scored with their own preprocessing; `preprocessing=config` uses the configuration's instead.
"""

if __name__ == "__main__":
    import pycls_fast.ctrl_c  # noqa: F401

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool only: neighbours, temperature of their votes, split, JSON file, whose preprocessing."""

    k: Annotated[int, Field(gt=0)] = 20
    temperature: Annotated[float, Field(gt=0.0)] = 0.07
    split: str = "val"
    output: str | None = None
    preprocessing: Literal["weights", "config"] = "weights"


def main(config: RunConfig, options: Options) -> int:
    """Score the features on a split."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train.knn import score_neighbours

    return score_neighbours(
        config,
        k=options.k,
        temperature=options.temperature,
        split=options.split,
        output=options.output,
        own_preprocessing=options.preprocessing == "weights",
    )


if __name__ == "__main__":
    command_line(main, default="finetune", options=Options, config_of_weights=True)
