"""What a choice costs: `python tools/ledger.py --config-name EXPERIMENT mode=gradients [key=value ...]`.

mode=gradients   a short training: how many gradients float16 cannot hold, without and with loss scaling, and how many
                 updates it loses without float32 master weights; JSON and a picture
"""

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import RunConfig, Section, command_line


class Options(Section):
    """Keys of this tool alone. The loss scale is tried on the gradients, it does not change the training."""

    mode: Literal["gradients"] = "gradients"
    steps: Annotated[int, Field(gt=0)] = 20
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    loss_scale: Annotated[float, Field(gt=0.0)] = 65536.0
    output: str | None = None


def main(config: RunConfig, options: Options) -> int:
    """Train, count, draw, write."""
    # torch takes seconds to import; a mistake in the configuration is told before that.
    from pycls_fast.ledger.gradients import count_gradients

    return count_gradients(
        config,
        steps=options.steps,
        warmup_steps=options.warmup_steps,
        loss_scale=options.loss_scale,
        output=options.output,
    )


if __name__ == "__main__":
    command_line(main, options=Options)
