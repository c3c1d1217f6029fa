"""`pycls-fast prepare`."""

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import RunConfig, Section, command
from pycls_fast.errors import DONE, MISTAKE, UserError, cleanup_at_signals, one_of
from pycls_fast.files import user_path
from pycls_fast.values import PositiveInt

MODES = ("pack", "verify", "index")


class PrepareOptions(Section):
    """Keys of `pycls-fast prepare`."""

    mode: Literal["pack", "verify", "index"] | None = None
    """What to do, the first word of the command: pack, verify or index."""
    output: str | None = None
    """pack: the folder to write; verify: a JSON file for the list of damaged images."""
    split: str | None = None
    """Only this split; null: all."""
    short_side: PositiveInt | None = None
    """pack: scale larger images down to this many pixels on the short side; null: keep them as they are."""
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    """pack: JPEG quality of the scaled images."""
    store: Literal["encoded", "raw"] = "encoded"
    """pack: store encoded files, as they are unless they are scaled, or decoded pixels."""
    filter: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"
    """pack: the filter that scales images down."""


def pack_splits(splits: dict, options: PrepareOptions, workers: int, *, upright: bool) -> int:
    """Pack each split, and print the images that could not be used."""
    from pycls_fast.data.pack import PackSettings, pack

    assert options.output is not None
    # Encoded images keep their EXIF orientation, so that their packing does not depend on the key.
    upright = upright and options.store == "raw"
    settings = PackSettings(options.short_side, options.quality, options.store, options.filter, upright=upright)
    root = user_path(options.output)
    for name, source in splits.items():
        packed = pack(source, root / name, settings, workers=workers, title=f"pack {name}")
        for image, reason in packed.damaged:
            print(f"warning: {image}: {reason}; left out")
        print(f"{root / name}: {packed.count:,} images, {packed.size / 2**30:.2f} GiB ({settings.describe()})")
        if not packed.is_new:
            print(f"{root / name}: packed before, nothing done; remove it to pack again")
    print(f"use it with data.source=packed data.root={root}")
    return DONE


def verify_splits(splits: dict, options: PrepareOptions, workers: int) -> int:
    """List the damaged images."""
    from pycls_fast.data.pack import verify
    from pycls_fast.train.folder import output_file, write_json

    file = output_file(options.output) if options.output is not None else None
    report: dict[str, dict[str, object]] = {}
    for name, source in splits.items():
        damaged = []
        for image in verify(source, workers=workers, title=f"verify {name}"):
            print(f"{image.name}: {image.reason}", flush=True)
            damaged.append({"index": image.position, "name": image.name, "reason": image.reason})
        print(f"{name}: {len(damaged):,} of {len(source):,} images are damaged")
        report[name] = {"images": len(source), "damaged": damaged}
    if file is not None:
        write_json(file, report)
    return MISTAKE if any(split["damaged"] for split in report.values()) else DONE


# Only the experiment's data group is used; it detects the format of what is in data.root.
@command(options=PrepareOptions, default="resnet50", words=("mode",))
def prepare(config: RunConfig, options: PrepareOptions) -> int:
    """Prepare a dataset: `pycls-fast prepare pack|verify|index data.root=PATH [key=value ...]`.

    pack     write the splits to output=FOLDER in a few files each, for data.source=packed; run again, it resumes
             short_side=320 quality=95   shrink larger images first     store=raw   decoded pixels
    verify   read and decode every image, and list the damaged ones (status 2 if there are any)
    index    list the files of a large dataset once and keep the list, so that runs start in a second

    All take data.source and its keys, split=train for one split, and data.num_workers (default: all cores, at most 16).
    """
    if options.mode is None:
        raise UserError(f"mode: not given; say what to do first: pycls-fast prepare {'|'.join(MODES)} data.root=PATH")
    if options.mode == "pack" and options.output is None:
        raise UserError("output: not set; give the folder for the packed splits as output=FOLDER")
    from pycls_fast import build

    with build.world(config) as world:
        splits = build.sources(config, world, index_all=options.mode == "index")
    if options.split is not None:
        one_of("split", options.split, splits)
    chosen = {name: source for name, source in splits.items() if options.split in (None, name)}
    for name, source in chosen.items():
        print(f"{name}: {source.describe()}")
    workers = build.num_workers(config)
    with cleanup_at_signals():
        if options.mode == "pack":
            return pack_splits(chosen, options, workers, upright=config.data.exif_orientation)
        return verify_splits(chosen, options, workers) if options.mode == "verify" else DONE
