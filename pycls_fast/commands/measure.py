"""`pycls-fast time` and `pycls-fast ledger`."""

import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from pycls_fast.config import Purpose, RunConfig, Section, command, variant
from pycls_fast.config.ladder import LadderSettings, Repeats, ladder_of, read_ladder
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.values import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate


def _split(value: Any) -> Any:
    """`[a=1 b=2,c=3]` -> its items: without quotes, an `=` makes it a text to Hydra."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return tuple(value) if isinstance(value, list) else value
    return tuple(item.strip() for item in re.split(r",(?= *(?:$|[+~]*[a-z][\w./]*=))", value[1:-1]))


def _listed(value: Any) -> Any:
    """`[a=1,b]` -> its items: without quotes, an `=` makes it a text to Hydra."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return tuple(item.strip() for item in value[1:-1].split(",") if item.strip())
    return tuple(value) if isinstance(value, list) else value


class TimeOptions(Section):
    """Keys of `pycls-fast time`."""

    mode: Literal["train", "model", "loader", "both", "all"] = "all"
    """What is timed: the training step; model: that and the inference forward pass; the input pipeline; both: training
    fed by it; or all of these."""
    steps: PositiveInt = 5
    """The fewest timed steps in each turn."""
    warmup_steps: NonNegativeInt = 5
    """Steps before the first turn; of loader and both, before each turn."""
    repeats: PositiveInt = 10
    """Turns of each variant."""
    seconds: NonNegativeFloat = 0.0
    """About how long a turn lasts at least: it has more steps if they take less time. The warm-up lasts half of it."""
    matmul_size: PositiveInt | None = None
    """The side of the matrices whose product is timed for comparison; null: by the device."""
    compare: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Variants, each a text of overrides; they are timed in turns and compared with the first."""
    output: str | None = None
    """A JSON file; null: timings/EXPERIMENT-TIME.json, or one in run_dir if that is set."""

    @property
    def reads_images(self) -> bool:
        """Whether images are read."""
        return self.mode not in ("train", "model")


def variants(config: RunConfig, options: TimeOptions) -> list[tuple[str, RunConfig]]:
    """Name and configuration of everything to time: the experiment, or its variants from `compare`."""
    if not options.compare:
        return [(config.config_name, config)]
    purpose = Purpose(needs_data=options.reads_images)
    made: list[tuple[str, RunConfig]] = []
    for position, text in enumerate(options.compare):
        try:
            changed = variant(shlex.split(text), purpose, options=TimeOptions)
        except (UserError, ValueError) as error:
            raise UserError(*(f"compare: '{text}': {line}" for line in str(error).splitlines())) from error
        name = text or "as configured"
        if text in options.compare[:position]:
            # Listing a variant twice shows the noise of the measurement.
            name += f" ({options.compare[: position + 1].count(text)})"
        made.append((name, changed))
    return made


@command(options=TimeOptions, needs_data=lambda options: options.reads_images)
def time(config: RunConfig, options: TimeOptions) -> int:
    """Time an experiment: `pycls-fast time --config-name EXPERIMENT [mode=all] [key=value ...]`.

    mode=train   the training step on one synthetic batch; needs no data
    mode=model   the training step and the inference forward pass, likewise
    mode=loader  only the input pipeline, from files (or data=synthetic) to batches on the device
    mode=both    training steps fed by the loader
    mode=all     model, loader and both

    Variants are timed in turns and compared with the first, which shows differences far below the machine's own drift:

        pycls-fast time --config-name vit_s16 mode=model data.global_batch_size=8 \
            "compare=[speed=reference,speed=reference speed.attention=sdpa,speed=fast]"
    """
    chosen = variants(config, options)
    from pycls_fast.ledger import time_variants

    return time_variants(chosen, **{key: value for key, value in options if key != "compare"})


class Named(Section):
    """A ladder, by its name or the path of its file."""

    name: str = "auto"
    """Its name, or the path of its file; auto: modern, or of the experiment as it is if there are switches."""

    def __str__(self) -> str:
        return self.name


class LedgerOptions(Repeats):
    """Keys of `pycls-fast ledger`."""

    mode: Literal["crossed", "cumulative", "gradients", "numerics"] | None = None
    """What is timed: each variant by itself (crossed), or on top of those before it (cumulative); or a single
    measurement (gradients, numerics); null: the ladder's own."""
    ladder: Named = Named()
    """The variants: a ladder of configs/ladder/, or a file; auto: modern, or just the switches if there are any."""
    switches: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Variants of the ladder, by name or by a key that they set; []: all. Without a ladder: overrides, as optim.lr=1 or
    precision.amp_bf16, and names of switches, each by itself on the experiment as it is."""
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


def refuse_unread(options: LedgerOptions) -> None:
    """Raise a `UserError` with a line for each key that was given and that the mode does not read."""
    mode = options.mode or "crossed"
    taken = TAKEN.get(mode)
    given = [key for key in LedgerOptions.model_fields if key in options.model_fields_set and key != "mode"]
    if taken is None:
        unread = [(key, "it is for mode=gradients") for key in given if key == "loss_scale"]
    else:
        unread = [(key, f"it takes {', '.join(taken)}") for key in given if key not in taken]
    if unread:
        lines = (f"{key}: mode={mode} does not read it; {instead}; leave it out" for key, instead in unread)
        raise UserError(*lines)


class ReportOptions(Section):
    """Keys of `pycls-fast ledger report`."""

    ledger: str
    """A ledger.json."""
    output: str | None = None
    """The folder of the page; null: that of the file."""


@command(options=ReportOptions, default=None, words=("ledger",))
def report(options: ReportOptions) -> int:
    """Draw the page of a ledger again: `pycls-fast ledger report LEDGER.json [output=FOLDER]`."""
    from pycls_fast.ledger.report.page import redraw

    return redraw(**dict(options))


class CheckOptions(Section):
    """Keys of `pycls-fast ledger check`."""

    baseline: str
    """The ledger.json of an earlier state."""
    new: str
    """That of the present one."""
    tolerance: Rate = 0.05
    """The share of its speed that a variant may lose."""
    absolute: bool = True
    """Compare the first variant's rate; false: only speed-ups, for a machine whose speed changes."""


@command(options=CheckOptions, default=None, words=("baseline", "new"))
def check(options: CheckOptions) -> int:
    """Whether a variant has lost speed or accuracy: `pycls-fast ledger check BASELINE.json NEW.json [key=value ...]`.

    Prints how two ledgers differ. Exit status: 0, or 1 if something is lost.
    """
    from pycls_fast.ledger.report.gate import check

    return check(**dict(options))


class SimulateOptions(Section):
    """Keys of `pycls-fast ledger simulate`."""

    ladders: PositiveInt = 2000
    """Simulated ladders of each truth."""


@command(options=SimulateOptions, default=None)
def simulate(options: SimulateOptions) -> int:
    """The error rates of the ledger's verdicts, in Markdown: `pycls-fast ledger simulate [ladders=2000]`."""
    from pycls_fast.ledger.simulate import simulate_all

    return simulate_all(options.ladders)


@command(
    options=LedgerOptions,
    purpose=Purpose(trains=True),
    subcommands={"report": report, "check": check, "simulate": simulate},
)
def ledger(config: RunConfig, options: LedgerOptions) -> int:
    """What each choice gains and costs: `pycls-fast ledger --config-name EXPERIMENT [ladder=NAME] [key=value ...]`.

    Every variant of a ladder (configs/ladder/NAME.yaml) is timed in turns with the others and compared with float64.
    In every training about half of them are on, until each is known to cost accuracy or not. A page and `ledger.json`
    are written to `output`. Started again, it resumes.

    mode=crossed      each variant is timed by itself
    mode=cumulative   each variant is timed on top of those before it
    mode=gradients    a short training: how many gradients float16 cannot hold, and how many updates it loses
    mode=numerics     logit and gradient errors of one setting against float64, as JSON in `output`

        pycls-fast ledger --config-name vit_digits switches=[precision.amp_bf16,speed.ema=loop] margin=2
        pycls-fast ledger --config-name vit_digits ladder=modern margin=2 dry_run=true
        pycls-fast ledger --config-name vit_s16 ladder=cpu runs_at_most=0
        pycls-fast ledger report LEDGER.json [output=FOLDER]
        pycls-fast ledger check BASELINE.json NEW.json [tolerance=0.05] [absolute=true]
        pycls-fast ledger simulate [ladders=2000]

    `report` draws the page of a `ledger.json` again, by default beside it. `check` exits with 1 if a variant has lost
    speed or accuracy; absolute=false compares only speed-ups. `simulate` prints the error rates of the verdicts.
    """
    refuse_unread(options)
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
    from pycls_fast.config.launch import config_folders, same_command, variant
    from pycls_fast.ledger.ladder.folder import default_folder
    from pycls_fast.ledger.ladder.plan import pick
    from pycls_fast.ledger.ladder.run import run_ladder

    asks = options.ladder.name == "auto" and bool(options.switches)
    name = {"auto": "switches" if asks else "modern"}.get(options.ladder.name, options.ladder.name)
    ladder = ladder_of(options.switches) if asks else read_ladder(name, config_folders())
    mode = options.mode or ladder.mode
    own = {key: getattr(options, key) for key in Repeats.model_fields}
    timed = {key: value for key in ("steps", "warmup_steps") if (value := getattr(options, key)) is not None}
    settings = LadderSettings(mode=mode, **own, **timed)
    purpose = Purpose(needs_data=False, trains=settings.trains)

    def composed(overrides: Sequence[str]) -> RunConfig:
        return variant(overrides, purpose, options=LedgerOptions)

    if asks and all(composed(each.overrides) == composed(()) for each in pick(ladder, options.switches).variants):
        raise UserError("switches: the experiment has them already; add what to compare with, such as speed=reference")
    output = options.output or default_folder(config.config_name, name, mode, options.switches)
    return run_ladder(
        config,
        ladder,
        settings,
        switches=options.switches,
        base=same_command(options=LedgerOptions),
        compose=composed,
        folder=user_path(output),
        dry_run=options.dry_run,
        configs=config_folders(),
        accept_code=options.accept_code,
    )
