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
from functools import cached_property
from pathlib import Path

from pycls_fast.config import load_config
from pycls_fast.config.keys import flat
from pycls_fast.parallel.monitor import report_seconds
from tests.faults.attempt import Child, Outcome, attempt, tool
from tests.faults.fixtures import Fixtures, pick
from tests.faults.mutate import mutant
from tests.faults.surroundings import CASES

# Of ranks and loaders, and what it takes besides to notice and to leave.
_TIMEOUT, _TO_END = 5, 15


@dataclass
class Try:
    """One try.

    Attributes:
        folder: where it happens, empty.
        tried: how many faults it met.
        short: what fell short.
        about: what was done, for who repeats it.
    """

    seed: int
    family: str
    number: int
    fixtures: Fixtures
    folder: Path
    tried: int = 0
    short: list[str] = field(default_factory=list)
    about: str = ""

    @cached_property
    def draw(self) -> random.Random:
        """What is random about it, from the seed, the family and the number."""
        return random.Random(f"{self.seed} {self.family} {self.number}")

    def judge(self, outcome: Outcome, *allowed: int) -> None:
        """Count an outcome."""
        self.short += outcome.short(allowed or (0, 2))

    def same_bits(self, key: str = "run") -> None:
        """See that the run has ended as if nothing had happened, and that nothing is left of what was interrupted."""
        found = self.fixtures.fingerprint(self.folder)
        if found != self.fixtures.wanted[key]:
            self.short.append(f"other bits: {found} instead of {self.fixtures.wanted[key]}")
        hidden = (path for path in (self.folder / "run").rglob(".*") if path.name != ".metadata")
        self.short += [f"left {path.relative_to(self.folder)}" for path in hidden]


def kills(this: Try) -> None:
    """The run is killed, or told to stop, at random moments, then it goes on to the same bits."""
    run = tool(*this.fixtures.train, "run_dir=run")
    for _ in range(this.draw.randint(2, 5)):
        number = this.draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        child = Child(run, this.folder)
        delay = this.draw.uniform(0.0, 3.0)
        this.about += f"{number.name} after {delay:.2f} s; "
        if child.runs_for(delay):
            child.signal(number)
            this.tried += 1
        if number == signal.SIGTERM and this.draw.random() < 0.5 and child.runs_for(1.2):
            child.signal(number)
            this.about += "and again; "
        # 130, 128 + the number, and the bare signal: stopped before there was anything to save.
        this.judge(child.end(), *(0, 2, 3, 130, 128 + number, -number))
    this.judge(attempt(run, this.folder), 0)
    this.same_bits()


def full_disks(this: Try) -> None:
    """No file may grow beyond some size; once there is room, the run goes on to the same bits."""
    limit = int(2 ** this.draw.uniform(6, 19))
    this.about, this.tried = f"at {limit:,} bytes", 1
    run = tool(*this.fixtures.train, "run_dir=run")

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    this.judge(attempt(run, this.folder, setup=set_limit), 0, 1, 2)
    this.judge(attempt(run, this.folder), 0)
    this.same_bits()


def ranks(this: Try) -> None:
    """One of two ranks is killed or stands still; the other ends in time, and both go on to the same bits."""
    number, lost = this.draw.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)), this.draw.randrange(2)
    delay = this.draw.uniform(0.5, 5.0)
    this.about, this.tried = f"{number.name} of rank {lost} after {delay:.2f} s", 1
    both = this.fixtures.two_ranks(this.folder, f"parallel.timeout_seconds={_TIMEOUT}")
    if both[lost].runs_for(delay):
        both[lost].signal(number)
    # It may have been done, or both have agreed to stop; else it has lost the other.
    outcome = both[1 - lost].end(_TIMEOUT + report_seconds(_TIMEOUT) + _TO_END)
    this.judge(outcome, 0, 1, 3)
    if outcome.status == 1 and "\nerror: " not in f"\n{outcome.text}":
        this.short.append(f"status 1 without an error's line: {outcome.text[-200:]}")
    both[lost].signal(signal.SIGKILL)
    both[lost].end()
    for child in this.fixtures.two_ranks(this.folder):
        this.judge(child.end(), 0)
    this.same_bits("ranks")


def stalls(this: Try) -> None:
    """A loader's worker stands still: the run ends within its timeout or at a signal, and goes on to the same bits."""
    run = functools.partial(tool, *this.fixtures.train, "run_dir=run", "data.num_workers=1")
    number = this.draw.choice((None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    delay, again = this.draw.uniform(0.3, 2.0), number == signal.SIGTERM and this.draw.random() < 0.5
    this.about = f"after {delay:.2f} s, {'timeout' if number is None else number.name}{' twice' * again}"
    child = Child(run(f"parallel.timeout_seconds={_TIMEOUT if number is None else 600}"), this.folder)
    if child.runs_for(delay) and (started := child.largest()) is not None:
        with suppress(ProcessLookupError):
            os.kill(started, signal.SIGSTOP)
            this.tried = 1
        for _ in range((number is not None) + again):
            if child.runs_for(1.2):
                child.signal(number)
    # A loader looks every 5 s, and its worker has 5 s to end.
    outcome = child.end(_TIMEOUT + 10 + _TO_END)
    this.judge(outcome, *((0, 2) if number is None else (0, 3, 130, 128 + number, -number)))
    this.judge(attempt(run(), this.folder), 0)
    this.same_bits()


def helpers(this: Try) -> None:
    """A process that a command has started is killed, as by the kernel: a line or nothing, and no wait."""
    shards = ("data.source=tar", f"data.root=file://{this.fixtures.folder}/tar", "data.shard_cache=copies")
    workers = f"data.num_workers={this.draw.randint(0, 2)}"
    commands = {
        "loader": (*this.fixtures.train, "run_dir=run", "data.num_workers=2"),
        "shards": (*this.fixtures.train, "run_dir=run", *shards, "data.global_batch_size=4", workers),
        "pack": ("prepare", "pack", f"data.root={this.fixtures.digits}", "data.num_workers=2", "output=packed"),
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


_SMALL = "TRAINING data.global_batch_size=4 data.max_damaged=1000 schedule.max_steps=1 run_dir=trained"
# What is copied from the fixtures -> the files of it that are damaged, and who reads them. TRAINING stands for the keys
# of the run, SMALL for those of a single step, FIXTURES for their folder.
FORMATS: Mapping[str, tuple[str, list[str]]] = {
    "run": (
        "config.yaml environment.json metrics.jsonl summary.json state.json .metadata *.distcp predictions.npz",
        [
            "runs run output=runs.csv",
            "compare run run output=compared",
            "predict run run",
            "test weights=run",
            "export weights=run output=out.safetensors",
            "train TRAINING run_dir=run schedule.max_steps=45",
        ],
    ),
    "weights.safetensors": (
        "*.safetensors",
        [
            "train SMALL weights=weights.safetensors",
            "predict weights.safetensors FIXTURES/folder",
            "test weights=weights.safetensors data.root=FIXTURES/digits",
        ],
    ),
    "weights.onnx": ("*.onnx", ["test weights=weights.onnx data.root=FIXTURES/digits"]),
    "weights.pth": ("*.pth", ["train SMALL weights=weights.pth"]),
    "weights.npz": ("*.npz", ["train SMALL weights=weights.npz"]),
    "folder": ("*.JPEG", ["train SMALL data=folder data.root=folder", "predict FIXTURES/run folder"]),
    "table": ("*.csv *.JPEG", ["train SMALL data.source=manifest data.root=table"]),
    "parquet": ("*.parquet", ["train SMALL data.source=parquet data.root=parquet"]),
    "tar": ("*.tar", ["train SMALL data.source=tar data.root=tar"]),
    "packed": ("*", ["train SMALL data.source=packed data.root=packed"]),
    "manifest": ("*.parquet", ["train SMALL data.source=manifest data.root=manifest"]),
    "cifar": ("*_batch* batches.meta", ["train SMALL data.source=cifar data.root=cifar"]),
    "index": (
        "*.npz",
        [
            "train SMALL data=folder data.root=FIXTURES/folder data.index_cache=index",
            "train SMALL data.source=tar data.root=FIXTURES/tar data.index_cache=index",
        ],
    ),
    "timm": (
        "config.json",
        [
            "train SMALL weights=timm/model.pth data.normalization=weights",
            # Few images: without a size in the file timm's 224 pixels count, which are 12,544 tokens each here.
            "test TRAINING weights=timm/model.pth preprocessing=weights data.val_fraction=0.01",
        ],
    ),
    "ledger.json": (
        "*.json",
        ["ledger report ledger.json output=page", "ledger check FIXTURES/ledger.json ledger.json"],
    ),
}


def mutants(this: Try) -> None:
    """A file of any format that is read is damaged: its reader says so in a line, or reads it. A few are whole."""
    name = this.draw.choice(sorted(FORMATS))
    patterns, readers = FORMATS[name]
    copied = this.fixtures.copy(name, this.folder)
    file = pick(this.draw, copied, *patterns.split()) if copied.is_dir() else copied
    if not (whole := this.draw.random() < 0.03):
        file.write_bytes(mutant(this.draw, file.name, file.read_bytes()))
    reader = this.draw.choice(readers)
    this.about, this.tried = f"{file.relative_to(this.folder)}{', whole' * whole}, {reader}", 1
    words = reader.replace("SMALL", _SMALL).replace("FIXTURES", str(this.fixtures.folder)).split()
    training = this.fixtures.train[1:]
    arguments = [each for word in words for each in (training if word == "TRAINING" else [word])]
    outcome = attempt(tool(*arguments), this.folder)
    # A loss that `check` finds is no fault.
    lost = (1,) if "check" in words else ()
    this.judge(outcome, *((0,) if whole else (0, 2, *lost)))


_ODD = (
    *("", "null", "true", "-1", "0", "1", "3", "7", "0.5", "nan", "inf", "1e308", "abc", "[]", "{}", "[1,2]"),
    *(
        "100", "4097", "1000000", "2147483648", "9" * 30, "a" * 5000, "'x y'", "../odd", "/proc/self", "/dev/zero",
        "${oc.env:HOME}", "${odd}", "'\x1b[31m'", "é",
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
        resource.setrlimit(resource.RLIMIT_AS, (10 << 30, 10 << 30))

    arguments = [*this.fixtures.train, "schedule.max_steps=1", "run_dir=run", *odd]
    this.judge(attempt(tool(*arguments), this.folder, setup=limit_memory))


def surroundings(this: Try) -> None:
    """Odd environments, limits, files and links."""
    # Each once, in an order of the seed, before any comes again.
    names = random.Random(this.seed).sample(sorted(CASES), len(CASES))
    name = names[this.number] if this.number < len(names) else this.draw.choice(names)
    this.about, this.tried = name, 1
    case = CASES[name]
    if case.image is not None:
        case.image(this.fixtures.copy("folder", this.folder) / "train" / "n01440764" / "x.jpg")
    if case.change is not None:
        case.change(this.fixtures.copy("run", this.folder))
    words = case.words.replace("FIXTURES", str(this.fixtures.folder)).split()
    arguments = [*this.fixtures.train, *words[1:]] if words[0] == "train" else words
    # Three of four: with another oddity, so that cases meet.
    oddity = this.draw.choice(({}, {"LC_ALL": "C"}, {"HOME": "/nonexistent"}, {"TMPDIR": "/x"}))
    environment = {**case.environment, **oddity}
    outcome = attempt(case.run(*arguments), this.folder, limit=case.limit, setup=case.setup, environment=environment)
    if case.workers_tell:
        outcome = replace(outcome, text=outcome.text.splitlines()[-1] if outcome.text else "")
    this.judge(outcome, *case.allowed)
    this.short += [] if case.after is None else case.after(this.folder, outcome.text)


def jpegs(this: Try) -> None:
    """Mutants through the decoder in C, compiled with sanitizers for addresses and undefined behaviour."""
    seed, count = this.draw.getrandbits(30), 20_000
    files = sorted(map(str, (this.fixtures.folder / "jpegs").iterdir()))
    command = [this.fixtures.folder / "jpeg_fuzz", str(seed), str(count), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    this.about, this.tried = f"jpeg_fuzz {seed} {count}", count
    this.short += [] if done.returncode == 0 else [done.stderr[:2000]]


# Name -> a try, and its share of the time.
FAMILIES: Mapping[str, tuple[Callable[[Try], None], float]] = {
    "kills": (kills, 0.24),
    "full disks": (full_disks, 0.04),
    "ranks": (ranks, 0.06),
    "stalls": (stalls, 0.04),
    "helpers": (helpers, 0.05),
    "mutants": (mutants, 0.18),
    "values": (values, 0.14),
    "surroundings": (surroundings, 0.12),
    "jpegs": (jpegs, 0.13),
}

os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
