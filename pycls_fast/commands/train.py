"""`pycls-fast prepare`, `plan`, `lr-find` and `train`: up to a trained network."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pycls_fast.config import Purpose, RunConfig, Verb
from pycls_fast.errors import DONE, MISTAKE, UserError, first_few, one_of, printable
from pycls_fast.files import user_path
from pycls_fast.precision import Name
from pycls_fast.values import AUTO, PositiveFloat, PositiveInt, Text

if TYPE_CHECKING:
    import numpy as np

    from pycls_fast.data.sources.base import Images

# Whose images are told; of more, those of the smallest and of the largest.
_MOST_CLASSES = 20


# Only the experiment's data group is used; it detects the format of what is in data.root.
class PrepareVerb(Verb, experiment="resnet50", words=("mode",)):
    """Prepare a dataset: `pycls-fast prepare pack|verify|index data.root=PATH [key=value ...]`.

    pack     write the splits to output=FOLDER in a few files each, for data.source=packed; run again, it resumes
             short_side=320 quality=95   shrink larger images first     store=raw   decoded pixels
    verify   read and decode every image; list the damaged ones (status 2 if there are any), classes, sizes, files that
             are left out, and images that appear more than once, identical or much alike: in other splits or under
             other labels, too
    index    list the files of a large dataset once and keep the list, so that runs start in a second

    All take data.source and its keys, split=train for one split, and data.num_workers (default: all cores, at most 16).
    """

    mode: Literal["pack", "verify", "index"] | None = None
    """What to do, the first word of the command: pack, verify or index."""
    output: Text | None = None
    """pack: the folder to write; verify: a JSON file for all that was found."""
    split: str | None = None
    """Only this split; null: all."""
    short_side: PositiveInt | None = None
    """pack: scale larger images down to this many pixels on the short side; null: keep them as they are."""
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    """pack: JPEG quality of the scaled images."""
    store: Literal["encoded", "raw"] = "encoded"
    """pack: store encoded files, as they are unless they are scaled, or decoded pixels."""

    def __call__(self, config: RunConfig) -> int:
        one_of("mode", self.mode, ("pack", "verify", "index"))
        if self.mode == "pack" and self.output is None:
            raise UserError("output: not set; give the folder for the packed splits as output=FOLDER")
        from pycls_fast import build
        from pycls_fast.train.signals import stop_requests

        with build.world(config) as world:
            splits = build.sources(config, world, index_all=self.mode == "index")
        if self.split is not None:
            one_of("split", self.split, splits)
        chosen = {name: source for name, source in splits.items() if self.split in (None, name)}
        for name, source in chosen.items():
            _tell(f"{name}: {source.describe()}")
        workers = build.num_workers(config)
        # Before a training begins, a signal ends the process after the cleanup.
        with stop_requests():
            if self.mode == "pack":
                return self._pack(config, chosen, workers)
            if self.mode == "index":
                return DONE
            from pycls_fast.data.check import left_out

            root = config.data.root
            return self._verify(chosen, workers, {} if root is None else left_out(user_path(root), splits.values()))

    def _pack(self, config: RunConfig, splits: dict, workers: int) -> int:
        from pycls_fast.data.pack import PackSettings, pack
        from pycls_fast.data.sources.packed import is_packed

        assert self.output is not None
        # Encoded images keep their EXIF orientation, so that their packing does not depend on the key.
        convert = config.data.conversion._replace(upright=config.data.exif_orientation and self.store == "raw")
        settings = PackSettings(self.short_side, self.quality, self.store, convert)
        root = user_path(self.output)
        for name, source in splits.items():
            is_new = not is_packed(root / name)
            packed = pack(source, root / name, settings, workers=workers, title=f"pack {name}")
            for image, reason in packed.about["damaged"]:
                _tell(f"warning: {image}: {reason}; left out")
            print(f"{root / name}: {len(packed):,} images, {packed.size / 1e6:,.1f} MB ({settings.describe()})")
            if not is_new:
                print(f"{root / name}: packed before, nothing done; remove it to pack again")
        data = config.data
        keys = ["data.source=packed", f"data.root={root}"]
        keys += [] if data.label_separator is None else [f"data.label_separator={data.label_separator}"]
        # Predictions follow them, whatever has been done to the stored pixels.
        keys += ["data.exif_orientation=true"] if data.exif_orientation else []
        keys += ["data.transparent=white"] if data.transparent == "white" else []
        print(f"use it with {shlex.join(keys)}")
        return DONE

    def _verify(self, splits: dict, workers: int, left_out: dict[str, list[str]]) -> int:
        import numpy as np

        from pycls_fast.data.check import copies, verify
        from pycls_fast.train.folder import output_file, write_json

        file = output_file(self.output) if self.output is not None else None
        report: dict[str, dict[str, object]] = {}
        seen = {}
        for name, source in splits.items():
            damaged, parts = [], []
            for part in verify(source, workers=workers, title=f"verify {name}"):
                for image in part.damaged:
                    _tell(f"{image.name}: {image.reason}")
                    damaged.append({"index": image.position, "name": image.name, "reason": image.reason})
                parts.append(part.seen)
            print(f"{name}: {len(damaged):,} of {len(source):,} images are damaged")
            seen[name] = np.concatenate(parts)
            report[name] = {"images": len(source), "damaged": damaged, **_summary(name, source, seen[name])}
        for kind, names in left_out.items():
            _tell(f"left out: {len(names):,} {kind or 'without an ending'} ({first_few(names)})")
        report["left_out"] = dict(left_out)
        report["copies"] = {kind: _told(kind, groups, splits) for kind, groups in copies(seen).items()}
        if file is not None:
            write_json(file, report)
        return MISTAKE if any(report[name]["damaged"] for name in splits) else DONE


def _tell(text: str) -> None:
    """Print a line with names of images or classes, which do not control the terminal."""
    print(printable(text), flush=True)


def _summary(name: str, source: "Images", seen: "np.ndarray") -> dict[str, object]:
    """Print and return the images of each class, and the smallest, median and largest width and height."""
    counts = dict(zip(source.classes, source.class_counts().tolist(), strict=True))
    told = [f"{counts[kind]:,} of {kind}" for kind in sorted(counts, key=counts.__getitem__)]
    shown = ", ".join(told) if len(told) <= _MOST_CLASSES else f"{told[0]} to {told[-1]}"
    _tell(f"{name}: {len(counts):,} classes: {shown}")
    sides = {}
    for side in ("width", "height") if len(seen) else ():
        ordered = sorted(seen[side].tolist())
        sides[side] = low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
        print(f"{name}: {side} from {low:,} to {high:,} pixels, median {middle:,}")
    return {"classes": counts, **sides}


def _told(kind: str, groups: Sequence[Sequence[tuple[str, int]]], splits: dict) -> list[list[str]]:
    """Print how many groups of copies there are and the first five, those across splits first; the names of all."""
    labels = [{splits[name].classes_of(index) for name, index in group} for group in groups]
    apart = [len({name for name, _ in group}) for group in groups]
    order = sorted(range(len(groups)), key=lambda number: -apart[number])
    said = f"{sum(n > 1 for n in apart):,} across splits, {sum(len(each) > 1 for each in labels):,} across labels"
    print(f"groups of {kind} images: {len(groups):,}, {said}")
    names = [[f"{name}: {splits[name].name(index)}" for name, index in groups[number]] for number in order]
    for group in names[:5]:
        _tell(f"  {first_few(group)}")
    return names


class MachineVerb(Verb, experiment=None):
    """Measure this machine for plans: `pycls-fast plan calibrate [output=here.yaml]`."""

    output: Annotated[str, Field(pattern=r"\.yaml$")] = "here.yaml"
    """A .yaml file; cluster=FILE.yaml:xNUMBER plans with it."""

    def __call__(self) -> int:
        from pycls_fast.plan import calibrate
        from pycls_fast.train.folder import output_file

        print(calibrate.calibrate(output_file(self.output)))
        return DONE


class PlanVerb(
    Verb,
    experiment="vit_h16",
    purpose=Purpose(needs_data=False, trains=True),
    subcommands={"calibrate": MachineVerb},
):
    """Plan a run: `pycls-fast plan --config-name EXPERIMENT cluster=h100x64 [price=2.5] [write=FILE] [output=FOLDER]`.

    Which layouts of the ranks fit into memory, and how fast they are, the best first: data and sharding, microbatches,
    recomputation. Computes nothing and needs no GPU; without `model.num_classes` there are 1,000. docs/plan.md says
    what is counted, docs/results/plan.md how far predictions were from measurements.

        pycls-fast plan --config-name vit_h16 cluster=h100x64 price=2.5 output=plans
        pycls-fast plan calibrate [output=here.yaml]
    """

    cluster: str = "h100x8"
    """A kind of accelerator and their number: h100x64; or FILE.yaml:xNUMBER with what `plan calibrate` wrote."""
    price: PositiveFloat | None = None
    """The price of an accelerator for an hour, in any currency."""
    images: PositiveInt = 1281167
    """Training images, for the hours of the schedule; the default is ImageNet's."""
    precisions: tuple[Name, ...] = ()
    """Precisions to try, as [amp_bf16,bf16_params]; []: the experiment's own."""
    top: PositiveInt = 12
    """Layouts to print."""
    write: Text | None = None
    """A file for this command's overrides and those of the best layout: `pycls-fast train $(cat FILE) ...`."""
    output: Text | None = None
    """A folder for plan.json, with all layouts, and plan.png, memory against speed."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.build import steps_per_epoch, total_steps
        from pycls_fast.config.keys import key_of
        from pycls_fast.config.this_command import same_command
        from pycls_fast.plan.auto import epochs_of
        from pycls_fast.plan.cluster import cluster
        from pycls_fast.plan.memory_plan import USABLE, gigabytes
        from pycls_fast.plan.report import Report
        from pycls_fast.plan.search import Search
        from pycls_fast.train.display import plain_table, wide_console
        from pycls_fast.train.folder import output_file

        flags, typed = same_command(options=type(self))
        # Before the work, so that nothing is lost.
        written = None if self.write is None else output_file(self.write, key="write")
        table = None if self.output is None else output_file(f"{self.output}/plan.json")
        batch = config.data.global_batch_size
        if batch == AUTO:
            raise UserError("data.global_batch_size: auto depends on the data; give a number")
        if config.schedule.epochs == AUTO:
            config = config.with_values(schedule={"epochs": epochs_of(self.images, batch)})
        steps = total_steps(config, steps_per_epoch(config, self.images))
        chosen = cluster(self.cluster, config.runtime.device_memory)
        outcomes = Search(config, chosen, config.model.num_classes or 1000, self.precisions).outcomes()
        if not outcomes:
            each = " with two images each, which mixing needs" if config.augment.mixes else ""
            raise UserError(
                f"data.global_batch_size: {batch} cannot be divided among {chosen.ranks} ranks{each}; use a multiple"
            )
        if not outcomes[0].fits:
            raise UserError(
                f"cluster: no layout of {config.config_name} fits into {USABLE:.0%} of "
                f"{gigabytes(chosen.accelerator.memory)}; the smallest needs "
                f"{gigabytes(min(each.memory for each in outcomes))}; use more ranks or a smaller model"
            )
        report = Report(f"{config.config_name} on {self.cluster}", outcomes, steps, chosen, self.price)
        console, rows = wide_console(), report.rows(self.top)
        console.print(f"{report.title}, {steps:,} steps of {batch} images ({self.images:,} an epoch)", markup=False)
        console.print(plain_table(rows))
        console.print(*report.notes(), sep="\n", markup=False)
        if table is not None:
            report.write(table)
            report.draw(table.with_name("plan.png"))
        if written is not None:
            layout = outcomes[0].layout.overrides
            decided = {name for each in layout for name in (key_of(each), f"{key_of(each)}.name")}
            kept = [each for each in typed if key_of(each) not in decided]
            written.write_text("\n".join([*flags, *kept, *layout]) + "\n", encoding="utf-8")
        return DONE


class TrainVerb(Verb, purpose=Purpose(trains=True)):
    """Train a network: `pycls-fast train data=FOLDER weights=SOURCE [--config-name EXPERIMENT] [key=value ...]`.

    Without `--config-name`, images or weights are for the experiment finetune; without any of them it trains a small
    network on handwritten digits.
    """

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train import train as train_network

        return train_network(config)


class LrFindVerb(Verb, experiment="finetune", purpose=Purpose(trains=True)):
    """Find a learning rate: `pycls-fast lr-find data=FOLDER weights=SOURCE [--config-name EXPERIMENT]`.

    Trains `steps` steps of the experiment with optim.lr rising from lr_min to lr_max, and prints where the loss falls
    fastest and where it diverges. Writes lr_find.json and lr_find.png into `output`. Compiles nothing unless
    speed.compile is set: there are too few steps to make up for it.
    """

    steps: Annotated[int, Field(ge=10)] = 100
    """The number of training steps, with a higher rate in each; fewer if the loss blows up."""
    lr_min: Annotated[float, Field(gt=0.0)] = 1e-7
    """optim.lr of the first step."""
    lr_max: Annotated[float, Field(gt=0.0)] = 1.0
    """optim.lr of the last step."""
    output: Text | None = None
    """The folder for the numbers and the picture; null: a new one in runs/lr_find/."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.lr_range import lr_range_test

        return lr_range_test(config, **dict(self))
