"""Evaluate a checkpoint: `python tools/test_net.py weights=RUN_OR_CHECKPOINT [split=val] [output=FILE.json]`.

Without `--config-name` the configuration is the one that the weights were trained with: a run, a checkpoint and an
exported file say it. Weights of timm and torchvision are scored with the preprocessing that comes with them, beside the
published number: `--config-name deit_s16 weights=timm:deit_small_patch16_224.fb_in1k`; `preprocessing=config` takes the
configuration's instead.
"""

from typing import Literal

from pycls_fast.config import RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool alone: the split to score, a JSON file for the numbers, and whose preprocessing is taken."""

    split: str = "val"
    output: str | None = None
    preprocessing: Literal["weights", "config"] = "weights"


def main(config: RunConfig, options: Options) -> int:
    """Score the weights on a split."""
    # torch takes seconds to import; a mistake in the configuration is told before that.
    from pycls_fast.train.score import score

    return score(config, options.split, options.output, own_preprocessing=options.preprocessing == "weights")


if __name__ == "__main__":
    command_line(main, options=Options, config_of_weights=True)
