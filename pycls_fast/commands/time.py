"""Time an experiment: `pycls-fast time --config-name EXPERIMENT [mode=all] [key=value ...]`.

mode=train   the training step on one synthetic batch; needs no data
mode=model   the training step and the inference forward pass, likewise
mode=loader  only the input pipeline, from files (or data=synthetic) to batches on the device
mode=both    training steps fed by the loader
mode=all     model, loader and both

Variants are timed in turns and compared with the first, which shows differences far below the machine's own drift:

    pycls-fast time --config-name vit_s16 mode=model data.global_batch_size=8 \\
        "compare=[speed=reference,speed=reference speed.attention=sdpa,speed=fast]"
"""

import re
import shlex
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, Field

from pycls_fast.config import Purpose, RunConfig, Section, command_line, variant
from pycls_fast.errors import UserError


def _split(value: Any) -> Any:
    """`[a=1 b=2,c=3]` -> its items: without quotes, an `=` makes it a text to Hydra."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return tuple(value) if isinstance(value, list) else value
    return tuple(item.strip() for item in re.split(r",(?= *(?:$|[+~]*[a-z][\w./]*=))", value[1:-1]))


class Options(Section):
    """Keys of this tool only."""

    mode: Literal["train", "model", "loader", "both", "all"] = "all"
    """What is timed: the training step; model: that and the inference forward pass; the input pipeline; both: training
    fed by it; or all of these."""
    steps: Annotated[int, Field(gt=0)] = 5
    """The fewest timed steps in each turn."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps before the first turn; of loader and both, before each turn."""
    repeats: Annotated[int, Field(gt=0)] = 10
    """Turns of each variant."""
    seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """About how long a turn lasts at least: it has more steps if they take less time. The warm-up lasts half of it."""
    matmul_size: Annotated[int, Field(gt=0)] | None = None
    """The side of the matrices whose product is timed for comparison; null: by the device."""
    compare: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Variants, each a text of overrides; they are timed in turns and compared with the first."""
    output: str | None = None
    """A JSON file; null: timings/EXPERIMENT-TIME.json, or one in run_dir if that is set."""


def needs_data(options: Options) -> bool:
    """Whether images are read."""
    return options.mode not in ("train", "model")


def variants(config: RunConfig, options: Options) -> list[tuple[str, RunConfig]]:
    """Name and configuration of everything to time: the experiment, or its variants from `compare`."""
    if not options.compare:
        return [(config.config_name, config)]
    if len(options.compare) == 1:
        raise UserError("compare: needs 2 variants or more, the first is what the others are compared with; got 1")
    purpose = Purpose(needs_data=needs_data(options))
    made: list[tuple[str, RunConfig]] = []
    for position, text in enumerate(options.compare):
        try:
            changed = variant(shlex.split(text), purpose, options=Options)
        except UserError as error:
            raise UserError(*(f"compare: '{text}': {line}" for line in error.lines)) from error
        except ValueError as error:
            raise UserError(f"compare: cannot read '{text}' ({error})") from error
        name = text or "as configured"
        if text in options.compare[:position]:
            # Listing a variant twice shows the noise of the measurement.
            name += f" ({options.compare[: position + 1].count(text)})"
        made.append((name, changed))
    return made


def main(config: RunConfig, options: Options) -> int:
    """Time, print, write."""
    chosen = variants(config, options)
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.ledger import time_variants

    return time_variants(
        chosen,
        mode=options.mode,
        steps=options.steps,
        warmup_steps=options.warmup_steps,
        repeats=options.repeats,
        seconds=options.seconds,
        matmul_size=options.matmul_size,
        output=options.output,
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, about=__doc__, options=Options, needs_data=needs_data)
