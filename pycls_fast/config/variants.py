"""Further configurations from one command line: the experiment with additional overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from pycls_fast.config import launch
from pycls_fast.config.compose import Composed, as_hydra_overrides, check, typed_overrides
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.keys import CONFIGS, key_of
from pycls_fast.config.messages import COMPOSE_ERRORS, explain
from pycls_fast.config.run import RunConfig, Section
from pycls_fast.errors import UserError


def variant(overrides: Sequence[str], purpose: Purpose, *, options: type[Section]) -> RunConfig:
    """The configuration of this process's command line plus more overrides; only inside `command_line`'s tool.

    Args:
        overrides: `key=value` and `group=name`, as on the command line.
        purpose: what it is used for.
        options: the tool's own keys, which are not part of a configuration.

    Raises:
        UserError: one line per mistake.
    """
    settings, folders = HydraConfig.get(), config_folders()
    typed = [o for o in typed_overrides(settings) if key_of(o) not in options.model_fields]
    own = [o for o in overrides if key_of(o) in options.model_fields]
    if own:
        raise UserError(f"{own[0]}: a key of the tool, the same for every variant")
    try:
        config = hydra.compose(
            settings.job.config_name,
            [*typed, *as_hydra_overrides(overrides, folders)],
            return_hydra_config=True,
        )
    except COMPOSE_ERRORS as error:
        raise explain(error, folders) from error
    composed = Composed.from_hydra(config, config.hydra)
    values = {key: value for key, value in composed.values.items() if key not in options.model_fields}
    return check(dataclasses.replace(composed, values=values), purpose)


def same_command(*, options: type[Section]) -> tuple[list[str], list[str]]:
    """Options and overrides that give another tool this process's configuration; only inside `command_line`'s tool.

    Args:
        options: this tool's own keys, which are left out.
    """
    settings = HydraConfig.get()
    more = [s.path for s in settings.runtime.config_sources if s.schema == "file" and Path(s.path) != CONFIGS]
    flags = [part for folder in more[:1] for part in ("--config-dir", folder)]
    typed = [o for o in typed_overrides(settings) if key_of(o) not in options.model_fields]
    return [*flags, "--config-name", str(settings.job.config_name).removesuffix(".yaml")], typed


def command_alone() -> list[str] | None:
    """Options and overrides that start only this run of a `--multirun`, without its `run_dir`; None elsewhere."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    flags, typed = same_command(options=Section)
    # Only a sweep's Hydra configuration has a job number.
    number = str(HydraConfig.get().job.num)
    known = [override.removeprefix("++").replace("${hydra:job.num}", number) for override in typed]
    return [*flags, *_launcher(), *(override for override in known if key_of(override) != "run_dir")]


def _launcher() -> list[str]:
    """What starts this run through the same launcher, if one has started it."""
    if not launch.is_task():
        return []
    settings = [str(override) for override in HydraConfig.get().overrides.hydra]
    return ["--multirun", *(each for each in settings if each.startswith(("hydra/launcher", "hydra.launcher")))]


def is_command() -> bool:
    """Whether this process runs a tool's command line, not a notebook or another program."""
    return HydraConfig.initialized()


def config_folders() -> list[Path]:
    """The folders of this process's configuration files; only inside `command_line`'s tool."""
    return [Path(source.path) for source in HydraConfig.get().runtime.config_sources if source.schema == "file"]
