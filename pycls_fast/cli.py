"""The command `pycls-fast VERB ...`; `python -m pycls_fast VERB ...` and the files of `tools/` are the same."""

import difflib
import sys
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from pycls_fast.errors import DONE, MISTAKE, end_imports_at_ctrl_c

VERBS = (
    *("train", "test", "predict", "export", "prepare", "time", "ledger"),
    *("compare", "runs", "knn", "lr-find", "maps"),
)


def main(verb: str | None = None) -> NoReturn:
    """Run a verb from `sys.argv`, and exit with its status; without an argument, the first word is the verb."""
    # Before anything that takes time to import; and not in the processes that a command starts.
    end_imports_at_ctrl_c()

    if verb is None:
        verb = _first_word()
        del sys.argv[1]
    _command(verb).run()
    raise AssertionError("a command exits")


def _first_word() -> str:
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in VERBS:
        return word
    if word in ("--help", "-h"):
        titles = ((each, (_command(each).__doc__ or "").partition(":")[0]) for each in VERBS)
        print("pycls-fast VERB [--config-name EXPERIMENT] [key=value ...]\n")
        print("\n".join(f"    {each:9} {title}" for each, title in titles))
        print("\npycls-fast VERB --help says more.")
        raise SystemExit(DONE)
    near = difflib.get_close_matches(word, VERBS, n=1)
    way_out = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(VERBS)}"
    print(f"error: {word}: no such verb; {way_out}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def _command(verb: str) -> ModuleType:
    return import_module(f"pycls_fast.commands.{verb.replace('-', '_')}")
