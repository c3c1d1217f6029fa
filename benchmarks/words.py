"""The command lines `FILE PATH... [key=value ...]` of several scripts here."""

from __future__ import annotations

import argparse


def command_words(text: str | None, *names: str, **options: str) -> tuple[list[str], dict[str, str]]:
    """The words of the command line, as many as `names`, and the `options` with what it says of them; `--help` prints
    the script's text, mistakes end with status 2."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name)
    parser.add_argument("options", nargs="*", metavar="key=value")
    given = vars(parser.parse_args())
    asked = dict(word.partition("=")[::2] for word in given["options"] if "=" in word)
    if unknown := [word for word in given["options"] if word.partition("=")[0] not in options or "=" not in word]:
        parser.error(f"{', '.join(unknown)}: write key=value; the keys are {', '.join(options) or 'none'}")
    return [given[name] for name in names], options | asked
