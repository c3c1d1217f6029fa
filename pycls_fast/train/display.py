"""What the person sees: a table at the start, a live bar on a terminal or plain lines elsewhere, notes and warnings."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

_PLAIN_SECONDS = 5.0


class Display:
    """The voice of rank 0; other ranks stay silent.

    Args:
        speaks: whether this rank prints at all.
        mode: "bar", "plain", or "auto": a bar where standard output is a terminal.
    """

    def __init__(self, *, speaks: bool, mode: str) -> None:
        self.console = Console(quiet=not speaks, soft_wrap=True, highlight=False)
        if not self.console.is_terminal:
            # The width is unknown, and a line broken in the middle is hard to search.
            self.console.width = 160
        self._bar: Progress | None = None
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._last_line = float("-inf")
        if speaks and (mode == "bar" or (mode == "auto" and self.console.is_terminal)):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=4,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A short table of names and values."""
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def note(self, text: str) -> None:
        """A line for the person."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """A line that should not be overlooked."""
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    def begin_training(self, step: int, total_steps: int) -> None:
        """The bar of the run, at the step it starts from."""
        if self._bar is not None:
            self._training = self._bar.add_task("train", total=total_steps, completed=step, numbers="")

    def advance(self, step: int) -> None:
        """Steps done so far."""
        if self._bar is not None and self._training is not None:
            self._bar.update(self._training, completed=step)

    def training(self, record: Mapping[str, Any], total_steps: int, *, epochs: int, seconds_left: float) -> None:
        """The numbers of a log interval."""
        numbers = f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['images_per_second']:,.0f} images/s"
        if self._bar is not None and self._training is not None:
            self._bar.update(
                self._training,
                completed=record["step"],
                description=f"epoch {record['epoch']:.1f}/{epochs}",
                numbers=numbers,
            )
            return
        now = time.monotonic()
        is_last = record["step"] == total_steps
        if now - self._last_line >= _PLAIN_SECONDS or is_last:
            self._last_line = now
            left = datetime.timedelta(seconds=round(seconds_left))
            place = f"step {record['step']}/{total_steps}  epoch {record['epoch']:.2f}/{epochs}"
            self.note(f"{place}  {numbers}  left {left}")

    def begin_evaluation(self, split: str, images: int) -> None:
        """A second bar while a split is scored."""
        if self._bar is not None:
            self._evaluating = self._bar.add_task(f"evaluate {split}", total=images, numbers="")

    def advance_evaluation(self, images: int) -> None:
        """Images scored since the last call."""
        if self._bar is not None and self._evaluating is not None:
            self._bar.advance(self._evaluating, images)

    def end_evaluation(self, record: Mapping[str, Any]) -> None:
        """The result of a split, as a line that stays."""
        if self._bar is not None and self._evaluating is not None:
            self._bar.remove_task(self._evaluating)
            self._evaluating = None
        self.note(
            f"epoch {record['epoch']:.2f}  {record['split']} ({record['weights']})  top-1 {record['top1']:.2f}%  "
            f"top-5 {record['top5']:.2f}%  loss {record['loss']:.4f}  {record['count']:,} images"
        )


def wide_console(file: TextIO | None = None) -> Console:
    """A console for tables, of standard output where no file is given.

    Away from a terminal its width is a guess, and a number cut in two is no number: there it is wide.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = 220
    return console


def human(value: float, unit: str = "") -> str:
    """A number with a metric prefix: 86.57 M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:g} {unit}".rstrip()
