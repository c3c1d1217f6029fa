"""What is damaged: one finished run, and the same few images in every layout. Made once, in forked processes."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFile

from pycls_fast.config.keys import flat
from pycls_fast.data.sources.arrays import write_digits
from pycls_fast.files import checkpoints
from tests.factories import load_checkpoint
from tests.faults.attempt import Child, Outcome, attempt, tool
from tests.integration.runs import TINY
from tests.unit.data import layouts

STEPS = 44


# A training of two seconds, with the loader in its own process.
TRAINING = (
    *("--config-name", "vit_digits", *TINY, "optim.ema_decay=0.9", "data.num_workers=0", "runtime.device=cpu"),
    "runtime.checkpoint_every_steps=4",
)


# What timm writes beside weights.
_TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "model_args": {"global_pool": "avg", "class_token": False, "num_heads": 4},
    "num_classes": 10,
    "pretrained_cfg": {
        "input_size": [3, 8, 8], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "crop_pct": 0.9,
        "crop_mode": "center", "interpolation": "bicubic", "num_classes": 10, "first_conv": "patch_embed.proj",
    },
}  # fmt: skip
_LEDGER = Path(__file__).parents[2] / "docs" / "results" / "ledger_modern" / "ledger.json"


class Fixtures:
    """A folder with `run`, `weights.*`, and a folder for each layout of data.

    Attributes:
        digits: class folders.
        wanted: the run's last state, as `fingerprint` tells it; of two ranks, under "ranks".
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digits = folder / "digits"
        self.wanted: dict[str, str] = {}
        self._must(attempt(lambda: write_digits(self.digits) or 0, folder))
        self.train = ("train", *TRAINING, f"data.root={self.digits}")
        self._must(attempt(tool(*self.train, "run_dir=run"), folder, limit=600))
        self.wanted["run"] = self.fingerprint(folder)
        for name in ("weights.safetensors", "weights.onnx"):
            self._must(attempt(tool("export", "weights=run", f"output={name}"), folder))
        self._must(attempt(self._write_layouts, folder))
        for name in ("folder", "tar"):
            where = (f"data.source={name}", f"data.root={folder / name}", f"data.index_cache={folder / 'index'}")
            self._must(attempt(tool("prepare", "index", *where), folder))
        (folder / "ranks").mkdir()
        for child in self.two_ranks(folder / "ranks"):
            self._must(child.end())
        self.wanted["ranks"] = self.fingerprint(folder / "ranks")
        self._compile_decoder()

    def _must(self, outcome: Outcome) -> None:
        assert outcome.status == 0, outcome.text

    def _write_layouts(self) -> int:
        content = layouts.make_content((12, 12, 12), (6, 6, 6))
        writers = {
            "folder": layouts.write_folder, "table": layouts.write_manifest, "parquet": layouts.write_hub_parquet,
            "tar": layouts.write_tars, "packed": layouts.write_packed,
            "manifest": functools.partial(layouts.write_manifest, extension=".parquet"),
        }  # fmt: skip
        for name, write in writers.items():
            (self.folder / name).mkdir()
            write(self.folder / name, content)
        model = load_checkpoint(self.folder / "run" / "checkpoints" / "best")["model"]
        torch.save(model, self.folder / "weights.pth")
        images = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
        layouts.write_cifar10(self.folder / "cifar", images, [n % 3 for n in range(24)], layouts.CLASSES)
        (self.folder / "timm").mkdir()
        torch.save(model, self.folder / "timm" / "model.pth")
        (self.folder / "timm" / "config.json").write_text(json.dumps(_TIMM))
        shutil.copy(_LEDGER, self.folder)
        np.savez(self.folder / "weights.npz", **{name: value.numpy() for name, value in model.items()})
        return 0

    def _compile_decoder(self) -> None:
        source = Path(__file__).with_name("jpeg_fuzz.c")
        flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
        program = self.folder / "jpeg_fuzz"
        subprocess.run(["cc", *flags, source, "-o", program, "-ljpeg", "-lm"], check=True, capture_output=True)
        _write_jpegs(self.folder / "jpegs")

    def copy(self, name: str, folder: Path) -> Path:
        """A copy of something in the fixtures, in a folder."""
        source = self.folder / name
        if source.is_dir():
            return Path(shutil.copytree(source, folder / name, symlinks=True))
        return Path(shutil.copy(source, folder / name))

    def fingerprint(self, folder: Path) -> str:
        """What `folder/run` ended with: a hash of its last tensors, and whether its records have each step once."""

        def action() -> int:
            newest = next(checkpoints(folder / "run" / "checkpoints"))
            state = load_checkpoint(newest)
            digest = hashlib.sha256()
            for key, value in sorted(flat({part: state[part] for part in ("model", "ema", "optimizer")}).items()):
                digest.update(key.encode())
                digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
            lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
            steps = [record["step"] for record in lines if record["kind"] == "train"]
            print("state", digest.hexdigest(), steps == list(range(1, STEPS + 1)), state["step"])
            return 0

        return attempt(action, folder).text.strip().rpartition("state ")[2]

    def two_ranks(self, folder: Path, *options: str) -> list[Child]:
        """Two processes of one run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        run = tool(*self.train, "run_dir=run", "parallel=ddp", *options)
        both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = ({"RANK": rank, "LOCAL_RANK": rank} for rank in "01")
        return [Child(run, folder, environment=both | variables) for variables in own]


def _write_jpegs(folder: Path) -> None:
    ImageFile.MAXBLOCK = 1 << 20
    folder.mkdir()
    for number in range(24):
        size = (8 + 7 * number, 5 + 9 * number, 3)
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8))
        image = image.convert("L") if number % 5 == 0 else image
        how = {"progressive": number % 3 == 0, "restart_marker_blocks": number % 4, "subsampling": number % 3}
        image.save(folder / f"{number}.jpg", quality=30 + 3 * number, **how)


def pick(draw: random.Random, folder: Path, *patterns: str) -> Path:
    """One of the files that match, below a folder."""
    return draw.choice(sorted(file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()))
