"""`python -m tests.faults --seed 1 --minutes 30`: tries families of faults in turn, and says how many fell short.

A try depends on the seed, its family and its number only: `--only kills --first 17 --tries 1` repeats one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

# Before the forks, so that each try imports nothing.
for module in ("train", "predict", "score", "measure"):
    importlib.import_module(f"pycls_fast.commands.{module}")
for module in ("train", "inference", "ledger.runs", "ledger.compare"):
    importlib.import_module(f"pycls_fast.{module}")

from tests.faults.families import FAMILIES, Try  # noqa: E402
from tests.faults.lab import Lab  # noqa: E402


def run(*, seed: int, minutes: float, only: str | None = None, first: int = 0, tries: int | None = None) -> int:
    """Try until the time is over; the number of tries that fell short."""
    tried, short, done, spent = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    names = [only] if only is not None else list(FAMILIES)
    # No `TemporaryDirectory`: forked processes would remove it when they exit.
    place = Path(tempfile.mkdtemp(prefix="faults"))
    (home := place / "lab").mkdir()
    lab = Lab(home)
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until and (tries is None or min(done[name] for name in names) < tries):
        # The family that has had least of its share of the time.
        name = min(names, key=lambda name: (spent[name] / FAMILIES[name][1], names.index(name)))
        number, begun = first + done[name], time.monotonic()
        folder = place / f"{name.replace(' ', '_')}_{number}" / "a" / "b"
        folder.mkdir(parents=True)
        this = Try(seed, name, number, lab, folder)
        try:
            FAMILIES[name][0](this)
        except Exception:  # noqa: BLE001  # the harness itself
            this.short.append(traceback.format_exc())
        tried[name] += this.tried
        done[name] += 1
        spent[name] += time.monotonic() - begun
        if this.short:
            short[name] += 1
            print(f"SHORT {name} {number}: {this.about}", *this.short, sep="\n    ", flush=True)
        remove(folder.parents[1])
    remove(place)
    for name in names:
        print(f"{name:14} tried {tried[name]:9,}   short {short[name]:3}   in {spent[name]:.0f} s")
    print(f"seed {seed}: {sum(tried.values()):,} tried, {sum(short.values())} short")
    return sum(short.values())


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
