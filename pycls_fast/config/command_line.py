"""The command line that all tools share: Hydra's flags, one line per mistake, exit statuses that mean something."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pycls_fast.config.compose import (
    CONFIGS,
    HYDRA_SETTINGS,
    Composed,
    as_hydra_overrides,
    check,
    explain,
    validate,
)
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.errors import UserError

DONE, FAULT, MISTAKE, STOPPED = 0, 1, 2, 3

Options = TypeVar("Options", bound=Section)


class NoOptions(Section):
    """A tool with no keys of its own."""


def command_line(
    run: Callable[[RunConfig, Any], int],
    *,
    default: str = "vit_digits",
    options: type[Section] = NoOptions,
) -> NoReturn:
    """Run a tool from `sys.argv` and exit with its status.

    Args:
        run: takes the checked configuration and the tool's own options; returns the exit status.
        default: the experiment when `--config-name` is not given.
        options: keys that belong to the tool alone (`split=val`), beside those of `RunConfig`.
    """
    statuses: list[int] = []

    def job(config: DictConfig) -> None:
        statuses.append(reporting(lambda: _run_job(config, run, options)))

    def everything() -> int:
        folders = [CONFIGS, *_given_folders(sys.argv[1:])]
        sys.argv[1:] = _hydra_arguments(sys.argv[1:], folders)
        # Hydra would print its errors in its own way and exit with status 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=default)(job)()
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, folders) from error
        return max(statuses, default=DONE)

    sys.exit(reporting(everything))


def reporting(action: Callable[[], int]) -> int:
    """Run, and turn a `UserError` into its lines on standard error (from one rank only) and status 2."""
    try:
        return action()
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}" if len(error.lines) == 1 else f"errors:\n{error}", file=sys.stderr)
        return MISTAKE


def _run_job(config: DictConfig, run: Callable[[RunConfig, Any], int], options: type[Section]) -> int:
    composed = Composed.from_hydra(config, HydraConfig.get())
    own = {key: value for key, value in composed.values.items() if key in options.model_fields}
    rest = {key: value for key, value in composed.values.items() if key not in own}
    chosen = validate(options, own, composed)
    return run(check(Composed(rest, composed.config_name, composed.overrides, composed.choices, composed.folders)), chosen)


def _given_folders(arguments: Sequence[str]) -> list[Path]:
    """The values of `--config-dir` and `--config-path`."""
    found = []
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in ("--config-dir", "-cd", "--config-path", "-cp"):
            found.append(Path(value or (arguments[position + 1] if position + 1 < len(arguments) else ".")))
    return found


def _hydra_arguments(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Flags as they are; overrides as `as_hydra_overrides` makes them."""
    result: list[str] = []
    takes_value = False
    for argument in arguments:
        if takes_value or argument.startswith("-"):
            result.append(argument)
            takes_value = argument.startswith("-") and "=" not in argument and argument in _FLAGS_WITH_VALUE
        else:
            result += as_hydra_overrides([argument], folders)
    # Before the user's own overrides, so that those have the last word.
    return [*HYDRA_SETTINGS, *result]


_FLAGS_WITH_VALUE = ("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp", "--cfg", "-c", "--package", "-p")
