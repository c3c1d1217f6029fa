"""The command line of this process: what it sets, and further configurations and commands from it; for verbs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from pycls_fast.choice import Section
from pycls_fast.config.compose import as_hydra_overrides, check, compose_here, typed_overrides
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.keys import CONFIGS, key_of, typed_values
from pycls_fast.config.run import RunConfig
from pycls_fast.config.scheduler import is_task
from pycls_fast.errors import refuse


def variant(overrides: Sequence[str], purpose: Purpose, *, options: type[Section]) -> RunConfig:
    """The configuration of this process's command line plus more overrides (`key=value`, `group=name`).

    `options` are the tool's own keys, which are not part of a configuration.
    """
    own = (override for override in overrides if key_of(override) in options.model_fields)
    refuse(f"{override}: a key of the tool, the same for every variant" for override in own)
    _, typed = same_command(options=options)
    folders = config_folders()
    changed = [*typed, *as_hydra_overrides(overrides, folders)]
    return check(compose_here(str(HydraConfig.get().job.config_name), changed, folders), purpose, options)


def same_command(*, options: type[Section]) -> tuple[list[str], list[str]]:
    """Flags and overrides that give another tool this process's configuration, without this tool's own `options`."""
    settings = HydraConfig.get()
    more = [folder for folder in config_folders() if folder != CONFIGS]
    flags = ["--config-dir", str(more[0])] if more else []
    typed = [override for override in typed_overrides(settings) if key_of(override) not in options.model_fields]
    return [*flags, "--config-name", str(settings.job.config_name).removesuffix(".yaml")], typed


def command_alone() -> list[str] | None:
    """Flags and overrides that start only this run of a `--multirun`, without its `run_dir`; None elsewhere."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    flags, typed = same_command(options=Section)
    settings = HydraConfig.get()
    known = [override.removeprefix("++").replace("${hydra:job.num}", str(settings.job.num)) for override in typed]
    # The launcher that started this run, if one did.
    launched = [each for each in settings.overrides.hydra if each.startswith(("hydra/launcher", "hydra.launcher"))]
    launcher = ["--multirun", *launched] if is_task() else []
    return [*flags, *launcher, *(override for override in known if key_of(override) != "run_dir")]


# Of no interest in a name: where files are, and what does not change the result.
_NOT_NAMED = re.compile(r"data[.]root|data[.].*cache|run_dir|resume|imports|trackers|callbacks|runtime|hydra")
_LONGEST_VALUE, _LONGEST_NAME = 30, 100


def overrides_name(overrides: Iterable[str] | None = None) -> str:
    """What was typed, as part of a folder's name: `lr-0.001_epochs-3`; None: the command line's, "" without one."""
    if overrides is None:
        overrides = typed_overrides(HydraConfig.get()) if HydraConfig.initialized() else ()
    parts = []
    for override in overrides:
        key, separator, value = override.lstrip("+").partition("=")
        if separator and not key.startswith("~") and not _NOT_NAMED.match(key):
            # Of a path the last part.
            short = re.sub(r"[^\w.]+", "-", value.rstrip("/").rpartition("/")[2]).strip("-")[:_LONGEST_VALUE]
            parts.append(f"{key.rpartition('.')[2]}-{short}")
    # What varies from run to run is usually typed last.
    while len(parts) > 1 and len("_".join(parts)) > _LONGEST_NAME:
        del parts[0]
    return "_".join(parts)[:_LONGEST_NAME].rstrip("-_.")


def is_command() -> bool:
    """Whether this process runs a tool's command line, not a notebook or another program."""
    return HydraConfig.initialized()


def typed_keys() -> frozenset[str]:
    """The keys that this process's command line sets; outside of one none."""
    return frozenset(typed_values(typed_overrides(HydraConfig.get())) if HydraConfig.initialized() else ())


def config_folders() -> list[Path]:
    return [Path(source.path) for source in HydraConfig.get().runtime.config_sources if source.schema == "file"]
