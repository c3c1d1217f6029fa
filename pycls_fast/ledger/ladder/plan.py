"""The variants of a ladder: which settings are measured, what each is compared with, and which of them run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pycls_fast.config.keys import key_of
from pycls_fast.config.ladder import Ladder, Mode, Variant
from pycls_fast.config.messages import did_you_mean
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.ledger.ladder.processes import ProcessResult

EVERYTHING = "everything"

# Longest name in a path, in characters; file systems allow about 250.
_LONGEST = 60


def slug(variant: Variant) -> str:
    """A variant's part of a path: the readable name and a digest, so that changed settings get a new path."""
    tree = [variant.tree] if variant.tree else []
    made_of = json.dumps([variant.name, variant.overrides, variant.ranks, *tree])
    return f"{readable(variant.name)}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"


def readable(name: str) -> str:
    """A name as part of a path; not unique."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_LONGEST] or "variant"


def tree_path(tree: str) -> Path:
    """The absolute path of a variant's checkout, which may be relative to the working folder."""
    return user_path(tree).resolve()


def pick(ladder: Ladder, names: Sequence[str]) -> Ladder:
    """The ladder with only the variants that are named or set a named key, and those that they are `against`, in order.

    A key that a variant sets to the same value as the one it is against does not count as its own.

    Raises:
        UserError: a name that matches no variant.
    """
    if not names:
        return ladder
    variants = {variant.name: variant for variant in ladder.variants}
    words = {variant.name: {variant.name, *map(key_of, _own(variant, variants))} for variant in ladder.variants}
    # A switch may be named without its section: "compile" for speed.compile.
    words = {name: them | {word.removeprefix("speed.") for word in them} for name, them in words.items()}
    known = set().union(*words.values())
    wrong = [
        f"switches: no variant is called {name} or sets it{did_you_mean(name, known)}; there are {', '.join(words)}"
        for name in names
        if name not in known
    ]
    if wrong:
        raise UserError(*wrong)
    picked: set[str] = set()
    for name in variants:
        other: str | None = name if words[name] & set(names) else None
        while other is not None and other not in picked:
            picked.add(other)
            other = variants[other].against
    return ladder.model_copy(update={"variants": tuple(v for v in ladder.variants if v.name in picked)})


def _own(variant: Variant, variants: Mapping[str, Variant]) -> list[str]:
    """The overrides of a variant that the one it is against does not have."""
    others = () if variant.against is None else variants[variant.against].overrides
    return [override for override in variant.overrides if override not in others]


def merged(*parts: Sequence[str]) -> tuple[str, ...]:
    """Overrides concatenated; of those with the same key only the last is kept, as Hydra may refuse a second one."""
    last = {_key(override): override for part in parts for override in part}
    keys = dict.fromkeys(reversed([_key(override) for part in parts for override in part]))
    return tuple(last[key] for key in reversed(keys))


def _key(override: str) -> str:
    # Not quoting.key_of, which drops "~" as well: ~key and key=value are two overrides.
    return override.lstrip("+").partition("=")[0]


def plan(ladder: Ladder, mode: Mode, *, ranks: int = 1, impossible: Collection[str] = ()) -> list[Variant]:
    """The variants in the order of the ladder, after the reference.

    Args:
        ladder: has at least one variant.
        mode: "cumulative": each on top of those before it. "one_at_a_time", "crossed": only it on the baseline,
            compared with the baseline or with the variant that it is against. "leave_one_out": all together, then all
            but one.
        ranks: processes of each, unless the ladder sets them.
        impossible: those that cannot run here. They are still listed, so that the report shows them as missing, but
            others do not include their change.
    """
    base = _completed(ladder.baseline, (), ranks, None)
    if mode in ("one_at_a_time", "crossed"):
        return [base, *(_alone(variant, base) for variant in ladder.variants)]
    if mode == "leave_one_out":
        return _leave_one_out(ladder, base, impossible)
    made = [base]
    last = base
    for variant in ladder.variants:
        made.append(_completed(variant, last.overrides, last.ranks, last.name))
        last = last if variant.name in impossible else made[-1]
    return made


def _completed(variant: Variant, below: Sequence[str], ranks: int | None, before: str | None) -> Variant:
    """A variant on top of the overrides `below`; `ranks` if it sets none."""
    overrides = merged(below, variant.overrides)
    return variant.model_copy(update={"overrides": overrides, "ranks": variant.ranks or ranks, "against": before})


def _alone(variant: Variant, base: Variant) -> Variant:
    """Only this change on the baseline; its note names the variant that it is against."""
    made = _completed(variant, base.overrides, base.ranks, variant.against or base.name)
    if variant.against is None:
        return made
    told = f"the one before is '{variant.against}'"
    return made.model_copy(update={"note": f"{told}; {made.note}" if made.note else told})


def _leave_one_out(ladder: Ladder, base: Variant, impossible: Collection[str]) -> list[Variant]:
    possible = [variant for variant in ladder.variants if variant.name not in impossible]

    def made(name: str, together: Sequence[Variant], before: str | None, note: str = "") -> Variant:
        overrides = merged(base.overrides, *(variant.overrides for variant in together))
        ranks = next((variant.ranks for variant in reversed(together) if variant.ranks), base.ranks)
        return Variant(name=name, overrides=overrides, ranks=ranks, against=before, note=note)

    # One that cannot run is in none of them, and is shown by itself on the baseline.
    return [
        made(EVERYTHING, possible, None),
        *(
            _completed(variant, base.overrides, base.ranks, EVERYTHING)
            if variant.name in impossible
            else made(f"without {variant.name}", [v for v in possible if v != variant], EVERYTHING, variant.note)
            for variant in ladder.variants
        ),
    ]


class Selection:
    """The variants of a ladder, which change as it becomes known what cannot run.

    Args:
        ladder: the changes to the experiment.
        mode: how they become variants.
        ranks: processes of each, unless the ladder sets them.
        device: "cpu" or "cuda": where they run.

    Attributes:
        impossible: variants that cannot run on this machine or with this model, and why.
        failed: variants whose process failed, and why.

    Raises:
        UserError: a baseline that is not for this device.
    """

    def __init__(self, ladder: Ladder, mode: Mode, ranks: int, device: str) -> None:
        self.impossible: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._ladder, self._mode, self._ranks = ladder, mode, ranks
        # Those that later variants do not include, and those for which no process is started.
        self._excluded: set[str] = set()
        self._untried: set[str] = set()
        for variant in (ladder.baseline, *ladder.variants):
            if variant.needs not in (None, device):
                self.impossible[variant.name] = f"needs {str(variant.needs).upper()}"
                self._excluded.add(variant.name)
                self._untried.add(variant.name)
        if ladder.baseline.name in self.impossible:
            why = self.impossible[ladder.baseline.name]
            raise UserError(f"ladder: the baseline '{ladder.baseline.name}' {why}")

    def variants(self) -> list[Variant]:
        """The variants, given what is known so far about which can run here."""
        return plan(self._ladder, self._mode, ranks=self._ranks, impossible=self._excluded)

    def runnable(self) -> list[Variant]:
        """The variants that are not known to fail and are not overridden."""
        return [variant for variant in self.variants() if self.why_not(variant) is None]

    def why_not(self, variant: Variant) -> str | None:
        """Why a variant is not run; None if it is."""
        return self.impossible.get(variant.name) or self.failed.get(variant.name) or self.overridden(variant)

    def overridden(self, variant: Variant) -> str | None:
        """Why leaving out a variant makes no difference, in mode leave_one_out; None if it makes one."""
        left_out = variant.name.removeprefix("without ")
        if self._mode != "leave_one_out" or left_out == variant.name:
            return None
        everything = self.variants()[0]
        if (sorted(variant.overrides), variant.ranks) != (sorted(everything.overrides), everything.ranks):
            return None
        possible = [each for each in self._ladder.variants if each.name not in self._excluded]
        place = [each.name for each in possible].index(left_out)
        keys = set(map(_key, possible[place].overrides))
        later = [each.name for each in possible[place + 1 :] if keys & set(map(_key, each.overrides))]
        why = f"{left_out} is overridden by {', '.join(later)}" if later else f"{left_out} changes nothing"
        return f"{why}: the same settings as '{EVERYTHING}'"

    def alone(self) -> list[Variant]:
        """Each by itself, in mode leave_one_out only: shows which cannot be part of "everything"."""
        if self._mode != "leave_one_out":
            return []
        made = plan(self._ladder, "one_at_a_time", ranks=self._ranks)[1:]
        return [variant for variant in made if self.why_not(variant) is None]

    def in_order(self) -> Iterator[Variant]:
        """The variants, recomputed after each one: leaving one out changes those after it, but not their number."""
        for position in range(len(self.variants())):
            yield self.variants()[position]

    def tried_in_vain(self) -> int:
        """Number of variants whose process was started and did not measure anything."""
        return len(self.impossible) + len(self.failed) - len(self._untried)

    def rule_out(self, refusal: Callable[[Variant], str | None]) -> dict[str, str]:
        """Leave out, in the ladder's order, the variants for which `refusal` gives a reason; returns these by name.

        In mode leave_one_out only the single changes are checked.

        Raises:
            UserError: the reference is refused.
        """
        refused: dict[str, str] = {}
        for variant in self.alone() or self.in_order():
            why = refusal(variant) if self.why_not(variant) is None else None
            if why is None:
                continue
            if variant.against is None:
                raise UserError(f"ladder: the reference '{variant.name}' does not run: {why}")
            refused[variant.name] = self.impossible[variant.name] = why
            self._excluded.add(variant.name)
            self._untried.add(variant.name)
        return refused

    def exclude(self, variant: Variant, finished: ProcessResult) -> None:
        """Leave out a variant whose process failed, and its change from all others.

        Raises:
            UserError: it is the reference.
        """
        self.blame(variant, finished)
        self._excluded.add(variant.name)

    def blame(self, variant: Variant, finished: ProcessResult) -> None:
        """Leave out a variant whose process failed.

        Raises:
            UserError: it is the reference.
        """
        if variant.against is None:
            raise UserError(
                f"ladder: the reference '{variant.name}' does not run: {finished.reason()} (full log: {finished.log})"
            )
        (self.impossible if finished.refused else self.failed)[variant.name] = finished.reason()
