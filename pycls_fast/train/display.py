"""Terminal output: a table at the start, a live bar on a terminal or plain lines elsewhere, notes and warnings."""

from __future__ import annotations

import datetime
import io
import os
import time
import traceback
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from pycls_fast.errors import UserError, discard_output, printable, wrapped

_PLAIN_SECONDS = 5.0
# Seconds between two lines on the progress of what has a bar on a terminal.
_PATIENCE = 10.0
# From this many columns of the terminal on there is room for a long bar.
_WIDE = 100


class Display:
    """Everything that rank 0 prints; others print nothing. `mode` "auto" is "bar" on a terminal, else "plain"."""

    def __init__(self, *, speaks: bool, mode: str) -> None:
        self.console = _Console(quiet=not speaks, soft_wrap=True, highlight=False, emoji=False)
        self.console.says_so = True
        if not self.console.is_terminal:
            # The width is unknown, and wrapped lines are hard to search.
            self.console.width = 160
        # Until there is a folder for it, in memory.
        self._log = Console(
            file=io.StringIO(), quiet=not speaks, width=160, soft_wrap=True, highlight=False, emoji=False
        )
        self._last_line = float("-inf")
        whole = Column(no_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(24 if self.console.width >= _WIDE else 8, table_column=whole),
            MofNCompleteColumn(table_column=whole),
            _Numbers(table_column=Column()),
            TextColumn("left"),
            TimeRemainingColumn(table_column=whole),
            console=self.console,
            refresh_per_second=4,
            # Otherwise it would stay below the last line, which names the run folder.
            transient=True,
            disable=not speaks or mode == "plain" or (mode == "auto" and not self.console.is_terminal),
        )
        self._training: TaskID

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A disabled one would print an empty line.
        if not self._bar.disable:
            self._bar.stop()
        if error is not None:
            known = isinstance(error, UserError | KeyboardInterrupt | SystemExit)
            lines = [f"error: {error or type(error).__name__}"] if known else traceback.format_exception(error)
            self._write("\n".join(line.rstrip() for line in lines))
        with suppress(OSError):
            self._log.file.close()

    def keep_log(self, file: TextIO) -> None:
        """Write what has been printed, and what will be, into a file."""
        before, self._log.file = self._log.file, file
        assert isinstance(before, io.StringIO)
        self._write(before.getvalue().rstrip("\n"))

    def _write(self, text: RenderableType) -> None:
        """Write into the log; training outlives a full disk."""
        with suppress(OSError, ValueError):
            self._log.print(text, markup=False)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        table = plain_table([{"name": name, "value": value} for name, value in rows])
        table.title, table.title_justify = Text(title, style="table.title"), "left"
        table.show_header = False
        self.console.print(table)
        self._write(table)

    def note(self, text: str, *, style: str | None = None, whole: bool = False) -> None:
        """Print a line; on a terminal it is wrapped between words, unless it is to be copied as a `whole`."""
        width = self.console.width if self.console.is_terminal and not whole else None
        self.console.print(wrapped(printable(text), width), style=style, markup=False)
        self._write(printable(text))

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}", style="yellow")

    def begin_training(self, step: int, total_steps: int, *, compiles: bool = False) -> None:
        """Show the run's progress bar from this step on; until the first numbers it says whether it `compiles`."""
        doing = "compiling" if compiles else "train"
        self._training = self._bar.add_task(doing, total=total_steps, completed=step, numbers="")

    def advance(self, step: int) -> None:
        self._bar.update(self._training, completed=step)

    def training(self, record: Mapping[str, Any], total_steps: int, *, epochs: int, seconds_left: float) -> None:
        loss, lr = f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}"
        rate = f"{record['images_per_second']:,.0f} images/s"
        description, numbers = f"epoch {record['epoch']:.1f}/{epochs}", f"{loss}  {rate}  {lr}"
        self._bar.update(self._training, completed=record["step"], description=description, numbers=numbers)
        now = time.monotonic()
        is_last = record["step"] == total_steps
        if now - self._last_line >= _PLAIN_SECONDS or is_last:
            self._last_line = now
            left = datetime.timedelta(seconds=round(seconds_left))
            place = f"step {record['step']}/{total_steps}  epoch {record['epoch']:.2f}/{epochs}"
            (self.note if self._bar.disable else self._write)(f"{place}  {loss}  {lr}  {rate}  left {left}")

    @contextmanager
    def scoring(self, doing: str, images: int) -> Iterator[Callable[[int], None]]:
        """Show a second bar, or lines, within the block; call the result with the images scored since the last call."""
        if self._bar.disable:
            done, spoken = 0, time.monotonic()

            def advance(count: int) -> None:
                nonlocal done, spoken
                done += count
                if (now := time.monotonic()) - spoken >= _PATIENCE:
                    spoken = now
                    self.note(f"{doing}: {done:,} of {images:,} images")

            yield advance
            return
        task = self._bar.add_task(doing, total=images, numbers="")
        try:
            yield partial(self._bar.advance, task)
        finally:
            self._bar.remove_task(task)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self.note(
            f"epoch {record['epoch']:.2f}  {record['split']} ({record['weights']})  {scores_text(record)}  "
            f"loss {record['loss']:.4f}  {record['count']:,} images"
        )


SCORES = {"top1": "top-1", "top5": "top-5", "class_top1": "balanced accuracy", "map": "mAP", "f1": "F1"}
"""What an evaluation records in percent, and its names in lines, tables and pictures."""


def says_nothing(record: Mapping[str, Any], key: str) -> bool:
    """Whether a score is none, a top-5 of 100% (as with five classes), or the mean over classes where top-1 is it."""
    silent = {"top5": "100.00", "class_top1": f"{record['top1']:.2f}"}
    return record.get(key) is None or (key in silent and f"{record[key]:.2f}" == silent[key])


def telling_scores(record: Mapping[str, Any]) -> list[str]:
    """The scores of an evaluation to show: mAP and F1 where images have several labels; else top-1, and top-5 and the
    mean over classes where they say something."""
    keys = ("map", "f1") if record.get("map") is not None else ("top1", "top5", "class_top1")
    return [key for key in keys if not says_nothing(record, key)]


def scores_text(record: Mapping[str, Any]) -> str:
    """Those of `telling_scores`."""
    return ", ".join(f"{SCORES[key]} {record[key]:.2f}%" for key in telling_scores(record))


class _Numbers(ProgressColumn):
    """A task's numbers, the least important last; they are cut off where the terminal is too narrow for all."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


class _Console(Console):
    """Prints until its output fails, then nothing more: training outlives its terminal, `| tee` and a full disk."""

    says_so = False
    """Whether a line on standard error says that it has failed."""

    def tell(self, text: str, style: str = "") -> None:
        """Print a text as it is: square brackets are no markup, and names in it do not control the terminal."""
        self.print(Text(printable(text), style=style))

    def __exit__(self, *error: Any) -> None:
        # Everything that is printed, by the bar's thread too, is written here.
        try:
            super().__exit__(*error)
        except OSError as failure:
            self.quiet = True
            discard_output()
            if self.says_so:
                # Not through `sys.stderr`: a live bar redirects it to the output that has just failed.
                with suppress(OSError):
                    reason = failure.strerror
                    os.write(2, f"warning: standard output failed ({reason}); nothing more is shown\n".encode())

    def on_broken_pipe(self) -> None:
        """Leave it to `__exit__`; rich would end the process with status 1."""
        raise


def plain_table(rows: Sequence[Mapping[str, str]], *, right: Collection[str] = (), no_wrap: bool = False) -> Table:
    """A table without borders, of plain texts (square brackets are not markup) by column; some columns are aligned to
    the right. With `no_wrap`, cells that do not fit are cut off."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(
            Text(column),
            justify="right" if column in right else "left",
            no_wrap=no_wrap,
            overflow="ellipsis" if no_wrap else "fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(row.get(column, ""))) for column in columns))
    return table


def wide_console(file: TextIO | None = None) -> _Console:
    """A console for tables. Without a terminal nothing is wrapped: a path stays in one piece."""
    console = _Console(file=file, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def human(value: float, unit: str = "") -> str:
    """A number with a metric prefix: 86.57 M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def one_line(name: str, most: int = 24) -> str:
    """The name on one line, cut to so many characters; control characters and lone surrogates become "?"."""
    shown = "".join("?" if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in name)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def epochs(value: float) -> str:
    """A number of epochs with at most two decimals: 50, 0.25."""
    return f"{round(value, 2):g}"
