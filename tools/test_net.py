"""Evaluate a checkpoint: `python tools/test_net.py weights=RUN_OR_CHECKPOINT [split=val] [output=FILE.json]`.

Without `--config-name` the configuration is the one that the run was trained with.
"""

from pycls_fast.config import RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool alone: the split to score, and a JSON file for the numbers."""

    split: str = "val"
    output: str | None = None


def main(config: RunConfig, options: Options) -> int:
    """Score the weights on a split."""
    # torch takes seconds to import; a mistake in the configuration is told before that.
    from pycls_fast.train.score import score

    return score(config, options.split, options.output)


if __name__ == "__main__":
    command_line(main, options=Options, config_of_weights=True)
