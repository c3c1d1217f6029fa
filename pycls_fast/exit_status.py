"""The exit statuses of all tools."""

from __future__ import annotations

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
