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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from pycls_fast.ledger.report.statistics import paired_ratio, spread
from pycls_fast.ledger.report.text import speed_text
from pycls_fast.train.environment import environment, provenance_lines

SIZE, SHORT_SIDE = 224, 320
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
REFERENCE, TIMM = "torchvision preset", "timm create_loader"
BATCH = 50
TIMES = {"wall": "wall", "process": "CPU time of the process, since the machine had other work"}


@dataclass
class Arm:
    """One pipeline: a function that yields an epoch's batches, and the images per second of each round."""

    name: str
    epoch: Callable[[], Iterable[Any]]
    rates: list[float] = field(default_factory=list)

    def measure(self, images: int, clock: Callable[[], float]) -> None:
        """Time one whole epoch."""
        start = clock()
        for _ in self.epoch():
            pass
        self.rates.append(images / (clock() - start))


def main() -> None:
    """Measure, print, write Markdown and JSON."""
    options = read_options()
    clock = time.process_time if options.clock == "process" else time.perf_counter
    torch.set_num_threads(1)
    # Unrelated ones of the libraries.
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        files = scan_classes(options.path)
        packed = pack_copies(files, Path(folder))
        tables = {
            "Training: RandomResizedCrop, flip": train_arms(options, files, packed),
            "Evaluation: resize to 256, centre crop": eval_arms(options, files, packed),
        }
        for arms in tables.values():
            for repeat in range(-1, options.rounds):
                for arm in arms if repeat % 2 else reversed(arms):
                    arm.measure(len(files), clock)
                if repeat < 0:
                    for arm in arms:
                        arm.rates.clear()
        memory = memory_rate(packed["raw"])
    text = heading(options, files) + "".join(table(title, arms) for title, arms in tables.items())
    text += raw_share(next(iter(tables.values())), memory)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(record(options, tables, memory), indent=1) + "\n")


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="class folders of JPEGs")
    parser.add_argument("--workers", type=int, default=1, help="loading processes; 0: load in this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="process: CPU time, for shared machines; needs --workers 0",
    )
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bilinear")
    parser.add_argument("--out", type=Path, help="a Markdown file; the JSON is written beside it")
    options = parser.parse_args()
    if options.clock == "process" and options.workers:
        parser.error("--clock process: counts only this process; use it with --workers 0")
    return options


def pack_copies(files: Images, folder: Path) -> dict[str, Images]:
    """Packed copies as from `tools/prepare_data.py pack short_side=320`, encoded and raw."""
    made: dict[str, Images] = {}
    for store in ("encoded", "raw"):
        settings = PackSettings(short_side=SHORT_SIDE, store=store)
        pack(files, folder / store, settings, workers=1, title=store)
        made[store] = PackedImages(folder / store)
    return made


def train_arms(options: argparse.Namespace, files: Images, packed: dict[str, Images]) -> list[Arm]:
    """Pipelines for random resized crop and flip; the references, torchvision and timm, come first."""
    arms = [torchvision_arm(options, training=True), timm_arm(options, training=True)]
    arms += dali_arms(options)
    arms += [ours(options, files, decoder, training=True) for decoder in usable_decoders()]
    arms.append(ours(options, packed["encoded"], "region", training=True, where="packed JPEGs"))
    arms.append(ours(options, packed["raw"], "region", training=True, where="packed raw"))
    return arms


def eval_arms(options: argparse.Namespace, files: Images, packed: dict[str, Images]) -> list[Arm]:
    """Pipelines for resize and centre crop; the references, torchvision and timm, come first."""
    arms = [torchvision_arm(options, training=False), timm_arm(options, training=False)]
    arms += [ours(options, files, decoder, training=False) for decoder in usable_decoders()]
    arms.append(ours(options, packed["encoded"], "region", training=False, where="packed JPEGs"))
    return arms


def usable_decoders() -> list[str]:
    """The values of `speed.decode` that run here."""
    return [name for name in DECODERS if name != "simplejpeg" or importlib.util.find_spec("simplejpeg")]


def torchvision_arm(options: argparse.Namespace, *, training: bool) -> Arm:
    """ImageFolder with the transforms of torchvision's references/classification presets (backend PIL)."""
    from torchvision import datasets, transforms

    mode = transforms.InterpolationMode(options.interpolation)
    if training:
        steps = [transforms.RandomResizedCrop(SIZE, interpolation=mode), transforms.RandomHorizontalFlip(0.5)]
    else:
        steps = [transforms.Resize(256, interpolation=mode), transforms.CenterCrop(SIZE)]
    steps += [transforms.PILToTensor(), transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    dataset = datasets.ImageFolder(options.path, transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=training, num_workers=options.workers)
    return Arm(REFERENCE, lambda: loader)


def timm_arm(options: argparse.Namespace, *, training: bool) -> Arm:
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
    return Arm(TIMM, lambda: loader.loader)


def dali_arms(options: argparse.Namespace) -> list[Arm]:
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
    return [Arm("DALI on the CPU", lambda: (made.run() for _ in range(count // BATCH)))]


def ours(options: argparse.Namespace, source: Images, decoder: str, *, training: bool, where: str | None = None) -> Arm:
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

    return Arm(f"ours, {where or 'files'}, decode={decoder}", epoch)


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


def table(title: str, arms: list[Arm]) -> str:
    """Images per second and the ratios to the two references."""
    lines = [
        f"\n## {title}\n",
        "| pipeline | images/s, median (10% to 90%) | of torchvision's (95%) | of timm's (95%) |",
    ]
    lines.append("|---|---|---|---|")
    for arm in arms:
        rates = spread(arm.rates)
        shown = " | ".join(speed_text(paired_ratio(reference.rates, arm.rates)) for reference in arms[:2])
        lines.append(f"| {arm.name} | {rates.p50:.0f} ({rates.p10:.0f} to {rates.p90:.0f}) | {shown} |")
    return "\n".join(lines) + "\n"


def raw_share(arms: list[Arm], memory: float) -> str:
    """Throughput of raw images against that of memory."""
    rate = spread(arms[-1].rates).p50
    per_image = SIZE * SIZE * 3
    return (
        f"\nPacked raw against memory: copying the same images runs at {memory / 1e9:.1f} GB/s on this core. The "
        f"pipeline writes {rate * per_image / 1e9:.2f} GB/s of crops, {rate * per_image / memory:.1%} of it; what "
        "remains is the resize.\n"
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
        f"{workers}, {options.rounds} rounds in turns after one; the ratios are within rounds",
        f"- Times: {TIMES[options.clock]}",
        "- DALI: " + ("measured" if dali_arms(options) else "not installed, not run"),
        "",
    ])  # fmt: skip


def record(options: argparse.Namespace, tables: dict[str, list[Arm]], memory: float) -> dict[str, Any]:
    """All results, for JSON."""
    return {
        "kind": "input_pipeline",
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "environment": environment(torch.device("cpu"), 1),
        "memory_bytes_per_second": memory,
        "tables": {
            title: [
                {
                    "name": arm.name,
                    "images_per_second": arm.rates,
                    "median": spread(arm.rates).p50,
                    "of_torchvision": paired_ratio(arms[0].rates, arm.rates).ratio,
                    "of_timm": paired_ratio(arms[1].rates, arm.rates).ratio,
                }
                for arm in arms
            ]
            for title, arms in tables.items()
        },
    }


if __name__ == "__main__":
    main()
