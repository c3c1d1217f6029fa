"""The command line of all tools: Hydra's flags and `key=value`; one run, a sweep, or the tasks of a scheduler."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra.version
import yaml
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from pycls_fast.choice import FAMILIES
from pycls_fast.config import saved
from pycls_fast.config.compose import HYDRA_SETTINGS, Composed, as_hydra_overrides, check, notes, validate
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.help import help_text
from pycls_fast.config.imports import import_modules_of
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import COMPOSE_ERRORS, explain, unreadable
from pycls_fast.config.run import RunConfig, Section
from pycls_fast.errors import DONE, FAULT, INTERRUPTED, STOPPED, Finished, UserError, print_lines, reporting


class NoOptions(Section):
    """The options of a tool without keys of its own."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A tool: what it runs, and what its command line takes.

    Attributes:
        run: takes the checked configuration and the tool's own options, the options alone if there is no `default`;
            returns the exit status.
        about: what `--help` says first.
        default: the experiment when `--config-name` is not given; None: a tool without a configuration.
        options: keys of the tool itself (`split=val`), besides those of `RunConfig`.
        words: the keys that arguments without `=` set, in this order; a list, which must be last, takes all the rest.
        subcommands: what a first word runs instead, with the arguments after it.
        config_of_weights: without `--config-name`, take the configuration that was saved with what `weights=` names.
        purpose: what the configuration is used for.
        needs_data: takes the options; if it returns False, no image is read, whatever `purpose` says.
        after_sweep: called after a `--multirun` of several runs in this process; may return a note to print last.
    """

    run: Callable[..., int]
    about: str = ""
    default: str | None = "vit_digits"
    options: type[Section] = NoOptions
    words: tuple[str, ...] = ()
    subcommands: Mapping[str, Callable[[Sequence[str]], int]] = dataclasses.field(default_factory=dict)
    config_of_weights: bool = False
    purpose: Purpose = dataclasses.field(default_factory=Purpose)
    needs_data: Callable[[Any], bool] = lambda options: True
    after_sweep: Callable[[], str | None] = lambda: None

    @property
    def usage(self) -> str:
        """The call that `about` begins with."""
        return self.about.partition("`")[2].partition("`")[0]

    def __call__(self, *given: Any) -> int:
        """`run`."""
        return self.run(*given)


def command(**settings: Any) -> Callable[[Callable[..., int]], Command]:
    """Decorate `run` of a `Command`: its docstring is `about`."""
    return lambda run: Command(run, inspect.getdoc(run) or "", **settings)


def command_line(run: Callable[..., int], **settings: Any) -> NoReturn:
    """Run a tool from `sys.argv` and exit with its status; the settings are those of `Command`."""
    main(Command(run, **settings))


def main(command: Command) -> NoReturn:
    """Run a command from `sys.argv` and exit with its status."""
    if sys.argv[1:2] and sys.argv[1] in command.subcommands:
        sys.exit(command.subcommands[sys.argv[1]](sys.argv[2:]))
    batch = "data.global_batch_size or data.eval_batch_size"
    if command.default is None:
        batch = "batch_size" if "batch_size" in command.options.model_fields else "the batch"
    sys.exit(reporting(lambda: _run(command, sys.argv[1:]), batch))


def _run(command: Command, arguments: list[str]) -> int:
    if command.default is None:
        if {"--help", "-h"} & set(arguments):
            print(help_text(command.about, command.options))
            return DONE
        try:
            return command.run(read_options(arguments, command.options, command.words))
        except UserError as error:
            raise error if arguments else UserError(*error.lines, f"the command is {command.usage}") from error
    flags = _flags(arguments)
    folders = [CONFIGS if flags.config_path is None else Path(flags.config_path)]
    folders += [] if flags.config_dir is None else [Path(flags.config_dir)]
    if flags.help:
        modules = [override.partition("=")[2] for override in flags.overrides if override.startswith("imports=")]
        import_modules_of({"imports": yaml.safe_load(",".join(modules))})
        words = [each for each in flags.overrides if "=" not in each or each.partition("=")[0] in FAMILIES]
        print(help_text(command.about, command.options, folders, [] if command.words else words))
        return DONE
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give one that holds .yaml files")
    bare = [each for each in flags.overrides if command.words and "=" not in each and not each.startswith("~")]
    named = [f"{key}={word}" for key, word in zip(command.words, bare, strict=False)]
    flags.overrides = [*named, *(each for each in flags.overrides if each not in bare[: len(named)])]
    found = None
    if command.config_of_weights and flags.config_name is None:
        found = saved.saved_with_weights(flags.overrides)
        if found is not None:
            saved.register(found, flags.overrides)
            flags.config_name = saved.SAVED
    return _run_with_hydra(command, flags, folders, found)


def _flags(arguments: list[str]) -> Namespace:
    """Hydra's own flags, with `overrides`.

    Raises:
        UserError: there is no such flag.
    """

    def mistake(message: str) -> NoReturn:
        raise UserError(f"{message}; write key=value for a value, --help lists what there is")

    parser = get_args_parser()
    parser.error = mistake  # type: ignore[method-assign]
    flags = parser.parse_intermixed_args(arguments)
    if flags.config_path is not None:
        # Hydra resolves a relative one against its caller's folder.
        flags.config_path = str(Path(flags.config_path).resolve())
    return flags


def _run_with_hydra(command: Command, flags: Namespace, folders: list[Path], found: saved.SavedConfig | None) -> int:
    """Let Hydra call the tool for the run, or for each run of a sweep; returns the exit status."""
    statuses: list[int] = []
    typed = list(sys.argv), list(sys.orig_argv)

    def job(config: DictConfig) -> float | None:
        def action() -> int:
            composed = Composed.from_hydra(config, HydraConfig.get())
            if found is not None:
                composed = dataclasses.replace(composed, config_name=found.name, saved=found.file)
            checked, options = _checked(composed, command)
            print_lines("note", notes(checked, composed))
            return command.run(checked, options)

        if is_task():
            # The run records the user's command, not the one with which the launcher started this task.
            sys.argv[:], sys.orig_argv[:] = typed
            _join()
            return _objective(run_task(action))
        statuses.append(_status_of(action))
        if statuses[-1] in (STOPPED, INTERRUPTED):
            # End the whole sweep: Hydra would start the next run.
            raise SystemExit(statuses[-1])
        return _objective(statuses[-1])

    overrides = as_hydra_overrides(flags.overrides, folders)
    if flags.multirun:
        _refuse_shared_folder(overrides)
    # Otherwise Hydra prints errors itself and exits with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    hydra.version.setbase("1.3")
    try:
        with _sweep_folder(flags) as settings:
            # The user's come last and win.
            flags.overrides = [*HYDRA_SETTINGS, *settings, *overrides]
            # What `hydra.main` calls with the flags of sys.argv.
            _run_hydra(flags, get_args_parser(), job, str(CONFIGS), command.default)
    except COMPOSE_ERRORS as error:
        raise explain(error, folders) from error
    except TaskStopped as error:
        print_lines("stopped", [str(error)])
        return STOPPED
    except Exception as error:
        submitit = sys.modules.get("submitit.core.utils")
        if submitit is None or not isinstance(error, submitit.UncompletedJobError):
            raise
        # The launcher's message, and the end of the lost task's log.
        message = str(error).splitlines()
        last = "the logs of all tasks are in that folder; the first error may be in another one"
        print_lines("error", ["\n".join([*message[:3], *message[3:][-40:], last])])
        return FAULT
    note = command.after_sweep() if len(statuses) > 1 else None
    print_lines("note", [] if note is None else [note])
    return FAULT if FAULT in statuses else max(statuses, default=DONE)


def _checked(composed: Composed, command: Command) -> tuple[RunConfig, Any]:
    """The configuration and the tool's own options.

    Raises:
        UserError: one line per mistake.
    """
    keys = command.options.model_fields
    rest = dataclasses.replace(composed, values={k: v for k, v in composed.values.items() if k not in keys})
    purpose, options = command.purpose, None
    mistakes: list[str] = []
    try:
        own = {key: value for key, value in composed.values.items() if key in keys}
        options = validate(command.options, own, composed.where)
        purpose = dataclasses.replace(purpose, needs_data=purpose.needs_data and command.needs_data(options))
    except UserError as error:
        mistakes += error.lines
    try:
        config = check(rest, purpose, also=keys)
    except UserError as error:
        raise UserError(*mistakes, *error.lines) from error
    if mistakes:
        raise UserError(*mistakes)
    return config, options


def read_options(arguments: Sequence[str], options: type[Section], words: Sequence[str] = ()) -> Any:
    """The options of a tool without a configuration, in the same syntax; `words` as in `Command`.

    Raises:
        UserError: one line per mistake.
    """
    values: dict[str, Any] = {}
    texts: dict[str, str | tuple[str, ...]] = {}
    bare: list[str] = []
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if separator and key in options.model_fields:
            if options.model_fields[key].annotation in (str, str | None):
                texts[key] = text  # A path may look like a number.
            else:
                values[key] = _value(argument)
        elif words and (Path(argument).exists() or not separator) and (argument == "-" or not argument.startswith("-")):
            bare.append(argument)
        elif separator:
            values[key] = text
        else:
            raise unreadable(argument, [])
    for key in words:
        is_list = options.model_fields[key].annotation == tuple[str, ...]
        if key not in values and key not in texts and (bare or is_list):
            texts[key] = tuple(bare) if is_list else bare.pop(0)
            bare = [] if is_list else bare
    if bare:
        raise UserError(f"{bare[0]}: one argument too many; the keys are {', '.join(options.model_fields)}")
    # Names of files need not be UTF-8, JSON text must be: the validation sees "?" instead.
    seen = json.loads(json.dumps(values | texts, default=str, ensure_ascii=False).encode(errors="replace"))
    return validate(options, seen, lambda key: "the command line").model_copy(update=texts)


def _value(override: str) -> Any:
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except COMPOSE_ERRORS as error:
        raise explain(error, []) from error
    return override.partition("=")[2] if parsed.is_sweep_override() else parsed.value()


def _status_of(action: Callable[[], int]) -> int:
    """The status of one run; a crash is shown at once.

    Hydra would report it only after the sweep's last run, and keep this run's network in memory.
    """
    try:
        return reporting(action)
    except Exception:  # noqa: BLE001  # a crash of the tool
        traceback.print_exc()
        return FAULT


# Sweeps.


@contextmanager
def _sweep_folder(flags: Namespace) -> Iterator[list[str]]:
    """Settings that hide Hydra's own records of a `--multirun`, for which it requires a folder.

    Raises:
        UserError: several ranks would each search for the best values.
    """
    chosen = dict(override.split("=", 1) for override in flags.overrides if override.startswith("hydra/"))
    sweeper = chosen.get("hydra/sweeper", "basic")
    if not flags.multirun:
        yield []
    elif sweeper != "basic":
        if "RANK" in os.environ:
            raise UserError(
                f"hydra/sweeper: under torchrun each rank's {sweeper} would choose its own values; start one process "
                "without torchrun, or give each run its ranks with hydra/launcher=submitit_local or submitit_slurm"
            )
        # It writes its result there.
        folder = f"multirun/{sweeper}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        print_lines("note", [f"the result of {sweeper} will be in {folder}"])
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    elif chosen.get("hydra/launcher", "").startswith("submitit"):
        # The jobs' inputs and logs belong in a permanent folder that all nodes see.
        yield ["hydra.sweep.dir=multirun", "hydra.sweep.subdir=."]
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]


def _refuse_shared_folder(overrides: Sequence[str]) -> None:
    """Refuse one `run_dir` for a whole sweep: the second run would resume the first one's and report its result.

    Raises:
        UserError: one `run_dir` for several runs.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except COMPOSE_ERRORS:
        return  # Hydra parses the overrides next and reports the error.
    given = [override for override in parsed if override.key_or_group == "run_dir"]
    # A sweeper that searches may have its choices in its own settings.
    sweeps = any(override.is_sweep_override() or override.key_or_group == "hydra/sweeper" for override in parsed)
    if given and sweeps and not given[-1].is_sweep_override() and "${" not in str(given[-1].get_value_string()):
        value = given[-1].get_value_string()
        raise UserError(
            f"run_dir: {value} for every run of --multirun; leave it out, or give each its own with "
            f"'run_dir={value}/${{hydra:job.num}}' (the command line)"
        )


def _objective(status: int) -> float | None:
    """What a sweeper gets from a run: a number to minimise, or None.

    Optuna's records a trial with None as failed and continues; NaN would end its search with a traceback.
    """
    return status.objective if isinstance(status, Finished) else None


# Tasks of a cluster's scheduler that Hydra's submitit launcher started (`pip install -e '.[slurm]'`).


def is_task() -> bool:
    """Whether this process is a task that submitit started."""
    return "SUBMITIT_EXECUTOR" in os.environ


def warning_signal() -> signal.Signals | None:
    """The signal that a task gets some minutes before its job is preempted; None if this is not a task."""
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"] if is_task() else None


def warning_signals() -> set[signal.Signals]:
    """The signals that announce the end of a job: the launcher's, or those that `#SBATCH --signal` usually names."""
    warning = warning_signal()
    if warning is not None:
        return {warning}
    return {signal.SIGUSR1, signal.SIGUSR2} if "SLURM_JOB_ID" in os.environ else set()


def _join() -> None:
    """Set torchrun's environment variables for this task of a job; each task is one rank."""
    if "RANK" in os.environ:
        return
    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


class TaskStopped(Exception):
    """Raised in a scheduler's task that a signal has stopped; submitit sends it to the process of the command."""


def run_task(action: Callable[[], int]) -> int:
    """Run `action` as a scheduler's task, and show its errors in the task's log; returns `DONE`.

    Raises:
        UserError, TaskStopped: submitit sends them to the process of the command.
        SystemExit: a fault. From any other exception Hydra and submitit would make a task that succeeded.
    """
    try:
        status = action()
    except UserError as error:
        print_lines("error", error.lines)
        raise
    except Exception:  # noqa: BLE001  # a crash of the tool
        traceback.print_exc()
        raise SystemExit(FAULT) from None
    if status == STOPPED:
        raise TaskStopped("a signal ended the job, and everything is saved; the same command with its run_dir resumes")
    if status != DONE:
        raise SystemExit(status)
    return status
