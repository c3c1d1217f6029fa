"""How far work on many images is, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0
_PLAIN_SECONDS = 10.0


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress ("index /data/imagenet/train", 1000, "folders") within the block; call the result with the number
    of items just finished.

    Goes to standard error: a bar that appears after a second on a terminal, elsewhere a line every ten seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    # A path may have square brackets.
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
    task = bar.add_task(what, total=total)
    started = spoken = time.monotonic()

    def advance(count: int) -> None:
        nonlocal spoken
        bar.advance(task, count)
        now = time.monotonic()
        if console.is_terminal and now - started >= _PATIENCE:
            bar.start()
        elif not console.is_terminal and now - spoken >= _PLAIN_SECONDS:
            spoken = now
            done = bar.tasks[0].completed
            rate = f"{done / (now - started):,.3g}/s"
            console.print(f"{what}: {done:,.0f} of {total:,} {unit}, {rate}", markup=False)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
