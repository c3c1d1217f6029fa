"""The command line that all tools share: Hydra's flags, one line per error, documented exit statuses."""

from __future__ import annotations

import dataclasses
import io
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig

from pycls_fast.config import precedence, saved, scheduler
from pycls_fast.config.checks import ONLY_SCORED
from pycls_fast.config.compose import (
    HYDRA_SETTINGS,
    Composed,
    as_hydra_overrides,
    check,
    validate,
)
from pycls_fast.config.explain import COMPOSE_ERRORS, explain
from pycls_fast.config.help import help_text
from pycls_fast.config.locations import CONFIGS
from pycls_fast.config.quoting import quote_items
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.config.suggestions import did_you_mean, known_keys
from pycls_fast.errors import UserError, first_line
from pycls_fast.exit_status import DONE, FAULT, INTERRUPTED, MISTAKE, OUT_OF_MEMORY, STOPPED, Finished


class NoOptions(Section):
    """The options of a tool without keys of its own."""


def command_line(
    run: Callable[[RunConfig, Any], int],
    *,
    default: str = "vit_digits",
    options: type[Section] = NoOptions,
    config_of_weights: bool = False,
    needs_data: Callable[[Any], bool] = lambda options: True,
    trains: bool = False,
    scores_sets: bool = False,
    after_sweep: Callable[[Sequence[RunConfig]], str] | None = None,
) -> NoReturn:
    """Run a tool from `sys.argv` and exit with its status.

    Args:
        run: takes the checked configuration and the tool's own options; returns the exit status.
        default: the experiment when `--config-name` is not given.
        options: keys of the tool itself (`split=val`), besides those of `RunConfig`.
        config_of_weights: without `--config-name`, take the configuration that was saved with what `weights=` names.
        needs_data: takes the options; if it returns False, `data.root` may be missing.
        trains: also refuse what only matters for training, such as fine-tuning without `weights`.
        scores_sets: whether the tool reads `data.eval_set`, which is refused otherwise.
        after_sweep: takes the configurations of a `--multirun` that ran in this process; returns a note to print last.
    """
    statuses: list[int] = []
    typed = list(sys.argv), list(sys.orig_argv)
    configs: list[RunConfig] = []

    def noted(config: RunConfig, chosen: Any) -> int:
        configs.append(config)
        return run(config, chosen)

    def job(config: DictConfig) -> float | None:
        def action() -> int:
            composed = Composed.from_hydra(config, HydraConfig.get())
            return _run_job(composed, noted, options, needs_data, trains, scores_sets)

        if scheduler.is_task():
            # The run records the user's command, not the one with which the launcher started this task.
            sys.argv[:], sys.orig_argv[:] = typed
            scheduler.join()
            return _objective(_run_task(action))
        try:
            statuses.append(reporting(action))
        except Exception:  # noqa: BLE001  # a crash of the tool
            # Not raised: Hydra would report it only after the sweep's last run, and keep this run's network in memory.
            traceback.print_exc()
            statuses.append(FAULT)
        if statuses[-1] in (STOPPED, INTERRUPTED):
            # End the whole sweep: Hydra would start the next run.
            raise SystemExit(statuses[-1])
        return _objective(statuses[-1])

    def everything() -> int:
        found = _saved_configuration(sys.argv[1:]) if config_of_weights else None
        if found is not None:
            composed = saved.compose_saved(found, [quote_items(argument) for argument in sys.argv[1:]])
            return _run_job(composed, run, options, needs_data, trains, scores_sets)
        folders = _search_path(sys.argv[1:])
        if {"--help", "-h"} & set(sys.argv[1:]):
            return show(help_text(sys.modules["__main__"].__doc__ or "", options, folders))
        # Otherwise Hydra prints errors itself and exits with status 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        with _sweep_folder(sys.argv[1:]) as settings:
            sys.argv[1:] = _hydra_arguments(sys.argv[1:], folders, settings)
            try:
                hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=default)(job)()
            except COMPOSE_ERRORS as error:
                raise explain(error, folders) from error
            except _TaskStopped as error:
                _print_lines("stopped", [str(error)])
                return STOPPED
            except Exception as error:
                if not scheduler.is_lost_task(error):
                    raise
                _print_lines("error", [scheduler.describe_lost_task(error)])
                return FAULT
        if after_sweep is not None and len(configs) > 1:
            _print_lines("note", [after_sweep(configs)])
        return FAULT if FAULT in statuses else max(statuses, default=DONE)

    sys.exit(reporting(everything))


class _TaskStopped(Exception):
    """Raised in a scheduler's task that a signal has stopped; submitit sends it to the process of the command."""


def _objective(status: int) -> float | None:
    """What a sweeper gets from a run: a number to minimise, or None.

    Optuna's records a trial with None as failed and continues; NaN would end its search with a traceback.
    """
    return status.objective if isinstance(status, Finished) else None


def _run_task(action: Callable[[], int]) -> int:
    """Run `action` as a scheduler's task, and show its errors in the task's log; returns `DONE`.

    Raises:
        UserError, _TaskStopped: submitit sends them to the process of the command.
        SystemExit: a fault. From any other exception Hydra and submitit would make a task that succeeded.
    """
    try:
        status = action()
    except UserError as error:
        _print_lines("error", error.lines)
        raise
    except Exception:  # noqa: BLE001  # a crash of the tool
        traceback.print_exc()
        raise SystemExit(FAULT) from None
    if status == STOPPED:
        raise _TaskStopped("a signal ended the job, and everything is saved; the same command with its run_dir resumes")
    if status != DONE:
        raise SystemExit(status)
    return status


def reporting(action: Callable[[], int], batch: str = "data.global_batch_size or data.eval_batch_size") -> int:
    """Run `action`; turn a `UserError` into its lines on standard error (once per node) and status 2, Ctrl-C into 130.

    If the reader of standard output is gone (`| head`), the status is that of `action`, or 0 if this ended it.

    An error that only other ranks of a node hit has been printed already (`parallel/mistakes.py`). Running out of
    device memory is one line from each rank that does; the line proposes to lower `batch`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: names of files and classes that are not UTF-8 can be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = DONE
    try:
        status = action()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UserError as error:
        _print_lines("error", error.lines)
        return MISTAKE
    except OSError as error:
        if not _output_is_broken():
            raise
        discard_output()
        if isinstance(error, BrokenPipeError):
            # The reader (`| head`) has seen enough.
            return status
        _print_lines("error", [f"standard output: cannot be written ({error.strerror})"])
        return MISTAKE
    except KeyboardInterrupt:
        _print_lines("interrupted", ["Ctrl-C ended this at once"])
        return INTERRUPTED
    except Exception as error:
        # torch takes seconds to import; if it was not imported, no device memory was allocated.
        if not isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
            raise
        asked = first_line(error).partition(" GPU ")[0].rstrip(".")
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(f"error: {rank}the device is {OUT_OF_MEMORY} ({asked}); lower {batch}, or the model", file=sys.stderr)
        return MISTAKE


def show(page: str) -> int:
    """Print a page."""
    print(page)
    return DONE


def _output_is_broken() -> bool:
    try:
        # What could not be written is still in the buffer, if there is one.
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, ValueError):
        return False  # no standard output, or an object without a file
    except OSError:
        return True
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard_output() -> None:
    """Redirect a broken standard output to /dev/null: Python would flush its buffer again at exit and fail."""
    # Python code may have replaced it by an object without a file.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_lines(kind: str, lines: Iterable[str]) -> None:
    # Once per node, not once per run: data may be missing on one node only.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        # The terminal may be gone; the exit status still reports the error.
        with suppress(OSError):
            for line in lines:
                print(f"{kind}: {line}", file=sys.stderr)


def _run_job(
    composed: Composed,
    run: Callable[[RunConfig, Any], int],
    options: type[Section],
    needs_data: Callable[[Any], bool],
    trains: bool,
    scores_sets: bool,
) -> int:
    own = {key: value for key, value in composed.values.items() if key in options.model_fields}
    rest = {key: value for key, value in composed.values.items() if key not in own}
    mistakes: list[str] = []
    chosen = None
    try:
        chosen = validate(options, own, composed)
    except UserError as error:
        mistakes += error.lines
    try:
        wants_data = chosen is not None and needs_data(chosen)
        config = check(
            dataclasses.replace(composed, values=rest),
            needs_data=wants_data,
            trains=trains,
            also=options.model_fields,
        )
    except UserError as error:
        raise UserError(*mistakes, *error.lines) from error
    if config.data.eval_set is not None and not scores_sets:
        mistakes.append(f"data.eval_set: {ONLY_SCORED} ({composed.where('data.eval_set')})")
    if mistakes:
        raise UserError(*mistakes)
    _print_lines("note", precedence.notes(composed))
    return run(config, chosen)


def _saved_configuration(arguments: Sequence[str]) -> saved.Saved | None:
    """The configuration saved with `weights=`, unless an experiment or help is requested; see `saved.of_weights`.

    Raises:
        UserError: there is a flag besides it; flags are Hydra's, which would take a different configuration.
    """
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
    if {"--config-name", "-cn", "--help", "-h", "--hydra-help", "--version"} & set(flags):
        return None
    found = saved.of_weights([quote_items(argument) for argument in arguments if not argument.startswith("-")])
    if found is not None and flags:
        raise UserError(
            f"{flags[0]}: cannot be combined with the configuration saved with weights= ({found.file}); leave it out, "
            "or name an experiment with --config-name"
        )
    return found


@contextmanager
def _sweep_folder(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Settings that hide Hydra's own records of a `--multirun`, for which it requires a folder.

    Raises:
        UserError: several ranks would each search for the best values.
    """
    if not {"--multirun", "-m"} & set(arguments):
        yield []
        return
    sweeper = next((a.partition("=")[2] for a in arguments if a.startswith("hydra/sweeper=")), "basic")
    if sweeper != "basic":
        if "RANK" in os.environ:
            raise UserError(
                f"hydra/sweeper: under torchrun each rank's {sweeper} would choose its own values; start one process "
                "without torchrun, or give each run its ranks with hydra/launcher=submitit_local or submitit_slurm"
            )
        # It writes its result there.
        folder = f"multirun/{sweeper}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        _print_lines("note", [f"the result of {sweeper} will be in {folder}"])
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
        return
    if any(argument.startswith("hydra/launcher=submitit") for argument in arguments):
        # The jobs' inputs and logs belong in a permanent folder that all nodes see.
        yield ["hydra.sweep.dir=multirun", "hydra.sweep.subdir=."]
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]


def _search_path(arguments: Sequence[str]) -> list[Path]:
    """`configs/` (or the folder of `--config-path`) and the folder of `--config-dir`.

    Raises:
        UserError: there is no such folder.
    """
    main, more = CONFIGS, []
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in _FOLDER_FLAGS:
            folder = Path(value or next(iter(arguments[position + 1 :]), "."))
            if not folder.is_dir():
                raise UserError(f"{flag} {folder}: no such folder; give one that holds .yaml files")
            if flag in ("--config-path", "-cp"):
                main = folder
            else:
                more.append(folder)
    return [main, *more]


def _hydra_arguments(arguments: Sequence[str], folders: Sequence[Path], settings: Sequence[str]) -> list[str]:
    """The arguments for Hydra: flags with absolute folders, then overrides as from `as_hydra_overrides`.

    Raises:
        UserError: an argument is neither a flag nor an override.
    """
    flags: list[str] = []
    overrides: list[str] = []
    waiting = ""  # the flag whose value comes next
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        if waiting:
            # Hydra resolves a relative --config-path against its caller's folder.
            flags += [waiting, str(Path(argument).resolve()) if waiting in _FOLDER_FLAGS else argument]
            waiting = ""
        elif flag in _FLAGS_WITH_VALUE and not separator:
            waiting = flag
        elif flag in _FLAGS_WITH_VALUE:
            flags += [flag, str(Path(value).resolve()) if flag in _FOLDER_FLAGS else value]
        elif argument in _FLAGS:
            flags.append(argument)
        elif argument.startswith("-"):
            key = f"{flag.lstrip('-')}=VALUE"
            values = (
                f"; did you mean {key}?" if flag.lstrip("-") in known_keys(RunConfig) else f"; write {key} for a value"
            )
            raise UserError(f"{flag}: unknown option{did_you_mean(flag, _LONG_FLAGS) or values}")
        else:
            overrides += as_hydra_overrides([quote_items(argument)], folders)
    if waiting:
        raise UserError(f"{waiting}: needs a value")
    if {"--multirun", "-m"} & set(flags):
        _refuse_shared_folder(overrides)
    # Hydra's parser takes overrides from one place only. Ours come first, so that the user's win.
    return [*flags, *HYDRA_SETTINGS, *settings, *overrides]


def _refuse_shared_folder(overrides: Sequence[str]) -> None:
    """Refuse one `run_dir` for a whole sweep: the second run would resume the first one's and report its result.

    Raises:
        UserError: one `run_dir` for several runs.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException:
        return  # Hydra parses the overrides next and reports the error.
    given = [override for override in parsed if override.key_or_group == "run_dir"]
    # A sweeper that searches may have its choices in its own settings.
    sweeps = any(
        override.is_sweep_override() or (override.key_or_group == "hydra/sweeper" and override.value() != "basic")
        for override in parsed
    )
    if not given or given[-1].is_sweep_override() or not sweeps:
        return
    value = str(given[-1].get_value_string())
    if "${" not in value:
        raise UserError(
            f"run_dir: {value} for every run of --multirun; leave it out, or give each its own with "
            f"'run_dir={value}/${{hydra:job.num}}' (the command line)"
        )


_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
_FLAGS_WITH_VALUE = (*_FOLDER_FLAGS, "--config-name", "-cn", "--cfg", "-c", "--package", "-p")
_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--multirun", "-m", "--resolve", "--info", "-i")
_LONG_FLAGS = [flag for flag in (*_FLAGS, *_FLAGS_WITH_VALUE) if len(flag) > len("--help")]
