"""Find a learning rate: `pycls-fast lr-find --config-name EXPERIMENT data.root=PATH [steps=100]`.

Trains `steps` steps of the experiment with optim.lr rising from lr_min to lr_max, and prints where the loss falls
fastest and where it diverges. Writes lr_find.json and lr_find.png into output=FOLDER (default: a new one in lr_find/).
Compiles nothing unless speed.compile is set: there are too few steps to make up for it.
"""

from typing import Annotated, NoReturn

from pydantic import Field

from pycls_fast.config import Purpose, RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool only."""

    steps: Annotated[int, Field(ge=10)] = 100
    """The number of training steps, with a higher rate in each; fewer if the loss blows up."""
    lr_min: Annotated[float, Field(gt=0.0)] = 1e-7
    """optim.lr of the first step."""
    lr_max: Annotated[float, Field(gt=0.0)] = 1.0
    """optim.lr of the last step."""
    output: str | None = None
    """The folder for the numbers and the picture; null: a new one in lr_find/."""


def main(config: RunConfig, options: Options) -> int:
    """Run the sweep and print the result."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train.tasks.lr_range import lr_range_test

    return lr_range_test(
        config, steps=options.steps, lr_min=options.lr_min, lr_max=options.lr_max, output=options.output
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, about=__doc__, default="finetune", options=Options, purpose=Purpose(trains=True))
