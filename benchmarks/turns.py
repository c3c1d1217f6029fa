"""Contenders that take turns in one process, so that a drift of the machine affects all of them alike."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pycls_fast.ledger.report.statistics import Speedup, paired_ratio, spread

Clock = Callable[[], float]
_CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "process": time.process_time}


@dataclass
class Contender:
    """What is timed, with the seconds of each of its turns; `prepare` comes before and does not count."""

    name: str
    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)

    def over(self, other: Contender) -> Speedup:
        """How many times faster it is than another one, in pairs within each round."""
        return paired_ratio([1 / s for s in other.seconds], [1 / s for s in self.seconds])


def take_turns(contenders: Sequence[Contender], rounds: int, clock: Clock, *, warmup: int = 0) -> None:
    """Run each once per round, in alternating order; rounds of the warm-up do not count."""
    for done in range(-warmup, rounds):
        for contender in contenders if done % 2 == 0 else contenders[::-1]:
            contender.prepare()
            begin = clock()
            contender.step()
            if done >= 0:
                contender.seconds.append(clock() - begin)


def around_median(values: Sequence[float], digits: int = 0) -> str:
    """The median with the tenth and the ninetieth percentile."""
    found = spread(values)
    return f"{found.p50:.{digits}f} ({found.p10:.{digits}f} to {found.p90:.{digits}f})"


def add_clock(parser: argparse.ArgumentParser) -> None:
    text = "process: CPU time of this process, for one thread on a shared machine"
    parser.add_argument("--clock", choices=list(_CLOCKS), default="wall", help=text)


def clock_of(parser: argparse.ArgumentParser, options: argparse.Namespace, *, is_alone: bool, use: str) -> Clock:
    """The clock of the command line; CPU time is that of all threads, so that one has to do all the work."""
    if options.clock == "process" and not is_alone:
        parser.error(f"--clock process: needs one thread that does all the work; use {use}")
    return _CLOCKS[options.clock]
