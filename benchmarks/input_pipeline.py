"""Input pipelines side by side: ours, torchvision's reference presets, timm's loader and DALI if it is installed.

Command:  python benchmarks/input_pipeline.py PATH [--workers 1] [--out docs/results/input_pipeline.md]
          PATH holds class folders of JPEGs
Result:   docs/results/input_pipeline.md has the tables of one machine; the ratios carry over, the times do not.

All produce batches of the same files at 224 x 224, in turns and in alternating order; ours from the files, and from
packed copies of them (short side at most 320: as JPEGs, and as raw pixels).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance_lines
from turns import Contender, add_clock, around_median, clock_of, take_turns

from pycls_fast.data.choices import Augment
from pycls_fast.data.crop import Interpolation
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.decoders import DECODERS
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.sampling import EvalSampler, TrainSampler
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.packed import PackedImages
from pycls_fast.data.transforms import EvalTransform, TrainTransform
from pycls_fast.ledger.report.statistics import spread
from pycls_fast.train.environment import environment

SIZE, SHORT_SIDE = 224, 320
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
REFERENCE, TIMM = "torchvision preset", "timm create_loader"
BATCH = 50
TRAINING, EVALUATION = "Training: RandomResizedCrop, flip", "Evaluation: resize to 256, centre crop"


def main() -> None:
    """Measure, print, write Markdown and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="class folders of JPEGs")
    parser.add_argument("--workers", type=int, default=1, help="loading processes; 0: load in this one")
    parser.add_argument("--rounds", type=int, default=7)
    add_clock(parser)
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bilinear")
    parser.add_argument("--out", type=Path, help="a Markdown file; the JSON is written beside it")
    options = parser.parse_args()
    clock = clock_of(parser, options, is_alone=options.workers == 0, use="--workers 0")
    torch.set_num_threads(1)
    # Unrelated ones of the libraries.
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        files = scan_classes(options.path)
        packed = pack_copies(files, Path(folder))
        tables = {
            TRAINING: pipelines(options, files, packed, training=True),
            EVALUATION: pipelines(options, files, packed, training=False),
        }
        # Training leaves out the images of a last, smaller batch.
        counts = {TRAINING: len(files) // BATCH * BATCH, EVALUATION: len(files)}
        for arms in tables.values():
            take_turns(arms, options.rounds, clock, warmup=1)
        memory = memory_rate(packed["raw"])
    text = heading(options, files) + "".join(table(title, arms, counts[title]) for title, arms in tables.items())
    text += raw_share(rates(tables[TRAINING][-1], counts[TRAINING]), memory)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(record(options, tables, counts), indent=1) + "\n")


def arm(name: str, epoch: Callable[[], Iterable[Any]]) -> Contender:
    """A pipeline: a function that yields an epoch's batches, of which each turn takes all."""
    return Contender(name, lambda: deque(epoch(), maxlen=0))


def rates(arm: Contender, images: int) -> list[float]:
    """Images per second of each round."""
    return [images / seconds for seconds in arm.seconds]


def pack_copies(files: Images, folder: Path) -> dict[str, Images]:
    """Packed copies as from `tools/prepare_data.py pack short_side=320`, encoded and raw."""
    made: dict[str, Images] = {}
    for store in ("encoded", "raw"):
        settings = PackSettings(short_side=SHORT_SIDE, store=store)
        pack(files, folder / store, settings, workers=1, title=store)
        made[store] = PackedImages(folder / store)
    return made


def pipelines(
    options: argparse.Namespace, files: Images, packed: dict[str, Images], *, training: bool
) -> list[Contender]:
    """All for random resized crop and flip, or for resize and centre crop; torchvision's and timm's come first."""
    arms = [torchvision_arm(options, training=training), timm_arm(options, training=training)]
    arms += dali_arms(options) if training else []
    decoders = [name for name in DECODERS if name != "simplejpeg" or importlib.util.find_spec("simplejpeg")]
    arms += [ours(options, files, decoder, training=training) for decoder in decoders]
    arms.append(ours(options, packed["encoded"], "region", training=training, where="packed JPEGs"))
    if training:
        arms.append(ours(options, packed["raw"], "region", training=training, where="packed raw"))
    return arms


def torchvision_arm(options: argparse.Namespace, *, training: bool) -> Contender:
    """ImageFolder with the transforms of torchvision's references/classification presets (backend PIL)."""
    from torchvision import datasets, transforms

    mode = transforms.InterpolationMode(options.interpolation)
    if training:
        steps = [transforms.RandomResizedCrop(SIZE, interpolation=mode), transforms.RandomHorizontalFlip(0.5)]
    else:
        steps = [transforms.Resize(256, interpolation=mode), transforms.CenterCrop(SIZE)]
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    dataset = datasets.ImageFolder(options.path, transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=training, drop_last=training, num_workers=options.workers
    )
    return arm(REFERENCE, lambda: loader)


def timm_arm(options: argparse.Namespace, *, training: bool) -> Contender:
    """create_loader in prefetcher mode: uint8 batches, without normalising on the device, as in ours."""
    from timm.data import ImageDataset as TimmDataset
    from timm.data import create_loader

    loader = create_loader(
        TimmDataset(str(options.path)),
        (3, SIZE, SIZE),
        BATCH,
        is_training=training,
        use_prefetcher=True,
        color_jitter=None,  # type: ignore[arg-type]  # annotated by its default
        interpolation=options.interpolation,
        crop_pct=0.875,
        num_workers=options.workers,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    return arm(TIMM, lambda: loader.loader)


def dali_arms(options: argparse.Namespace) -> list[Contender]:
    """DALI's CPU decoder that decodes only the crop; one thread per worker."""
    if importlib.util.find_spec("nvidia.dali") is None if importlib.util.find_spec("nvidia") else True:
        return []
    from nvidia.dali import fn, pipeline_def, types

    filters = {"bilinear": types.INTERP_TRIANGULAR, "bicubic": types.INTERP_CUBIC}

    @pipeline_def(batch_size=BATCH, num_threads=max(options.workers, 1), device_id=None)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=str(options.path), random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(encoded, random_area=(0.08, 1.0))
        images = fn.resize(images, size=(SIZE, SIZE), interp_type=filters[options.interpolation])
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    made = pipeline()
    made.build()
    count = made.epoch_size("files")
    return [arm("DALI on the CPU", lambda: (made.run() for _ in range(count // BATCH)))]


def ours(
    options: argparse.Namespace, source: Images, decoder: str, *, training: bool, where: str | None = None
) -> Contender:
    """Batches of uint8, ready for the copy to the device."""
    mode: Interpolation = options.interpolation
    transform: TrainTransform | EvalTransform = EvalTransform(Augment(interpolation=mode), image_size=SIZE)
    if training:
        transform = TrainTransform(Augment(interpolation=mode), image_size=SIZE)
    dataset = ImageDataset(source, transform, training=training, open_picture=DECODERS[decoder])
    epochs = iter(range(10**6))

    def epoch() -> Iterable[Any]:
        if not training:
            sampler: Any = EvalSampler(len(source), batch_size=BATCH)
        else:
            steps = len(source) // BATCH
            start = next(epochs) * steps
            sampler = TrainSampler(
                len(source), seed=0, global_batch_size=BATCH, start_step=start, total_steps=start + steps
            )
        return ImageLoader(dataset, sampler, num_workers=options.workers)

    return arm(f"ours, {where or 'files'}, decode={decoder}", epoch)


def memory_rate(raw: Images, repeats: int = 20) -> float:
    """Bytes per second of copying raw images into a batch, the limit that memory sets."""
    images = [np.asarray(raw.read(index)) for index in range(len(raw))]
    room = np.empty(max(image.size for image in images), dtype=np.uint8)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        for image in images:
            room[: image.size] = image.reshape(-1)
        best = max(best, sum(image.size for image in images) / (time.perf_counter() - start))
    return best


def table(title: str, arms: list[Contender], images: int) -> str:
    """Images per second and the ratios to the two references."""
    lines = [
        f"\n## {title}\n",
        "| pipeline | images/s, median (10% to 90%) | of torchvision's (95%) | of timm's (95%) |",
        "|---|---|---|---|",
    ]
    for each in arms:
        shown = " | ".join(str(each.over(reference)) for reference in arms[:2])
        lines.append(f"| {each.name} | {around_median(rates(each, images))} | {shown} |")
    return "\n".join(lines) + "\n"


def raw_share(rates: list[float], memory: float) -> str:
    """Throughput of raw images against that of memory."""
    written = spread(rates).p50 * SIZE * SIZE * 3
    return (
        f"\nPacked raw writes {written / 1e9:.2f} GB/s of crops, {written / memory:.1%} of the rate at which this core "
        f"copies the images ({memory / 1e9:.1f} GB/s); what remains is the resize.\n"
    )


def heading(options: argparse.Namespace, files: Images) -> str:
    """What was run, on which machine and with which versions."""
    sizes = [len(files.read(index)) for index in range(len(files))]
    workers = f"{options.workers} worker{'s' if options.workers != 1 else ''}" if options.workers else "no workers"
    return "\n".join([
        "# Input pipelines",
        "",
        *provenance_lines(torch.device("cpu")),
        f"- Images: {len(files)} JPEGs of {sum(sizes) / len(sizes) / 1000:.0f} kB on average; batches of {BATCH}; "
        f"{workers}, {options.rounds} rounds in turns after one, {options.clock} time",
        "",
    ])  # fmt: skip


def record(options: argparse.Namespace, tables: dict[str, list[Contender]], counts: dict[str, int]) -> dict[str, Any]:
    """All results, for JSON."""
    return {
        "settings": {key: str(value) for key, value in vars(options).items()},
        "environment": environment(torch.device("cpu"), 1),
        "images_per_second": {
            title: {each.name: rates(each, counts[title]) for each in arms} for title, arms in tables.items()
        },
    }


if __name__ == "__main__":
    main()
