"""The arguments of a command line: which flags exist, and what Hydra gets instead of what the user typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycls_fast.choice import FAMILIES
from pycls_fast.config import sweep
from pycls_fast.config.compose import HYDRA_SETTINGS, as_hydra_overrides
from pycls_fast.config.locations import CONFIGS
from pycls_fast.config.quoting import quote_items
from pycls_fast.config.schema import RunConfig
from pycls_fast.config.suggestions import did_you_mean, known_keys
from pycls_fast.errors import UserError

_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")
_FLAGS_WITH_VALUE = (*_FOLDER_FLAGS, "--config-name", "-cn", "--cfg", "-c", "--package", "-p")
_FLAGS = ("--help", "-h", "--hydra-help", "--version", "--multirun", "-m", "--resolve", "--info", "-i")
_LONG_FLAGS = [flag for flag in (*_FLAGS, *_FLAGS_WITH_VALUE) if len(flag) > len("--help")]


def search_path(arguments: Sequence[str]) -> list[Path]:
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


def help_words(arguments: Sequence[str]) -> list[str]:
    """What `--help` is about: the arguments that are neither flags, values of flags nor overrides, and `optim=sgd`."""
    before = ["", *arguments]
    return [
        argument
        for argument, previous in zip(arguments, before, strict=False)
        if not argument.startswith("-")
        and ("=" not in argument or argument.partition("=")[0] in FAMILIES)
        and previous not in _FLAGS_WITH_VALUE
    ]


def hydra_arguments(arguments: Sequence[str], folders: Sequence[Path], settings: Sequence[str]) -> list[str]:
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
    if sweep.is_sweep(flags):
        sweep.refuse_shared_folder(overrides)
    # Hydra's parser takes overrides from one place only. Ours come first, so that the user's win.
    return [*flags, *HYDRA_SETTINGS, *settings, *overrides]
