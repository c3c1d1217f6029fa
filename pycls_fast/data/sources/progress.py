"""A progress bar for slow preparations: indexing, packing, checking."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0
_PLAIN_SECONDS = 10.0


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress within the block; call the result with the number of items just finished.

    Goes to standard error: a bar that appears after a second on a terminal, elsewhere a line every ten seconds.

    Args:
        what: what is being done, e.g. "index /data/imagenet/train".
        total: the number of items, if it is known.
        unit: what is counted, e.g. "folders".
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    started = time.monotonic()
    spoken, done = started, 0
    # Time and count of the first report. What came before it is no part of the rate: workers starting, images of an
    # earlier run.
    first: tuple[float, int] | None = None
    # A path may have square brackets.
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(unit))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4, transient=True)
    task = bar.add_task(what, total=total)

    def advance(count: int) -> None:
        nonlocal spoken, done, first
        done += count
        now = time.monotonic()
        first = first or (now, done)
        if not console.is_terminal:
            if now - spoken >= _PLAIN_SECONDS:
                spoken = now
                of = f" of {total:,}" if total else ""
                rate = (done - first[1]) / max(now - first[0], 1e-9)
                speed = "" if rate == 0 else f", {rate:.2g}/s" if rate < 10 else f", {rate:,.0f}/s"
                console.print(f"{what}: {done:,}{of} {unit}{speed}", markup=False)
            return
        if now - started >= _PATIENCE and not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
