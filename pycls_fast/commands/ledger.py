"""What each choice gains and costs: `pycls-fast ledger --config-name EXPERIMENT ladder=NAME [key=value ...]`.

Every variant of a ladder (configs/ladder/NAME.yaml) is timed in turns with the others, compared with float64, and
trained with several seeds; a page and `ledger.json` are written to `output`. Started again, it resumes.

mode=cumulative      each variant on top of those before it
mode=one_at_a_time   each variant by itself on the baseline
mode=leave_one_out   all variants but one
mode=gradients       a short training: how many gradients float16 cannot hold, and how many updates it loses
mode=numerics        logit and gradient errors of one setting against float64, as JSON in `output`

    pycls-fast ledger --config-name vit_digits ladder=modern seeds=3 switches=[attention,optimizer] dry_run=true
    pycls-fast ledger report LEDGER.json [output=FOLDER]
    pycls-fast ledger check BASELINE.json NEW.json [tolerance=0.05] [absolute=true]

`report` draws the page of a `ledger.json` again, by default beside it. `check` exits with 1 if a variant has lost speed
or accuracy; absolute=false compares only speed-ups.
"""

import sys
from typing import Literal, NoReturn

from pycls_fast.config import Purpose, RunConfig, Section, command_line
from pycls_fast.config.ladder import LadderSettings, Repeats, read_ladder
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.values import NonNegativeInt, PositiveFloat, PositiveInt


class Named(Section):
    """A ladder, by its name or the path of its file."""

    name: str = "modern"
    """Its name, or the path of its file."""

    def __str__(self) -> str:
        return self.name


class Options(Repeats):
    """Keys of this tool only."""

    mode: Literal["cumulative", "one_at_a_time", "leave_one_out", "gradients", "numerics"] | None = None
    """How variants are combined (cumulative, one_at_a_time, leave_one_out), or a single measurement: gradients,
    numerics; null: the ladder's own."""
    ladder: Named = Named()
    """The variants: a ladder of configs/ladder/, or a file."""
    switches: tuple[str, ...] = ()
    """Variants to run, by name or by a key that they set; []: all."""
    steps: PositiveInt | None = None
    """The least number of steps in a timing, or the steps of mode=gradients and mode=numerics; null: 10, or 20."""
    warmup_steps: NonNegativeInt | None = None
    """The least number of steps before a timing, or before the counted steps of mode=gradients; null: 5, or 20."""
    dry_run: bool = False
    """Print the plan and an estimate of its time, from a few steps of the first variant."""
    accept_code: bool = False
    """Resume in a folder that was measured before the code changed."""
    loss_scale: PositiveFloat = 65536.0
    """mode=gradients: the scale that is tried on the gradients."""
    output: str | None = None
    """The folder of the report; null: ledgers/EXPERIMENT-LADDER-MODE, in which the ledger resumes. A JSON file with
    mode=gradients and mode=numerics."""


# Keys that the modes without a ladder read.
TAKEN = {
    "gradients": ("steps", "warmup_steps", "loss_scale", "output"),
    "numerics": ("steps", "output"),
}


def refuse_unread(options: Options) -> None:
    """Raise a `UserError` with a line for each key that was given and that the mode does not read."""
    mode = options.mode or "cumulative"
    taken = TAKEN.get(mode)
    given = [key for key in Options.model_fields if key in options.model_fields_set and key != "mode"]
    if taken is None:
        unread = [(key, "it is for mode=gradients") for key in given if key == "loss_scale"]
    else:
        unread = [(key, f"it takes {', '.join(taken)}") for key in given if key not in taken]
    if unread:
        lines = (f"{key}: mode={mode} does not read it; {instead}; leave it out" for key, instead in unread)
        raise UserError(*lines)


def main(config: RunConfig, options: Options) -> int:
    """Measure, write, draw."""
    refuse_unread(options)
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    if options.mode == "gradients":
        from pycls_fast.ledger.measure.gradients import count_gradients

        return count_gradients(
            config,
            steps=options.steps or 20,
            warmup_steps=20 if options.warmup_steps is None else options.warmup_steps,
            loss_scale=options.loss_scale,
            output=options.output,
        )
    if options.mode == "numerics":
        from pycls_fast.ledger.measure.numerics import measure_numerics

        return measure_numerics(config, steps=options.steps or 20, output=options.output or "numerics.json")
    from pycls_fast.config.variants import config_folders, same_command, variant
    from pycls_fast.ledger.ladder.folder import default_folder
    from pycls_fast.ledger.ladder.run import run_ladder

    ladder = read_ladder(options.ladder.name, config_folders())
    mode = options.mode or ladder.mode or ladder.default_mode
    own = {key: getattr(options, key) for key in Repeats.model_fields}
    timed = {key: value for key in ("steps", "warmup_steps") if (value := getattr(options, key)) is not None}
    settings = LadderSettings(mode=mode, **own, **timed)
    purpose = Purpose(needs_data=False, trains=settings.seeds > 0)
    output = options.output or default_folder(config.config_name, options.ladder.name, mode, options.switches)
    return run_ladder(
        config,
        ladder,
        settings,
        switches=options.switches,
        base=same_command(options=Options),
        compose=lambda overrides: variant(overrides, purpose, options=Options),
        folder=user_path(output),
        dry_run=options.dry_run,
        configs=config_folders(),
        accept_code=options.accept_code,
    )


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    if sys.argv[1:2] == ["check"]:
        from pycls_fast.ledger.report.gate import check

        sys.exit(check(sys.argv[2:]))
    if sys.argv[1:2] == ["report"]:
        from pycls_fast.ledger.report.page import redraw

        sys.exit(redraw(sys.argv[2:]))
    command_line(main, about=__doc__, options=Options, purpose=Purpose(trains=True))
