"""The command line of tools without a run configuration: their own `key=value` arguments, checked as strictly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from pycls_fast.config import messages
from pycls_fast.config.reporting import reporting, show
from pycls_fast.config.schema import Section
from pycls_fast.errors import UserError


def options_line(
    run: Callable[[Any], int], options: type[Section], *, words: Sequence[str] = (), about: str | None = None
) -> NoReturn:
    """Run a tool from `sys.argv` and exit with its status.

    Args:
        run: takes the checked options; returns the exit status.
        options: the keys that exist.
        about: what `--help` prints.
        words: keys that arguments without `=` set, in this order; a list, which must be last, takes all the rest.
    """

    def action() -> int:
        if {"--help", "-h"} & set(sys.argv[1:]):
            return show((about or "").strip())
        return run(read_options(sys.argv[1:], options, words))

    sys.exit(reporting(action, batch="batch_size" if "batch_size" in options.model_fields else "the batch"))


def read_options(arguments: list[str], options: type[Section], words: Sequence[str] = ()) -> Any:
    """Parse and check `key=value` arguments; `words` as in `options_line`.

    Raises:
        UserError: one line per mistake.
    """
    values: dict[str, Any] = {}
    texts: dict[str, str | tuple[str, ...]] = {}
    bare = [argument for argument in arguments if words and _is_word(argument, options)]
    for argument in arguments:
        if argument in bare:
            continue
        key, separator, text = argument.partition("=")
        if not separator or key.startswith("-"):
            raise UserError(f"{argument}: not a key=value; the keys are {', '.join(options.model_fields)}")
        if key not in options.model_fields:
            values[key] = text
        elif _is_text(options, key):
            # A path may look like a number, or may not be valid YAML.
            texts[key] = text
        else:
            try:
                values[key] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise UserError(f"{key}: cannot read '{text}'") from error
    for key in words:
        if key in values or key in texts:
            continue
        if _is_text(options, key):
            texts |= {key: bare.pop(0)} if bare else {}
        else:
            texts[key], bare = tuple(bare), []
    if bare:
        raise UserError(f"{bare[0]}: one argument too many; the keys are {', '.join(options.model_fields)}")
    # File names may not be valid UTF-8, which pydantic requires: it sees "?" for the invalid parts.
    seen = json.dumps(values | texts, default=str, ensure_ascii=False).encode(errors="replace")
    try:
        return options.model_validate_json(seen).model_copy(update=texts)
    except ValidationError as error:
        raise UserError(*messages.lines(error, options, lambda key: "the command line")) from error


def _is_text(options: type[Section], key: str) -> bool:
    return options.model_fields[key].annotation in (str, str | None)


def _is_word(argument: str, options: type[Section]) -> bool:
    """Whether an argument is a value without a key; `-` is, and so is an existing path that contains `=`."""
    key, separator, _ = argument.partition("=")
    if not separator:
        return argument == "-" or not argument.startswith("-")
    return key not in options.model_fields and Path(argument).exists()
