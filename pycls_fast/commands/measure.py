"""`pycls-fast time`, `ledger`, `runs` and `compare`: what choices gain and cost."""

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pycls_fast.config import Purpose, RunConfig, Verb, variant
from pycls_fast.config.ladder import LadderSettings, Mode, Repeats, ladder_of, read_ladder
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.values import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate, Text


def _split(value: Any) -> Any:
    """`[a=1 b=2,c=[3,4]]` -> its items: without quotes, an `=` makes it a text to Hydra."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return tuple(value) if isinstance(value, list) else value
    items, depth = [""], 0
    for letter in value[1:-1]:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    return tuple(item.strip() for item in items)


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]


class TimeVerb(Verb):
    """Time an experiment: `pycls-fast time --config-name EXPERIMENT [mode=all] [key=value ...]`.

    mode=train   the training step on one synthetic batch; needs no data
    mode=model   the training step and the inference forward pass, likewise
    mode=loader  only the input pipeline, from files (or data=synthetic) to batches on the device
    mode=both    training steps fed by the loader
    mode=all     model, loader and both

    Variants are timed in turns and compared with the first, which shows differences far below the machine's own drift:

        pycls-fast time --config-name vit_s16 mode=model batch_size=8 \\
            "compare=[speed=reference,speed=reference speed.attention=sdpa,speed=fast]"
    """

    mode: Literal["train", "model", "loader", "both", "all"] = "all"
    """What is timed: the training step (train); that and the inference forward pass (model); the input pipeline
    (loader); training fed by it (both); or all of these."""
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
    compare: Texts = ()
    """Variants, each a text of overrides; they are timed in turns and compared with the first."""
    output: Text | None = None
    """A JSON file; null: runs/timings/EXPERIMENT-TIME.json, or one in run_dir if that is set."""

    @property
    def reads_images(self) -> bool:
        return self.mode not in ("train", "model")

    def variants(self, config: RunConfig) -> list[tuple[str, RunConfig]]:
        """Name and configuration of everything to time: the experiment, or its variants from `compare`."""
        if not self.compare:
            return [(config.config_name, config)]
        purpose = Purpose(needs_data=self.reads_images)
        made: list[tuple[str, RunConfig]] = []
        for position, text in enumerate(self.compare):
            try:
                changed = variant(shlex.split(text), purpose, options=type(self))
            except (UserError, ValueError) as error:
                raise UserError(*(f"compare: '{text}': {line}" for line in str(error).splitlines())) from error
            name = text or "as configured"
            if text in self.compare[:position]:
                # Listing a variant twice shows the noise of the measurement.
                name += f" ({self.compare[: position + 1].count(text)})"
            made.append((name, changed))
        return made

    def __call__(self, config: RunConfig) -> int:
        chosen = self.variants(config)
        from pycls_fast.ledger.measure.timing import time_variants

        return time_variants(chosen, **{key: value for key, value in self if key != "compare"})


class ReportVerb(Verb, experiment=None, words=("ledger",)):
    """Draw the page of a ledger again: `pycls-fast ledger report LEDGER.json [output=FOLDER]`."""

    ledger: Text
    """A ledger.json."""
    output: Text | None = None
    """The folder of the page; null: that of the file."""

    def __call__(self) -> int:
        from pycls_fast.ledger.report.page import redraw

        return redraw(**dict(self))


class CheckVerb(Verb, experiment=None, words=("baseline", "new")):
    """Whether a variant has lost speed or accuracy: `pycls-fast ledger check BASELINE.json NEW.json [key=value ...]`.

    Prints how two ledgers differ. Exit status: 0, or 1 if something is lost.
    """

    baseline: Text
    """The ledger.json of an earlier state."""
    new: Text
    """That of the present one."""
    tolerance: Rate = 0.05
    """The share of its speed that a variant may lose."""
    absolute: bool = True
    """Compare the first variant's rate; false: only speed-ups, for a machine whose speed changes."""

    def __call__(self) -> int:
        from pycls_fast.ledger.report.gate import check

        return check(**dict(self))


class GradientsVerb(Verb, purpose=Purpose(trains=True)):
    """What float16 cannot hold: `pycls-fast ledger gradients --config-name EXPERIMENT [key=value ...]`.

    A short training: how many gradients float16 cannot hold, and how many updates it loses, as JSON, also by layer.
    """

    steps: PositiveInt = 20
    """The number of steps that are counted."""
    warmup_steps: NonNegativeInt = 20
    """The number of steps before them."""
    loss_scale: PositiveFloat = 65536.0
    """The scale that is tried on the gradients."""
    output: Text | None = None
    """A JSON file; null: runs/gradients/EXPERIMENT-TIME.json, or one in run_dir if that is set."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.ledger.measure.numerics import count_gradients

        return count_gradients(config, **dict(self))


class NumericsVerb(Verb, purpose=Purpose(trains=True)):
    """Errors of logits and gradients against float64: `pycls-fast ledger numerics --config-name EXPERIMENT`."""

    steps: PositiveInt = 20
    """Errors are measured before training, and after this many steps."""
    output: Text | None = None
    """A JSON file; null: runs/numerics/EXPERIMENT-TIME.json, or one in run_dir if that is set."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.ledger.measure.numerics import measure_numerics

        return measure_numerics(config, **dict(self))


class LedgerVerb(
    Repeats,
    Verb,
    purpose=Purpose(trains=True),
    subcommands={"report": ReportVerb, "check": CheckVerb, "gradients": GradientsVerb, "numerics": NumericsVerb},
):
    """What each choice gains and costs: `pycls-fast ledger --config-name EXPERIMENT [ladder=NAME] [key=value ...]`.

    Every variant of a ladder (configs/ladders/NAME.yaml) is timed in turns with the others and compared with float64.
    In every training about half of them are on, until it is known of each whether it costs accuracy. A page and
    `ledger.json` are written to `output`. Started again, it resumes.

    mode=crossed      each variant is timed by itself
    mode=cumulative   each variant is timed on top of those before it

        pycls-fast ledger --config-name vit_digits switches=[precision.amp_bf16,speed.ema=loop] margin=2
        pycls-fast ledger --config-name vit_digits ladder=modern margin=2 dry_run=true
        pycls-fast ledger --config-name vit_s16 ladder=cpu data=synthetic batch_size=16 runs_at_most=0

    Words with a help of their own: `ledger report LEDGER.json` draws its page again, `ledger check BASELINE.json
    NEW.json` exits with 1 if a variant has lost speed or accuracy, `ledger gradients` and `ledger numerics` make a
    single measurement.
    """

    mode: Mode | None = None
    """What is timed: each variant by itself (crossed), or on top of those before it (cumulative); null: the ladder's
    own."""
    ladder: str = "auto"
    """The variants: a ladder of configs/ladders/, or a file; auto: modern, or just the switches if there are any."""
    switches: Texts = ()
    """Variants of the ladder, by name or by a key that they set; []: all. Without a ladder: overrides, as optim.lr=1 or
    precision.amp_bf16, and names of switches, each by itself on the experiment as it is."""
    dry_run: bool = False
    """Print the plan and an estimate of its time, from a few steps of the first variant."""
    accept_code: bool = False
    """Resume in a folder that was measured before the code changed."""
    output: Text | None = None
    """The folder of the report; null: ledgers/EXPERIMENT-LADDER-MODE, in which the ledger resumes."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.config.this_command import config_folders, same_command
        from pycls_fast.ledger.ladder.folder import default_folder
        from pycls_fast.ledger.ladder.plan import pick
        from pycls_fast.ledger.ladder.run import Experiment, run_ladder

        asks = self.ladder == "auto" and bool(self.switches)
        name = {"auto": "switches" if asks else "modern"}.get(self.ladder, self.ladder)
        ladder = ladder_of(self.switches) if asks else read_ladder(name, config_folders())
        mode = self.mode or ladder.mode
        settings = LadderSettings(mode=mode, **{key: getattr(self, key) for key in Repeats.model_fields})
        purpose = Purpose(trains=settings.trains)

        def composed(overrides: Sequence[str]) -> RunConfig:
            return variant(overrides, purpose, options=type(self))

        ladder = pick(ladder, self.switches)
        if asks and all(composed(each.overrides) == composed(()) for each in ladder.variants):
            raise UserError("switches: the experiment has them already; add what to compare with: speed=reference")
        output = user_path(self.output or default_folder(config.config_name, name, mode, self.switches))
        experiment = Experiment(config, *same_command(options=type(self)), composed, config_folders())
        return run_ladder(experiment, ladder, settings, output, dry_run=self.dry_run, accept_code=self.accept_code)


class RunsVerb(Verb, experiment=None, words=("folders",)):
    """A table of many runs: `pycls-fast runs [FOLDER...] [key=value ...]`.

    A row shows the settings in which the runs differ, top-1 of the best and of the last evaluation, class_top1 (the
    mean accuracy over the classes) of the best, training speed, time and state. Finished runs that differ only in
    `seed` or `data.fold` share a row: mean ± half the 95% interval of the mean. State: finished, stopped (by a signal,
    with everything saved), failed (ended by an error), or running or killed. Damaged and empty run folders are listed
    at the end, with the reason. Exit status: 0, or 2 when no run could be read.
    """

    folders: tuple[str, ...] = ("runs",)
    """Run folders, or folders that contain them at any depth (runs, runs/EXPERIMENT, a ledger)."""
    sort: Literal["best_top1", "final_top1", "class_top1", "map", "images_per_second", "hours", "epoch"] = "best_top1"
    """What the rows are sorted by, largest first."""
    output: Annotated[str, Field(pattern=r"\.(csv|json)$")] | None = None
    """A .csv or .json file: the same rows, with every setting that differs."""
    report: Text | None = None
    """A folder for index.html, as of `pycls-fast test`, of the runs of all folds: every image is predicted by the run
    that was not trained on it."""

    def __call__(self) -> int:
        from pycls_fast.ledger.compare import report_folds
        from pycls_fast.ledger.runs import list_runs

        status = list_runs(self.folders, sort=self.sort, output=self.output)
        if self.report is not None:
            report_folds(self.folders, self.report)
        return status


class CompareVerb(Verb, experiment=None, words=("run_a", "run_b")):
    """Two runs side by side: `pycls-fast compare RUN_A RUN_B [key=value ...]`.

    Shows different settings, loss and accuracy curves, top-1 and top-5 with a paired test over the images, the images
    on which the two disagree, accuracy by class, speed and memory. Prints a table, and writes into the output folder
    `index.html` (one page with everything) and `compare.json`. The runs need not be finished.
    """

    run_a: Text
    """A run's folder."""
    run_b: Text
    """Another one."""
    output: Text | None = None
    """A folder; null: a new one in runs/compare/."""
    images: NonNegativeInt = 24
    """Images shown per kind of disagreement."""

    def __call__(self) -> int:
        from pycls_fast.ledger.compare import compare_runs

        return compare_runs(**dict(self))
