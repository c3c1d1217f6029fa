"""The one exception for user mistakes, any other being a bug in the program, and the exit statuses of all tools."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

DONE, FAULT, MISTAKE, STOPPED = 0, 1, 2, 3
# The shells' convention: 128 + the number of SIGINT.
INTERRUPTED = 130
OUT_OF_MEMORY = "out of memory"
"""In the error line of every tool that ran out of memory."""


class Finished(int):
    """The status `DONE` of a training, with the number that a sweeper such as Optuna's minimises."""

    objective: float | None

    def __new__(cls, objective: float | None) -> Finished:
        """Status 0; `objective` is None if there is no result."""
        status = super().__new__(cls, DONE)
        status.objective = objective
        return status


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, or its class's name if there is none."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch found no memory left, on an accelerator or on the CPU."""
    # torch takes seconds to import; if it was not imported, it allocated nothing.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Beside a GPU, or in a data worker ("Caught ..."), it is other memory than the advice is about.
    text = str(error)
    return "can't allocate memory" in text and not (text.startswith("Caught ") or torch.cuda.is_initialized())


def first_few(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


class UserError(Exception):
    """A mistake in the configuration, the data or the machine's set-up that the user can fix.

    Each line says what is wrong, where it was set and what to do. The command line prints the lines to
    standard error without a traceback and exits with status 2.
    """

    def __init__(self, *lines: str) -> None:
        if not lines:
            raise ValueError("UserError needs at least one line")
        super().__init__("\n".join(lines))
        self.lines = lines

    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        # The default rebuilds from the joined text, which would merge the lines if a worker process raised it.
        return type(self), self.lines


def one_of(key: str, value: object, allowed: Iterable[object]) -> None:
    """Check that a value is one of the allowed ones.

    Raises:
        UserError: it is not.
    """
    names = list(allowed)
    if value not in names:
        raise UserError(f"{key}: must be one of {', '.join(map(str, names))}; got {value}")
