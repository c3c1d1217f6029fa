"""The command line of all tools: Hydra's flags and `key=value`; one run, a sweep, or the tasks of a scheduler."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, get_origin

import hydra
import yaml
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from pycls_fast.choice import FAMILIES, Section
from pycls_fast.config import reuse
from pycls_fast.config.compose import (
    HYDRA_SETTINGS,
    Composed,
    as_hydra_overrides,
    check,
    default_experiment,
    import_modules,
    main_folder,
    module_names,
    notes,
    readable,
    require_folders,
    validate,
)
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.help import help_text
from pycls_fast.config.keys import CONFIGS, key_of, quoted
from pycls_fast.config.messages import explaining, unreadable
from pycls_fast.config.run import RunConfig, groups
from pycls_fast.config.scheduler import TaskStopped, is_task, join, run_task
from pycls_fast.errors import DONE, FAULT, INTERRUPTED, STOPPED, Finished, UserError, print_lines, refuse, reporting
from pycls_fast.files import exists, timestamp
from pycls_fast.values import Text


class Verb(Section):
    """The base class of what `pycls-fast` does: its keys, its help (the docstring), and what it runs.

        class Score(Verb, config_of_weights=True):
            split: str = "val"
            def __call__(self, config): ...

    It is called with the checked configuration (if `experiment` is None, with nothing) and returns the exit status.

    Attributes:
        experiment: the one without `--config-name`; "": see `default_experiment`; None: the tool takes no
            configuration.
        words: the keys that arguments without `=` set, in this order; a list, which must be last, takes all the rest.
        subcommands: verbs that a first word selects instead.
        config_of_weights: without `--config-name`, take the configuration that was saved with what `weights=` names.
        purpose: what the configuration is used for.
        example: a command line, for messages.
    """

    experiment: ClassVar[str | None] = ""
    words: ClassVar[tuple[str, ...]] = ()
    subcommands: ClassVar[Mapping[str, type[Verb]]] = {}
    config_of_weights: ClassVar[bool] = False
    purpose: ClassVar[Purpose] = Purpose()
    example: ClassVar[str] = ""
    __call__: ClassVar[Callable[..., int]]

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__()
        for name, value in settings.items():
            assert hasattr(cls, name), name
            setattr(cls, name, value)

    @property
    def reads_images(self) -> bool:
        """Whether images are read, if the purpose says so."""
        return True


def command_line(verb: type[Verb]) -> NoReturn:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in verb.subcommands:
        verb, arguments = verb.subcommands[arguments[0]], arguments[1:]
    run = _run_with_config if verb.experiment is not None else _run_without_config
    sys.exit(reporting(lambda: run(verb, arguments)))


def _run_without_config(verb: type[Verb], arguments: list[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(help_text(verb))
        return DONE
    with _with_usage(verb):
        return read_options(arguments, verb)()


@contextmanager
def _with_usage(verb: type[Verb]) -> Iterator[None]:
    """Within the block, the message about a missing value also shows how the verb is called."""
    try:
        yield
    except UserError as error:
        usage = (verb.__doc__ or "").partition("`")[2].partition("`")[0]
        if not usage or not any(
            re.match(r"[\w.]+: (missing.*command line|not set|none were given|.* at least 1 item)", line)
            for line in error.lines
        ):
            raise
        example = f", for example {verb.example}" if verb.example else ""
        raise UserError(*error.lines, f"the command is {usage}{example}") from error


class _Parser(ArgumentParser):
    """Hydra's flags that are of use here, under Hydra's names."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("--help", "-h", nargs="*")
        self.add_argument("--cfg", "-c", choices=["job"])
        self.add_argument("--multirun", "-m", action="store_true")
        self.add_argument("--config-dir", "-cd", type=Path)
        self.add_argument("--config-name", "-cn")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; write key=value for a value, --help lists what there is")


def _run_with_config(verb: type[Verb], arguments: list[str]) -> int:
    flags = _Parser().parse_intermixed_args(arguments)
    folders = [CONFIGS, *filter(None, [flags.config_dir])]
    if flags.help is not None:
        imports = [each for each in (*flags.overrides, *flags.help) if each.startswith("imports=")]
        import_modules(module_names({"imports": _value(imports[-1]) if imports else None}))
        known = {*FAMILIES, *groups(folders), "ladder"}
        # Before it, the words may be the verb's own.
        words = [*([] if verb.words else flags.overrides), *flags.help]
        print(help_text(verb, folders, [each for each in words if "=" not in each or each.partition("=")[0] in known]))
        return DONE
    require_folders(folders)
    overrides, name, found = _with_words(flags.overrides, verb), flags.config_name, None
    if name is None and verb.config_of_weights:
        found = reuse.saved_with_weights(overrides)
    if found is not None:
        reuse.register(found, overrides)
        name = reuse.SAVED
    elif name is None:
        name = verb.experiment or default_experiment(overrides, folders)

    def run(config: DictConfig) -> int:
        """One run, from what Hydra has composed."""
        composed = Composed.from_hydra(config, HydraConfig.get())
        if found is not None:
            composed = dataclasses.replace(composed, config_name=found.name, saved=found.file)
        if flags.cfg is not None:
            _checked(composed, verb, Purpose(needs_data=False, scores_sets=verb.purpose.scores_sets))
            print(yaml.safe_dump(composed.values, sort_keys=False), end="")
            return DONE
        with _with_usage(verb):
            checked, called = _checked(composed, verb, verb.purpose)
            print_lines("note", notes(checked, composed))
            return called(checked)

    return _with_hydra(run, name, as_hydra_overrides(overrides, folders), folders, multirun=flags.multirun)


def _with_words(overrides: Sequence[str], verb: type[Verb]) -> list[str]:
    """The overrides, in which words are the values of `verb.words`."""
    words = [each for each in overrides if ("=" not in each and each[:1] != "~") or (verb.words and exists(Path(each)))]
    others = [each for each in overrides if each not in words]
    named = [
        f"{key}={value}" if isinstance(value, str) else f"{key}=[{','.join(map(quoted, value))}]"
        for key, value in _take_named(words, verb, {key_of(each) for each in others})
    ]
    return [*named, *words, *others]


def _take_named(words: list[str], verb: type[Verb], given: Container[str]) -> Iterator[tuple[str, Any]]:
    """Take from the words, and yield, the values of those of `verb.words` that are not given."""
    for key in verb.words:
        if key not in given and words:
            own = verb.model_fields.get(key)
            is_list = own is not None and get_origin(own.annotation) is tuple
            yield key, tuple(words) if is_list else words[0]
            del words[: None if is_list else 1]


def _with_hydra(
    run: Callable[[DictConfig], int], name: str, overrides: list[str], folders: Sequence[Path], *, multirun: bool
) -> int:
    """Let Hydra compose the experiment and call `run`, once or for each run of a sweep; returns the exit status."""
    hydra.version.setbase("1.3")
    statuses: list[int] = []
    typed = list(sys.argv), list(sys.orig_argv)

    def job(config: DictConfig) -> float | None:
        if is_task():
            # The run records the user's command, not the one with which the launcher started this task.
            sys.argv[:], sys.orig_argv[:] = typed
            join()
            return _objective(run_task(lambda: run(config)))
        try:
            status = reporting(lambda: run(config))
        except Exception:  # noqa: BLE001  # a crash is shown at once, not after the sweep's last run as by Hydra
            traceback.print_exc()
            status = FAULT
        statuses.append(status)
        if status in (STOPPED, INTERRUPTED):
            # End the whole sweep: Hydra would start the next run.
            raise SystemExit(status)
        return _objective(status)

    try:
        with explaining(folders), _sweep_settings(overrides, multirun=multirun) as settings:
            # The user's come last and win.
            _compose_and_call(job, name, [*HYDRA_SETTINGS, *settings, *overrides], folders, multirun=multirun)
    except TaskStopped as error:
        print_lines("stopped", [str(error)])
        return STOPPED
    except Exception as error:
        if (lost := _lost_task(error)) is None:
            raise
        print_lines("error", [lost])
        return FAULT
    return FAULT if FAULT in statuses else max(statuses, default=DONE)


def _lost_task(error: Exception) -> str | None:
    """The launcher's message for a task that it has lost, and the end of the task's log; None for any other error."""
    submitit = sys.modules.get("submitit.core.utils")
    if submitit is None or not isinstance(error, submitit.UncompletedJobError):
        return None
    message = str(error).splitlines()
    if message[0].startswith("sbatch:"):
        # It has refused the job, which leaves no logs.
        return str(error)
    last = "the logs of all tasks are in that folder; the first error may be in another one"
    return "\n".join([*message[:3], *message[3:][-40:], last])


def _compose_and_call(
    job: Callable[[DictConfig], Any], name: str, overrides: list[str], folders: Sequence[Path], *, multirun: bool
) -> None:
    """Do what `hydra.main` does, which composes a single run twice: first to see that it is no sweep."""
    main = main_folder(name, folders)
    search_path = create_config_search_path(str(main.resolve()))
    for folder in (each for each in folders if each is not main):
        search_path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    app = Hydra.create_main_hydra2("pycls_fast", search_path)
    try:
        call = app.multirun if multirun else app.run
        call(name, job, [*overrides, f"hydra.mode={'MULTIRUN' if multirun else 'RUN'}"])
    finally:
        GlobalHydra.instance().clear()


def _checked(composed: Composed, verb: type[Verb], purpose: Purpose) -> tuple[RunConfig, Verb]:
    """The configuration, checked for a purpose, and the verb with its own keys; all mistakes at once."""
    own = {key: value for key, value in composed.values.items() if key in verb.model_fields}
    mistakes: list[str] = []
    try:
        called = validate(verb, own, lambda key: composed.where(key) if key in own else "the command line")
        purpose = dataclasses.replace(purpose, needs_data=purpose.needs_data and called.reads_images)
    except UserError as error:
        mistakes += error.lines
    try:
        config = check(composed, purpose, verb)
    except UserError as error:
        mistakes += error.lines
    refuse(mistakes)
    return config, called


def read_options(arguments: Sequence[str], verb: type[Verb]) -> Verb:
    """A verb without a configuration with its keys, in the same syntax."""
    values: dict[str, Any] = {}
    texts: dict[str, str | tuple[str, ...]] = {}
    bare: list[str] = []
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if separator and key in verb.model_fields:
            annotation = verb.model_fields[key].annotation
            if annotation is str or (annotation == Text | None and text != "null"):
                texts[key] = text  # A path may look like a number.
            else:
                values[key] = _value(argument)
        elif (exists(Path(argument)) or not separator) and (argument == "-" or not argument.startswith("-")):
            bare.append(argument)
        elif separator:
            values[key] = text
        else:
            raise UserError(unreadable(argument))
    texts.update(_take_named(bare, verb, {*values, *texts}))
    if bare:
        raise UserError(unreadable(bare[0]))
    # Names of files need not be UTF-8, JSON text must be: the validation sees "?" instead.
    seen = json.loads(json.dumps(values | texts, default=str, ensure_ascii=False).encode(errors="replace"))
    return validate(verb, seen, lambda key: "the command line").model_copy(update=texts)


def _value(override: str) -> Any:
    with explaining([]):
        (parsed,) = OverridesParser.create().parse_overrides([readable(override)])
    return override.partition("=")[2] if parsed.is_sweep_override() else parsed.value()


def _objective(status: int) -> float | None:
    """The number that a sweeper minimises. With None Optuna's goes on after a failed run; NaN would end its search."""
    return status.objective if isinstance(status, Finished) else None


@contextmanager
def _sweep_settings(overrides: Sequence[str], *, multirun: bool) -> Iterator[list[str]]:
    """Settings that hide Hydra's own records of a `--multirun`, for which it requires a folder."""
    if not multirun:
        yield []
        return
    _refuse_shared_paths(overrides)
    chosen = dict(override.split("=", 1) for override in overrides if override.startswith("hydra/"))
    sweeper = chosen.get("hydra/sweeper", "basic")
    if sweeper != "basic":
        # It writes its result there.
        folder = f"multirun/{sweeper}-{timestamp()}"
        print_lines("note", [f"the result of {sweeper} will be in {folder}"])
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    elif (launcher := chosen.get("hydra/launcher", "")).startswith("submitit"):
        if launcher == "submitit_slurm" and shutil.which("srun") is None:
            refuse(["hydra/launcher: submitit_slurm needs Slurm, and there is no srun here; start it on a login node"])
        for override in overrides:
            if override.startswith("hydra.launcher.cpus_per_task="):
                # srun of Slurm 22.05 to 23.02 does not take this over from the job, which has this process's variables.
                os.environ["SRUN_CPUS_PER_TASK"] = override.partition("=")[2]
        # The jobs' inputs and logs belong in a permanent folder that all nodes see.
        yield ["hydra.sweep.dir=multirun", "hydra.sweep.subdir=."]
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]


def _refuse_shared_paths(overrides: Sequence[str]) -> None:
    """Refuse one `run_dir` for a whole sweep: the second run would resume the first one's and report its result; and
    one `output` and the like, over which each run would write."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    # A sweeper that searches may have its choices in its own settings.
    if not any(override.is_sweep_override() or override.key_or_group == "hydra/sweeper" for override in parsed):
        return
    values = {override.key_or_group: override.value() for override in parsed if override.key_or_group in _WRITTEN}
    for key, value in values.items():
        if isinstance(value, str | int) and "${" not in str(value):
            raise UserError(
                f"{key}: {value} for every run of --multirun; leave it out, or put the run's number into it, "
                f"'{key}=NAME${{hydra:job.num}}' (the command line)"
            )


# What a verb writes.
_WRITTEN = ("run_dir", "output", "write", "predictions", "report")
