"""The command line that all tools share: Hydra's flags, one line per error, documented exit statuses."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pycls_fast.config import precedence, saved, scheduler, sweep
from pycls_fast.config.arguments import help_words, hydra_arguments, search_path
from pycls_fast.config.checks import Purpose
from pycls_fast.config.compose import Composed, check, validate
from pycls_fast.config.explain import COMPOSE_ERRORS, explain
from pycls_fast.config.help import help_text
from pycls_fast.config.imports import import_modules_of
from pycls_fast.config.in_vain import in_vain
from pycls_fast.config.locations import CONFIGS
from pycls_fast.config.quoting import quote_items
from pycls_fast.config.reporting import print_lines, reporting, show
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.errors import DONE, FAULT, INTERRUPTED, STOPPED, UserError


class NoOptions(Section):
    """The options of a tool without keys of its own."""


def command_line(
    run: Callable[[RunConfig, Any], int],
    *,
    about: str | None = None,
    default: str = "vit_digits",
    options: type[Section] = NoOptions,
    config_of_weights: bool = False,
    purpose: Purpose | None = None,
    needs_data: Callable[[Any], bool] = lambda options: True,
    after_sweep: Callable[[], str | None] = lambda: None,
) -> NoReturn:
    """Run a tool from `sys.argv` and exit with its status.

    Args:
        run: takes the checked configuration and the tool's own options; returns the exit status.
        about: what `--help` says first.
        default: the experiment when `--config-name` is not given.
        options: keys of the tool itself (`split=val`), besides those of `RunConfig`.
        config_of_weights: without `--config-name`, take the configuration that was saved with what `weights=` names.
        purpose: what the configuration is used for; None: only to read images.
        needs_data: takes the options; if it returns False, no image is read, whatever `purpose` says.
        after_sweep: called after a `--multirun` of several runs in this process; may return a note to print last.
    """
    statuses: list[int] = []
    typed = list(sys.argv), list(sys.orig_argv)

    def checked_run(composed: Composed) -> int:
        config, chosen = _checked(composed, options, purpose or Purpose(), needs_data)
        print_lines("note", (*precedence.notes(composed), *in_vain(config, composed)))
        return run(config, chosen)

    def job(config: DictConfig) -> float | None:
        def action() -> int:
            return checked_run(Composed.from_hydra(config, HydraConfig.get()))

        if scheduler.is_task():
            # The run records the user's command, not the one with which the launcher started this task.
            sys.argv[:], sys.orig_argv[:] = typed
            scheduler.join()
            return sweep.objective(scheduler.run_task(action))
        statuses.append(_status_of(action))
        if statuses[-1] in (STOPPED, INTERRUPTED):
            # End the whole sweep: Hydra would start the next run.
            raise SystemExit(statuses[-1])
        return sweep.objective(statuses[-1])

    def everything() -> int:
        found = _saved_configuration(sys.argv[1:]) if config_of_weights else None
        if found is not None:
            return checked_run(saved.compose_saved(found, [quote_items(argument) for argument in sys.argv[1:]]))
        folders = search_path(sys.argv[1:])
        if {"--help", "-h"} & set(sys.argv[1:]):
            words = help_words(sys.argv[1:])
            modules = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("imports=")]
            import_modules_of({"imports": yaml.safe_load(",".join(modules))})
            return show(help_text(about or "", options, folders, words))
        with sweep.sweep_folder(sys.argv[1:]) as settings:
            sys.argv[1:] = hydra_arguments(sys.argv[1:], folders, settings)
            ended = _run_hydra(job, default, folders)
        if ended is not None:
            return ended
        note = after_sweep() if len(statuses) > 1 else None
        if note is not None:
            print_lines("note", [note])
        return FAULT if FAULT in statuses else max(statuses, default=DONE)

    sys.exit(reporting(everything))


def _status_of(action: Callable[[], int]) -> int:
    """The status of one run; a crash is shown at once.

    Hydra would report it only after the sweep's last run, and keep this run's network in memory.
    """
    try:
        return reporting(action)
    except Exception:  # noqa: BLE001  # a crash of the tool
        traceback.print_exc()
        return FAULT


def _run_hydra(job: Callable[[DictConfig], float | None], default: str, folders: Sequence[Path]) -> int | None:
    """Let Hydra call `job` for the run, or for each run of a sweep.

    Returns the exit status if one of a scheduler's tasks was stopped or lost, else None.

    Raises:
        UserError: Hydra cannot compose the configuration.
    """
    # Otherwise Hydra prints errors itself and exits with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=default)(job)()
    except COMPOSE_ERRORS as error:
        raise explain(error, folders) from error
    except scheduler.TaskStopped as error:
        print_lines("stopped", [str(error)])
        return STOPPED
    except Exception as error:
        if not scheduler.is_lost_task(error):
            raise
        print_lines("error", [scheduler.describe_lost_task(error)])
        return FAULT
    return None


def _checked(
    composed: Composed, options: type[Section], purpose: Purpose, needs_data: Callable[[Any], bool]
) -> tuple[RunConfig, Any]:
    """The configuration and the tool's own options; arguments as in `command_line`.

    Raises:
        UserError: one line per mistake.
    """
    own = {key: value for key, value in composed.values.items() if key in options.model_fields}
    rest = {key: value for key, value in composed.values.items() if key not in own}
    mistakes: list[str] = []
    chosen = None
    try:
        chosen = validate(options, own, composed)
    except UserError as error:
        mistakes += error.lines
    try:
        if chosen is None or not needs_data(chosen):
            purpose = dataclasses.replace(purpose, needs_data=False)
        config = check(dataclasses.replace(composed, values=rest), purpose, also=options.model_fields)
    except UserError as error:
        raise UserError(*mistakes, *error.lines) from error
    if mistakes:
        raise UserError(*mistakes)
    return config, chosen


def _saved_configuration(arguments: Sequence[str]) -> saved.SavedConfig | None:
    """The configuration saved with `weights=`, unless an experiment or help is requested; see `saved_with_weights`.

    Raises:
        UserError: there is a flag besides it; flags are Hydra's, which would take a different configuration.
    """
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    if {"--config-name", "-cn", "--help", "-h", "--hydra-help", "--version"} & set(flags):
        return None
    found = saved.saved_with_weights([quote_items(argument) for argument in arguments if not argument.startswith("-")])
    if found is not None and flags:
        raise UserError(
            f"{flags[0]}: cannot be combined with the configuration saved with weights= ({found.file}); leave it out, "
            "or name an experiment with --config-name"
        )
    return found
