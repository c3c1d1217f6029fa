"""Evaluate a checkpoint: `pycls-fast test weights=RUN_OR_CHECKPOINT [split=val] [output=FILE.json]`.

Without `--config-name` the configuration is the one that the weights were trained with, as stored in a run, a
checkpoint or an exported file. `split=all` scores all images of data without a validation split. Weights of timm and
torchvision are scored with their own preprocessing, beside the published number: `--config-name deit_s16
weights=timm:deit_small_patch16_224.fb_in1k`; `preprocessing=config` uses the configuration's instead.
`predictions=FILE.csv` lists every image with its class, the predicted one, that one's probability, and the loss, the
worst image first.
"""

from typing import Literal, NoReturn

from pycls_fast.config import Purpose, RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool only."""

    split: str = "val"
    """What is scored: val, train, test if the data has one, or all for a dataset that is not split into train and
    val."""
    output: str | None = None
    """A JSON file for the numbers."""
    predictions: str | None = None
    """A CSV file that lists every image with its class, the predicted one, its probability and the loss."""
    preprocessing: Literal["weights", "config"] = "weights"
    """Whose preprocessing published weights are scored with: their own, or the configuration's."""


def main(config: RunConfig, options: Options) -> int:
    """Score the weights on a split."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train.tasks.score import score

    return score(
        config,
        options.split,
        options.output,
        predictions=options.predictions,
        own_preprocessing=options.preprocessing == "weights",
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, about=__doc__, options=Options, config_of_weights=True, purpose=Purpose(scores_sets=True))
