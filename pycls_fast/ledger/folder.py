"""A ledger's folder: its plan, its code, its lock, and the file of each measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Mode
from pycls_fast.errors import UserError
from pycls_fast.ledger.conditions import changed
from pycls_fast.ledger.lock import FolderLock
from pycls_fast.ledger.plan import Arm, readable
from pycls_fast.ledger.stopwatch import Stopwatch
from pycls_fast.train.output_file import write_json


class LedgerFolder:
    """The folder of one ledger, which belongs to a plan and to the code that it was measured with.

    Args:
        path: the folder, which need not exist.
        say: called with a message.
        code: returns the digest of the current code.
        accept_code: whether the folder may hold measurements of different code.

    Attributes:
        stopwatch: the wall time of all starts, once the folder is open.
        codes: digests of all code that the folder was measured with, once it is open.
    """

    def __init__(
        self,
        path: Path,
        *,
        say: Callable[[str], None] = print,
        code: Callable[[], str] = str,
        accept_code: bool = False,
    ) -> None:
        self.path = path
        self.stopwatch: Stopwatch | None = None
        self.codes: list[str] = []
        self._looks: list[int] = []
        self._say, self._code, self._accept_code = say, code, accept_code
        self._plan: dict[str, Any] = {}
        self._lock: FolderLock | None = None

    def open(self, plan: Mapping[str, Any]) -> None:
        """Create the folder, or resume in it, and lock it until `close`, which must be called even after an error.

        Raises:
            UserError: it holds results of a different plan, another ledger is using it, or it cannot be written to.
        """
        self._plan = json.loads(json.dumps(plan))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path, self._say)
            if self._plan_file.is_file():
                self._resume(json.loads(self._plan_file.read_text(encoding="utf-8")))
            else:
                self.codes = [self._code()]
            # A single seed has no interval, and is not tested.
            if self._seeds > 1 and self._seeds not in self._looks:
                self._looks.append(self._seeds)
            self._write_plan()
            self.stopwatch = Stopwatch(self.path / "took.json")
            # Saved before any timing, so that each round can be assigned to its start.
            self.stopwatch.lap()
        except OSError as error:
            raise UserError(f"output: {self.path} cannot be written to ({error.strerror}); give another") from error
        except json.JSONDecodeError as error:
            raise UserError(f"output: {self._plan_file} is damaged; choose another folder, or remove it") from error

    def check(self, plan: Mapping[str, Any]) -> None:
        """Check that the folder is new or belongs to the plan and the code; writes nothing.

        Raises:
            UserError: it holds results of a different plan or of different code.
        """
        self._plan = json.loads(json.dumps(plan))
        if self._plan_file.is_file():
            try:
                before = json.loads(self._plan_file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"output: {self._plan_file} cannot be read ({error}); choose another folder, or remove it"
                ) from error
            self._resume(before)

    def close(self) -> None:
        """Save the time of this start, and unlock the folder."""
        try:
            if self.stopwatch is not None:
                self.stopwatch.lap()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._lock = None

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that keep the folder locked as long as a process has them open."""
        return () if self._lock is None else (self._lock.inherited,)

    def _resume(self, before: Mapping[str, Any]) -> None:
        # More seeds or rounds extend the same plan.
        asked = {key: value for key, value in self._plan.items() if key not in _MAY_GROW}
        other = changed(before, asked)
        if other:
            raise UserError(
                f"output: {self.path} holds a ledger with different {', '.join(other)}; choose another folder, or "
                "remove it"
            )
        self.codes, self._looks = before["code"], before["looks"]
        if self._code() not in self.codes and not self._accept_code:
            raise UserError(
                f"output: {self.path} was measured with different code; choose another folder, remove it, or add "
                "accept_code=true if the change does not affect the measurements"
            )

    @property
    def looks(self) -> list[int]:
        """Numbers of seeds of the reports on this folder up to the present one; empty if nothing can be tested.

        A start with a new number of seeds is another look at the results (`ledger.advice`).
        """
        return self._looks[: self._looks.index(self._seeds) + 1] if self._seeds in self._looks else []

    @property
    def _seeds(self) -> int:
        return int(self._plan.get("seeds", 0))

    @property
    def _plan_file(self) -> Path:
        return self.path / "plan.json"

    def _write_plan(self) -> None:
        write_json(self._plan_file, {**self._plan, "code": self.codes, "looks": self._looks})

    def note_code(self) -> None:
        """Record the code of the next measurement: it may have been accepted, or edited while the ledger runs."""
        now = self._code()
        if now not in self.codes:
            self.codes.append(now)
            self._write_plan()
            self._say("the code differs from that of earlier measurements in this folder; the report says so")

    def timing_file(self, arm: Arm, number: int) -> Path:
        """The file of an arm's timing in one round."""
        return self.path / "timings" / arm.slug / f"round_{number}.json"

    def numerics_file(self, arm: Arm) -> Path:
        """The file of an arm's rounding errors."""
        return self.path / "numerics" / f"{arm.slug}.json"

    def gradients_file(self, arm: Arm) -> Path:
        """The file of an arm's gradient counts."""
        return self.path / "gradients" / f"{arm.slug}.json"

    def run_dir(self, arm: Arm, seed: int) -> Path:
        """The folder of an arm's training run."""
        return self.path / "runs" / arm.slug / f"seed_{seed}"

    def log_file(self, made: Path) -> Path:
        """The log of the process that makes a file or folder of this folder."""
        name = made.relative_to(self.path).with_suffix("").as_posix().replace("/", "-")
        return self.path / "logs" / f"{name}.txt"

    def timings(self, arm: Arm, rounds: int) -> Iterator[dict[str, Any]]:
        """Records of those of an arm's `rounds` rounds that exist, in order."""
        for number in range(rounds):
            file = self.timing_file(arm, number)
            if file.is_file():
                yield read_measurement(file)


def read_measurement(file: Path) -> dict[str, Any]:
    """What a measurement has written.

    Raises:
        UserError: the file is damaged, for example by a power failure.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"output: {file} is damaged ({error}); remove it, and it is measured again") from error
    if not isinstance(record, dict):
        raise UserError(f"output: {file} is damaged (not an object); remove it, and it is measured again")
    return record


# What may change when a ledger is resumed.
_MAY_GROW = ("seeds", "rounds", "jobs", "margin", "gradients")


def default_folder(config_name: str, ladder: str, mode: Mode, switches: Sequence[str]) -> Path:
    """The default folder of a ledger; the same each time, so that it resumes after a kill."""
    picked = f"-{readable(' '.join(sorted(switches)))}" if switches else ""
    return Path("ledgers") / f"{config_name}-{Path(ladder).stem}-{mode}{picked}"
