"""The arms of a ladder: which settings are measured, and what each is compared with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast.config.ladder import Ladder, Mode, Rung
from pycls_fast.config.quoting import key_of
from pycls_fast.config.suggestions import did_you_mean
from pycls_fast.errors import UserError
from pycls_fast.paths import user_path

EVERYTHING = "everything"

# Longest name in a path, in characters; file systems allow about 250.
_LONGEST = 60


@dataclass(frozen=True)
class Arm:
    """One setting to be measured.

    Attributes:
        name: the rung's; the first arm is the reference of all others.
        overrides: appended to those of the experiment.
        ranks: number of processes.
        before: the name of the arm that this one is one step away from; None for the first.
        note: what the ladder says about the rung.
        tree: folder of the checkout whose code it runs; None for this one.
        overridden: why its settings equal those of the arm that it is compared with, so that there is nothing to run.
    """

    name: str
    overrides: tuple[str, ...]
    ranks: int
    before: str | None
    note: str = ""
    tree: str | None = None
    overridden: str | None = None

    @property
    def slug(self) -> str:
        """Its part of a file's path: the readable name and a digest, so that changed settings get a new path."""
        made_of = json.dumps([self.name, self.overrides, self.ranks, *([self.tree] if self.tree else [])])
        return f"{readable(self.name)}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"


def tree_path(tree: str) -> Path:
    """The absolute path of a rung's checkout, which may be relative to the working folder."""
    return user_path(tree).resolve()


def readable(name: str) -> str:
    """A name as part of a path; not unique."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_LONGEST] or "arm"


def pick(ladder: Ladder, names: Sequence[str]) -> Ladder:
    """The ladder with only the rungs that are named or set a named key, and those that they are `against`, in order.

    A key that a rung sets to the same value as the rung it is against does not count as its own.

    Raises:
        UserError: a name that matches no rung.
    """
    if not names:
        return ladder
    rungs = {rung.name: rung for rung in ladder.rungs}
    words = {rung.name: {rung.name, *map(key_of, _own(rung, rungs))} for rung in ladder.rungs}
    # A switch may be named without its section: "compile" for speed.compile.
    words = {name: them | {word.removeprefix("speed.") for word in them} for name, them in words.items()}
    known = set().union(*words.values())
    wrong = [
        f"switches: no rung is called {name} or sets it{did_you_mean(name, known)}; there are {', '.join(words)}"
        for name in names
        if name not in known
    ]
    if wrong:
        raise UserError(*wrong)
    picked: set[str] = set()
    for name in rungs:
        other: str | None = name if words[name] & set(names) else None
        while other is not None and other not in picked:
            picked.add(other)
            other = rungs[other].against
    return ladder.model_copy(update={"rungs": tuple(rung for rung in ladder.rungs if rung.name in picked)})


def _own(rung: Rung, rungs: Mapping[str, Rung]) -> list[str]:
    """The overrides of a rung that the one it is against does not have."""
    others = () if rung.against is None else rungs[rung.against].overrides
    return [override for override in rung.overrides if override not in others]


def arms(ladder: Ladder, mode: Mode, *, ranks: int = 1, impossible: Collection[str] = ()) -> list[Arm]:
    """The arms in the order of the ladder, after the reference.

    Args:
        ladder: has at least one rung.
        mode: "cumulative": each rung on top of those before it. "one_at_a_time": only that rung on the baseline,
            compared with the baseline or with the rung that it is against.
            "leave_one_out": all rungs together, then all but one.
        ranks: processes per arm, unless the ladder sets them.
        impossible: rungs that cannot run here. They still become arms, so that the report shows them as missing, but
            other arms do not include their change.
    """
    base = _arm(ladder.baseline, (), ladder.baseline.ranks or ranks, None)
    if mode == "one_at_a_time":
        return [base, *(_alone(rung, base) for rung in ladder.rungs)]
    if mode == "leave_one_out":
        return _leave_one_out(ladder, base, impossible)
    made = [base]
    last = base
    for rung in ladder.rungs:
        arm = _arm(rung, last.overrides, rung.ranks or last.ranks, last.name)
        made.append(arm)
        last = last if rung.name in impossible else arm
    return made


def _arm(rung: Rung, overrides: tuple[str, ...], ranks: int, before: str | None) -> Arm:
    return Arm(rung.name, merged(overrides, rung.overrides), ranks, before, rung.note, rung.tree)


def _alone(rung: Rung, base: Arm) -> Arm:
    """Only this rung on the baseline; its note names the rung that it is against."""
    arm = _arm(rung, base.overrides, rung.ranks or base.ranks, rung.against or base.name)
    if rung.against is None:
        return arm
    told = f"the one before is '{rung.against}'"
    return dataclasses.replace(arm, note=f"{told}; {arm.note}" if arm.note else told)


def merged(*parts: Sequence[str]) -> tuple[str, ...]:
    """Overrides concatenated; of those with the same key only the last is kept, as Hydra may refuse a second one."""
    last = {_key(override): override for part in parts for override in part}
    keys = dict.fromkeys(reversed([_key(override) for part in parts for override in part]))
    return tuple(last[key] for key in reversed(keys))


def _key(override: str) -> str:
    # Not quoting.key_of, which drops "~" as well: ~key and key=value are two overrides.
    return override.lstrip("+").partition("=")[0]


def _leave_one_out(ladder: Ladder, base: Arm, impossible: Collection[str]) -> list[Arm]:
    possible = [rung for rung in ladder.rungs if rung.name not in impossible]

    def made(name: str, rungs: Sequence[Rung], before: str | None, note: str = "") -> Arm:
        overrides = merged(base.overrides, *(rung.overrides for rung in rungs))
        ranks = next((rung.ranks for rung in reversed(rungs) if rung.ranks), base.ranks)
        return Arm(name, overrides, ranks, before, note)

    everything = made(EVERYTHING, possible, None)

    def without(rung: Rung) -> Arm:
        arm = made(f"without {rung.name}", [other for other in possible if other != rung], EVERYTHING, rung.note)
        if (sorted(arm.overrides), arm.ranks) != (sorted(everything.overrides), everything.ranks):
            return arm
        return dataclasses.replace(arm, overridden=_overridden(rung, possible))

    # A rung that cannot run is in none of them, and is shown as that rung on the baseline.
    return [
        everything,
        *(
            _arm(rung, base.overrides, rung.ranks or base.ranks, EVERYTHING)
            if rung.name in impossible
            else without(rung)
            for rung in ladder.rungs
        ),
    ]


def _overridden(rung: Rung, rungs: Sequence[Rung]) -> str:
    """Why leaving out a rung makes no difference."""
    keys = {_key(override) for override in rung.overrides}
    later = [
        other.name
        for other in rungs[rungs.index(rung) + 1 :]
        if keys & {_key(override) for override in other.overrides}
    ]
    why = f"{rung.name} is overridden by {', '.join(later)}" if later else f"{rung.name} changes nothing"
    return f"{why}: the same settings as '{EVERYTHING}'"
