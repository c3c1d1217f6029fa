"""`pycls-fast plan`."""

from pycls_fast.config import Purpose, RunConfig, Section, command
from pycls_fast.errors import DONE, UserError
from pycls_fast.values import PositiveFloat, PositiveInt


class PlanOptions(Section):
    """Keys of `pycls-fast plan`."""

    cluster: str = "h100x8"
    """A kind of accelerator and their number: h100x64; or FILE.yaml:NAMExNUMBER with what `plan calibrate` wrote."""
    price: PositiveFloat | None = None
    """Of an accelerator for an hour, in any currency."""
    images: PositiveInt = 1281167
    """Training images, for the hours of the schedule; the default is ImageNet's."""
    top: PositiveInt = 12
    """Layouts to print."""
    write: str | None = None
    """A file for the overrides of the best layout: `pycls-fast train $(cat FILE) ...`."""
    output: str | None = None
    """A folder for plan.json, with all layouts, and plan.png, memory against speed."""


class CalibrateOptions(Section):
    """Keys of `pycls-fast plan calibrate`."""

    output: str = "here.yaml"
    """A YAML file."""


@command(options=CalibrateOptions, default=None)
def calibrate(options: CalibrateOptions) -> int:
    """Measure this machine for plans: `pycls-fast plan calibrate [output=here.yaml]`."""
    from pycls_fast.plan import calibrate
    from pycls_fast.train.folder import output_file

    print(calibrate.calibrate(output_file(options.output)))
    return DONE


@command(options=PlanOptions, default="vit_h16", purpose=Purpose(), needs_data=lambda options: False,
         subcommands={"calibrate": calibrate})  # fmt: skip
def plan(config: RunConfig, options: PlanOptions) -> int:
    """Plan a run: `pycls-fast plan --config-name EXPERIMENT cluster=h100x64 [price=2.5] [write=FILE] [output=FOLDER]`.

    Which layouts of the ranks fit into memory, and how fast they are, the best first: data and sharding, microbatches,
    recomputation. Computes nothing and needs no GPU. docs/plan.md says what is counted, docs/results/plan.md how far
    predictions were from measurements.

        pycls-fast plan --config-name vit_h16 cluster=h100x64 price=2.5 output=plans
        pycls-fast plan calibrate [output=here.yaml]
    """
    from pycls_fast.plan import Report, Search, cluster
    from pycls_fast.train.display import plain_table, wide_console
    from pycls_fast.train.folder import output_file

    # Before the work, so that nothing is lost.
    written = None if options.write is None else output_file(options.write, key="write")
    table = None if options.output is None else output_file(f"{options.output}/plan.json")
    chosen = cluster(options.cluster)
    outcomes = Search(config, chosen, config.model.num_classes or 1000).outcomes()
    batch, memory = config.data.global_batch_size, chosen.accelerator.memory
    if not outcomes:
        raise UserError(f"data.global_batch_size: {batch} cannot be divided among {chosen.ranks} ranks; use a multiple")
    if not outcomes[0].fits:
        raise UserError(
            f"cluster: no layout of {config.config_name} fits into {memory / 1e9:.0f} GB; the smallest needs "
            f"{min(each.memory for each in outcomes) / 1e9:.0f} GB; use more ranks or a smaller model"
        )
    steps = round(config.schedule.epochs * options.images / batch)
    steps = min(steps, config.schedule.max_steps or steps)
    report = Report(f"{config.config_name} on {options.cluster}", outcomes, steps, chosen, options.price)
    console, rows = wide_console(), report.rows(options.top)
    console.print(f"{report.title}, {steps:,} steps of {batch} images", markup=False)
    console.print(plain_table(list(rows[0]), [list(row.values()) for row in rows]))
    console.print(*report.notes(), sep="\n", markup=False)
    if table is not None:
        report.write(table)
        report.draw(table.with_name("plan.png"))
    if written is not None:
        overrides = ["--config-name", config.config_name, *outcomes[0].layout.overrides]
        written.write_text("\n".join(overrides) + "\n", encoding="utf-8")
    return DONE
