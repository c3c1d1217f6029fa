"""The variants of a ladder: which settings are measured, what each is compared with, and which of them run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pycls_fast.config.keys import key_of
from pycls_fast.config.ladder import Ladder, Mode, Variant
from pycls_fast.errors import UserError, did_you_mean, refuse
from pycls_fast.files import user_path
from pycls_fast.ledger.ladder.processes import ProcessResult

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
    refuse(
        f"switches: no variant is called {name} or sets it{did_you_mean(name, known)}; there are {', '.join(words)}"
        for name in names
        if name not in known
    )
    picked = closed(ladder, [name for name in variants if words[name] & set(names)])
    return ladder.model_copy(update={"variants": tuple(v for v in ladder.variants if v.name in picked)})


def _own(variant: Variant, variants: Mapping[str, Variant]) -> list[str]:
    """The overrides of a variant that the one it is against does not have."""
    others = () if variant.against is None else variants[variant.against].overrides
    return [override for override in variant.overrides if override not in others]


def closed(ladder: Ladder, names: Collection[str]) -> tuple[str, ...]:
    """The names with those that they are against, in the ladder's order."""
    against = {variant.name: variant.against for variant in ladder.variants}
    found: set[str] = set()
    for start in names:
        name: str | None = start
        while name is not None and name not in found:
            found.add(name)
            name = against.get(name)
    return tuple(name for name in against if name in found)


def merged(*parts: Sequence[str]) -> tuple[str, ...]:
    """Overrides concatenated; of those with the same key only the last is kept, as Hydra may refuse a second one."""
    last = {override_key(override): override for part in parts for override in part}
    keys = dict.fromkeys(reversed([override_key(override) for part in parts for override in part]))
    return tuple(last[key] for key in reversed(keys))


def override_key(override: str) -> str:
    """The key that an override sets or, with a "~", removes."""
    # Unlike `key_of`: ~key and key=value are two overrides.
    return override.lstrip("+").partition("=")[0]


def plan(ladder: Ladder, mode: Mode, *, ranks: int = 1, impossible: Collection[str] = ()) -> list[Variant]:
    """The variants that are timed, after the reference, in the order of the ladder.

    Args:
        ladder: has at least one variant.
        mode: "cumulative": each on top of those before it. "crossed": each by itself on the baseline, compared with the
            baseline or with the variant that it is against.
        ranks: processes of each, unless the ladder sets them.
        impossible: those that cannot run here. They are still listed, so that the report shows them as missing, but
            others do not include their change.
    """
    base = _completed(ladder.baseline, (), ranks, None)
    made, below = [base], base
    for variant in ladder.variants:
        if mode == "crossed":
            made.append(_completed(variant, base.overrides, base.ranks, variant.against or base.name))
        else:
            made.append(_completed(variant, below.overrides, below.ranks, below.name))
            below = below if variant.name in impossible else made[-1]
    return made


def _completed(variant: Variant, below: Sequence[str], ranks: int | None, before: str | None) -> Variant:
    """A variant on top of the overrides `below`; `ranks` if it sets none."""
    overrides = merged(below, variant.overrides)
    return variant.model_copy(update={"overrides": overrides, "ranks": variant.ranks or ranks, "against": before})


def check_reference(variant: Variant, why: str) -> None:
    """Raise a `UserError` if a variant that does not run is the reference of all others."""
    if variant.against is None:
        raise UserError(f"ladder: the reference '{variant.name}' does not run: {why}")


class Selection:
    """The variants of a ladder, which change as it becomes known what cannot run.

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
        # Those that later variants do not include.
        self._excluded: set[str] = set()
        for variant in self.variants():
            if variant.needs not in (None, device):
                why = f"needs {str(variant.needs).upper()}"
                check_reference(variant, why)
                self._refuse(variant.name, why)

    def _refuse(self, name: str, why: str) -> None:
        self.impossible[name] = why
        self._excluded.add(name)

    def variants(self) -> list[Variant]:
        """The variants, given what is known so far about which can run here."""
        return plan(self._ladder, self._mode, ranks=self._ranks, impossible=self._excluded)

    def runnable(self) -> list[Variant]:
        """The variants that are not known to fail."""
        return [variant for variant in self.variants() if self.why_not(variant) is None]

    def why_not(self, variant: Variant) -> str | None:
        """Why a variant is not run; None if it is."""
        return self.impossible.get(variant.name) or self.failed.get(variant.name)

    def in_order(self) -> Iterator[Variant]:
        """Those that are not known to fail, recomputed after each one: leaving one out changes those after it."""
        for position in range(1 + len(self._ladder.variants)):
            variant = self.variants()[position]
            if self.why_not(variant) is None:
                yield variant

    def rule_out(self, refusal: Callable[[Variant], str | None]) -> dict[str, str]:
        """Leave out, in the ladder's order, the variants for which `refusal` gives a reason; returns these by name.

        Raises:
            UserError: the reference is refused.
        """
        refused: dict[str, str] = {}
        for variant in self.in_order():
            why = refusal(variant)
            if why is not None:
                check_reference(variant, why)
                self._refuse(variant.name, why)
                refused[variant.name] = why
        return refused

    def blame(self, variant: Variant, finished: ProcessResult, *, is_first: bool) -> None:
        """Leave out a variant whose process failed; if it is its first one, others do not include its change.

        Raises:
            UserError: it is the reference.
        """
        check_reference(variant, f"{finished.reason()} (full log: {finished.log})")
        (self.impossible if finished.refused else self.failed)[variant.name] = finished.reason()
        if is_first:
            self._excluded.add(variant.name)
