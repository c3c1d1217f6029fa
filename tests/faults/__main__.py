"""`python -m tests.faults --seed 1 --minutes 30`: tries families of faults in turn, and says how many fell short.

A try depends on the seed, its family and its number only: `--only kills --first 17 --tries 1` repeats one.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from pycls_fast.cli import VERBS, find_verb
from tests.faults.families import FAMILIES, Try
from tests.faults.fixtures import Fixtures

# Before the forks, so that each try imports nothing: torch's compiler would leave its folder of caches in the try's.
for verb in VERBS:
    find_verb(verb)
for module in ("train", "inference", "ledger.runs", "ledger.compare"):
    importlib.import_module(f"pycls_fast.{module}")
importlib.import_module("torch._dynamo")

# In the processes that try, which are forked from this one.
_fixtures: Fixtures


def run(*, seed: int, minutes: float, only: str | None = None, first: int = 0, tries: int | None = None) -> int:
    """Try until the time is over, as many at once as there are cores, up to 4; the number of tries that fell short."""
    global _fixtures
    tried, short, begun, spent = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    names = [only] if only is not None else list(FAMILIES)
    # No `TemporaryDirectory`: forked processes would remove it when they exit.
    place = Path(tempfile.mkdtemp(prefix="faults"))
    (home := place / "fixtures").mkdir()
    _fixtures = Fixtures(home)
    until = time.monotonic() + 60 * minutes
    running: dict[Future[tuple[Try, float]], str] = {}
    # A try of odd values may take 10 GB.
    cores = min(len(os.sched_getaffinity(0)), 4)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("fork")) as processes:
        while True:
            while time.monotonic() < until and len(running) < cores:
                if not (left := [name for name in names if tries is None or begun[name] < tries]):
                    break
                # Of those that do not run, the family that has had least of its share of the time.
                busy = list(running.values())
                name = min(left, key=lambda name: (name in busy, spent[name] / FAMILIES[name][1], names.index(name)))
                running[processes.submit(one, seed, name, first + begun[name], place)] = name
                begun[name] += 1
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                this, seconds = future.result()
                tried[name] += this.tried
                spent[name] += seconds
                if this.short:
                    short[name] += 1
                    print(f"SHORT {name} {this.number}: {this.about}", *this.short, sep="\n    ", flush=True)
    remove(place)
    for name in names:
        print(f"{name:14} tried {tried[name]:9,}   short {short[name]:3}   in {spent[name]:.0f} s")
    print(f"seed {seed}: {sum(tried.values()):,} tried, {sum(short.values())} short")
    return sum(short.values())


def one(seed: int, name: str, number: int, place: Path) -> tuple[Try, float]:
    """One try of a family, and its seconds."""
    begun = time.monotonic()
    folder = place / f"{name.replace(' ', '_')}_{number}" / "a" / "b"
    folder.mkdir(parents=True)
    this = Try(seed, name, number, _fixtures, folder)
    try:
        FAMILIES[name][0](this)
    except Exception:  # noqa: BLE001  # the harness itself
        this.short.append(traceback.format_exc())
    remove(folder.parents[1])
    return this, time.monotonic() - begun


def remove(folder: Path) -> None:
    """Remove a folder, whatever is in it."""
    for path in sorted(folder.rglob("*"), key=lambda path: -len(path.parts)):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", choices=list(FAMILIES))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tries", type=int)
    sys.exit(1 if run(**vars(parser.parse_args())) else 0)
