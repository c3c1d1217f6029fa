"""The families of faults. Each function makes one try in an empty folder and returns what fell short."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile

from pycls_fast.config import load_config
from pycls_fast.config.keys import flat
from tests.faults.attempt import Child, Outcome, attempt, tool
from tests.faults.lab import Lab, pick
from tests.faults.mutate import mutant
from tests.faults.surroundings import CASES


@dataclass
class Try:
    """One try.

    Attributes:
        folder: where it happens, empty.
        tried: how many faults it met.
        short: what fell short.
        about: what was done, for who repeats it.
    """

    draw: random.Random
    lab: Lab
    folder: Path
    tried: int = 0
    short: list[str] = field(default_factory=list)
    about: str = ""

    def judge(self, outcome: Outcome, *allowed: int) -> None:
        """Count an outcome."""
        self.short += outcome.short(allowed or (0, 2))

    def same_bits(self, key: str = "run") -> None:
        """See that the run has ended as if nothing had happened."""
        found = self.lab.fingerprint(self.folder)
        if found != self.lab.wanted[key]:
            self.short.append(f"other bits: {found} instead of {self.lab.wanted[key]}")


def kills(this: Try) -> None:
    """The run is killed, or told to stop, at random moments, then it goes on to the same bits."""
    run = tool(*this.lab.train, "run_dir=run")
    for _ in range(this.draw.randint(2, 5)):
        number = this.draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        child = Child(run, this.folder)
        delay = this.draw.uniform(0.0, 3.0)
        this.about += f"{number.name} after {delay:.2f} s; "
        if child.runs_for(delay):
            child.signal(number)
            this.tried += 1
        # 130, 128 + the number, and the bare signal: stopped before there was anything to save.
        this.judge(child.end(), *(0, 2, 3, 130, 128 + number, -number))
    this.judge(attempt(run, this.folder), 0)
    this.same_bits()


def full_disks(this: Try) -> None:
    """No file may grow beyond some size; once there is room, the run goes on to the same bits."""
    limit = int(2 ** this.draw.uniform(6, 19))
    this.about, this.tried = f"at {limit:,} bytes", 1
    run = tool(*this.lab.train, "run_dir=run")

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    this.judge(attempt(run, this.folder, setup=set_limit), 0, 1, 2)
    this.judge(attempt(run, this.folder), 0)
    this.same_bits()


def ranks(this: Try) -> None:
    """One of two ranks is killed or stands still; the other ends, and both go on to the same bits."""
    if "ranks" not in this.lab.wanted:
        (this.folder / "whole").mkdir()
        for child in this.lab.two_ranks(this.folder / "whole"):
            this.judge(child.end(), 0)
        this.lab.wanted["ranks"] = this.lab.fingerprint(this.folder / "whole")
    number, lost = this.draw.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)), this.draw.randrange(2)
    delay = this.draw.uniform(0.5, 5.0)
    this.about, this.tried = f"{number.name} of rank {lost} after {delay:.2f} s", 1
    both = this.lab.two_ranks(this.folder, "parallel.timeout_seconds=5")
    if both[lost].runs_for(delay):
        both[lost].signal(number)
    outcome = both[1 - lost].end()
    if outcome.status is None:
        this.short.append("the other rank waited for ever")
    both[lost].signal(signal.SIGKILL)
    both[lost].end()
    for child in this.lab.two_ranks(this.folder):
        this.judge(child.end(), 0)
    this.same_bits("ranks")


def helpers(this: Try) -> None:
    """A process that a command has started is killed, as by the kernel: a line or nothing, and no wait."""
    shards = ("data.source=tar", f"data.root=file://{this.lab.folder}/tar", "data.shard_cache=copies")
    workers = f"data.num_workers={this.draw.randint(0, 2)}"
    commands = {
        "loader": (*this.lab.train, "run_dir=run", "data.num_workers=2"),
        "shards": (*this.lab.train, "run_dir=run", *shards, "data.global_batch_size=4", workers),
        "pack": ("prepare", "pack", f"data.root={this.lab.digits}", "data.num_workers=2", "output=packed"),
    }
    name, delay = this.draw.choice(sorted(commands)), this.draw.uniform(0.0, 2.0)
    this.about = f"{name}, after {delay:.2f} s"
    child = Child(tool(*commands[name]), this.folder)
    if child.runs_for(delay) and (started := child.largest()) is not None:
        with suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)
            this.tried = 1
    this.judge(child.end())
    this.judge(attempt(tool(*commands[name]), this.folder), 0)
    if name == "loader":
        this.same_bits()


def _train(*overrides: str) -> Callable[[Try], Outcome]:
    def run(this: Try) -> Outcome:
        arguments = ["data.global_batch_size=4", "data.max_damaged=1000", "schedule.max_steps=1", "run_dir=trained"]
        return attempt(tool(*this.lab.train, *arguments, *overrides), this.folder)

    return run


def _verb(*arguments: str) -> Callable[[Try], Outcome]:
    return lambda this: attempt(tool(*arguments), this.folder)


def _resume(this: Try) -> Outcome:
    return attempt(tool(*this.lab.train, "run_dir=run", "schedule.max_steps=45"), this.folder)


# What is copied from the lab -> the files of it that are damaged, and who reads them.
_IMAGES = ("*.JPEG",)
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[Callable[[Try], Outcome], ...]]] = {
    "run": (
        ("config.yaml", "metrics.jsonl", "summary.json", "state.json", ".metadata", "*.distcp", "predictions.npz"),
        (
            _verb("runs", "run", "output=runs.csv"),
            _verb("compare", "run", "run", "output=compared"),
            _verb("predict", "run", "run"),
            _verb("score", "weights=run"),
            _verb("export", "weights=run", "output=out.safetensors"),
            _resume,
        ),
    ),
    "weights.safetensors": (
        ("*.safetensors",),
        (
            _train("weights=weights.safetensors"),
            _verb("predict", "weights.safetensors", "weights.safetensors"),
            _verb("score", "weights=weights.safetensors"),
        ),
    ),
    "weights.pth": (("*.pth",), (_train("weights=weights.pth"),)),
    "weights.npz": (("*.npz",), (_train("weights=weights.npz"),)),
    "folder": (_IMAGES, (_train("data=folder", "data.root=folder"), _verb("predict", "LAB/run", "folder"))),
    "table": (("*.csv", *_IMAGES), (_train("data.source=table", "data.root=table"),)),
    "parquet": (("*.parquet",), (_train("data.source=parquet", "data.root=parquet"),)),
    "tar": (("*.tar",), (_train("data.source=tar", "data.root=tar"),)),
    "packed": (("*",), (_train("data.source=packed", "data.root=packed"),)),
}


def mutants(this: Try) -> None:
    """A file of any format that is read is damaged: its reader says so in a line, or reads it."""
    name = this.draw.choice(sorted(FORMATS))
    patterns, readers = FORMATS[name]
    copied = this.lab.copy(name, this.folder)
    file = pick(this.draw, copied, *patterns) if copied.is_dir() else copied
    file.write_bytes(mutant(this.draw, file.name, file.read_bytes()))
    read = this.draw.randrange(len(readers))
    this.about, this.tried = f"{file.relative_to(this.folder)}, reader {read}", 1
    this.judge(readers[read](this))


_ODD = (
    *("", "null", "true", "-1", "0", "1", "3", "0.5", "nan", "inf", "1e308", "1e-320", "abc", "[]", "{}", "[1,2]"),
    *(
        "9" * 30, "a" * 5000, "'x y'", "../odd", "/proc/self", "/dev/zero", "${oc.env:HOME}", "${odd}",
        "'\x1b[31m'", "é",
    ),
)  # fmt: skip
# Would start as many processes, write where the try does not own, or ask a server.
_NOT_TRIED = ("data.num_workers", "run_dir", "trackers", "weights", "data.index_cache", "data.shard_cache", "imports")


@functools.cache
def _keys() -> tuple[str, ...]:
    return tuple(key for key in flat(load_config().model_dump()) if not key.startswith(_NOT_TRIED))


def values(this: Try) -> None:
    """Odd values of one or two keys: refused in a line each, or used."""
    odd = [f"{this.draw.choice(_keys())}={this.draw.choice(_ODD)}" for _ in range(this.draw.randint(1, 2))]
    this.about, this.tried = " ".join(odd)[:200], 1

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

    arguments = [*this.lab.train, "schedule.max_steps=1", "run_dir=run", *odd]
    this.judge(attempt(tool(*arguments), this.folder, setup=limit_memory))


def surroundings(this: Try) -> None:
    """Odd environments, limits, files and links."""
    name = this.draw.choice(sorted(CASES))
    this.about, this.tried = name, 1
    case = CASES[name]
    arguments = case.prepare(this.lab, this.folder)
    arguments = this.lab.train + tuple(arguments[1:]) if arguments[0] == "train" else tuple(arguments)
    # Three of four: with another oddity, so that cases meet.
    environment = {
        **case.environment,
        **this.draw.choice(({}, {"LC_ALL": "C"}, {"HOME": "/nonexistent"}, {"TMPDIR": "/x"})),
    }
    outcome = attempt(tool(*arguments), this.folder, setup=case.setup, environment=environment)
    if case.workers_tell:
        outcome = replace(outcome, text=outcome.text.splitlines()[-1] if outcome.text else "")
    this.judge(outcome, *case.allowed)
    this.short += [] if case.after is None else case.after(this.folder, outcome.text)


def jpegs(this: Try) -> None:
    """Mutants through the decoder in C, compiled with sanitizers for addresses and undefined behaviour."""
    program = this.lab.folder / "jpeg_fuzz"
    if not program.exists():
        source = Path(__file__).with_name("jpeg_fuzz.c")
        flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
        subprocess.run(
            ["cc", *flags, str(source), "-o", str(program), "-ljpeg", "-lm"], check=True, capture_output=True
        )
        _write_jpegs(this.lab.folder / "jpegs")
    seed, count = this.draw.getrandbits(30), 20_000
    files = sorted(map(str, (this.lab.folder / "jpegs").iterdir()))
    done = subprocess.run(
        [program, str(seed), str(count), *files], capture_output=True, text=True, check=False, timeout=600
    )
    this.about, this.tried = f"jpeg_fuzz {seed} {count}", count
    this.short += [] if done.returncode == 0 else [done.stderr[:2000]]


def _write_jpegs(folder: Path) -> None:
    ImageFile.MAXBLOCK = 1 << 20
    folder.mkdir()
    for number in range(24):
        size = (8 + 7 * number, 5 + 9 * number, 3)
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8))
        image = image.convert("L") if number % 5 == 0 else image
        how = {"progressive": number % 3 == 0, "restart_marker_blocks": number % 4, "subsampling": number % 3}
        image.save(folder / f"{number}.jpg", quality=30 + 3 * number, **how)


# Name -> a try, and its share of the time.
FAMILIES: Mapping[str, tuple[Callable[[Try], None], float]] = {
    "kills": (kills, 0.25),
    "full disks": (full_disks, 0.05),
    "ranks": (ranks, 0.1),
    "helpers": (helpers, 0.1),
    "mutants": (mutants, 0.25),
    "values": (values, 0.12),
    "surroundings": (surroundings, 0.08),
    "jpegs": (jpegs, 0.05),
}

os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
