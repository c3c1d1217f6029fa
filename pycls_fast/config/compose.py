"""Hydra composes YAML groups and overrides; what leaves this module is a `RunConfig`. No DictConfig gets past it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pycls_fast.config import messages
from pycls_fast.config.checks import problems
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"

# Each rank would make Hydra's folders and log files; the run folder is written by rank 0 alone.
HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)

Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True)
class Composed:
    """What Hydra made: plain values, and what is needed to say where one of them was set."""

    values: Mapping[str, Any]
    config_name: str
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    folders: tuple[Path, ...]

    @classmethod
    def from_hydra(cls, config: DictConfig, hydra_config: DictConfig) -> Composed:
        """Resolve interpolations and let go of OmegaConf.

        Raises:
            UserError: an interpolation that cannot be resolved, or a value left as `???`.
        """
        own = [key for key in config if key != "hydra"]
        try:
            values = OmegaConf.to_container(OmegaConf.masked_copy(config, own), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise UserError(_first_line(error)) from error
        if not isinstance(values, dict):
            raise UserError(f"{hydra_config.job.config_name}: a configuration file holds keys, not a list")
        sources = [Path(s.path) for s in hydra_config.runtime.config_sources if s.schema == "file" and s.path]
        return cls(
            values={str(key): value for key, value in values.items()},
            config_name=str(hydra_config.job.config_name),
            overrides=tuple(hydra_config.overrides.task),
            choices={str(k): str(v) for k, v in hydra_config.runtime.choices.items()},
            folders=tuple(sources),
        )

    def where(self, key: str) -> str:
        """The command line, or the YAML file that set the key, or where it can be set."""
        key = re.sub(r"\[\d+\]", "", key)
        for override in self.overrides:
            name = override.lstrip("+~").partition("=")[0]
            if name == key or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return "the command line"
        group = key.partition(".")[0]
        names = [self.config_name]
        if group in self.choices:
            names.append(f"{group}/{self.choices[group]}")
        for name in names:
            for folder in self.folders:
                file = folder / f"{name}.yaml"
                relative = key.partition(".")[2] if "/" in name else key
                if file.is_file() and _has_key(file, relative):
                    return _shown_path(file)
        return f"configs/{names[-1]}.yaml or the command line"


def check(composed: Composed) -> RunConfig:
    """Validate strictly, then check what involves several keys.

    Raises:
        UserError: one line per bad value, all at once.
    """
    config = validate(RunConfig, {**composed.values, "config_name": composed.config_name}, composed)
    found = [f"{key}: {message} ({composed.where(key)})" for key, message in problems(config)]
    if found:
        raise UserError(*found)
    return config


def validate(schema: type[Options], values: Mapping[str, Any], composed: Composed) -> Options:
    """Plain values to a section. The JSON text is what is validated, so a YAML list becomes a tuple.

    Raises:
        UserError: one line per bad value.
    """
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(*messages.lines(error, schema, composed.where)) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{composed.config_name}: a value is not plain data ({error})") from error


def load_config(
    config_name: str = "vit_digits", overrides: Sequence[str] = (), *, folder: Path | None = None
) -> RunConfig:
    """Compose and check an experiment, as the command line does.

    Args:
        config_name: a file of `configs/`, without `.yaml`.
        overrides: as on the command line, e.g. `["optim.lr=1e-3", "model=vit_s16"]`.
        folder: where configurations are, if not `configs/`.

    Raises:
        UserError: one line per mistake.
    """
    folder = folder or CONFIGS
    with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        try:
            composed_config = hydra.compose(
                config_name, [*HYDRA_SETTINGS, *as_hydra_overrides(overrides, [folder])], return_hydra_config=True
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, folders=[folder]) from error
        return check(Composed.from_hydra(composed_config, composed_config.hydra))


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run folder was made with, with overrides of single keys.

    Raises:
        UserError: no such run, or a mistake in an override.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run_dir}: not a run folder (it has no config.yaml)")
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    GlobalHydra.instance().clear()
    try:
        changes = OmegaConf.from_dotlist([override.lstrip("+") for override in overrides])
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(values), changes), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from error
    if not isinstance(merged, dict):
        raise UserError(f"{file}: a configuration file holds keys, not a list")
    plain = {str(key): value for key, value in merged.items()}
    config_name = str(plain.pop("config_name", run_dir.name))
    return check(Composed(plain, config_name, tuple(overrides), {}, (run_dir,)))


def groups(folders: Sequence[Path]) -> set[str]:
    """The names that choose a file (`model=vit_b16`) rather than set a value."""
    return {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()}


def as_hydra_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """`key=value` becomes `++key=value`, so that pydantic, not the YAML files, decides which keys exist.

    Left to itself Hydra refuses every key that the chosen files do not spell out, and accepts any name after a `+`.
    """
    names = groups(folders)
    return [
        override
        if override.startswith(("+", "~", "hydra.", "hydra/")) or override.partition("=")[0].partition("@")[0] in names
        else f"++{override}"
        for override in overrides
    ]


def explain(error: Exception, folders: Sequence[Path]) -> UserError:
    """Hydra's own errors in one line, with the nearest name that exists."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        missing = str(error.missing_cfg_file).removesuffix(".yaml")
        group, _, name = missing.rpartition("/")
        available = sorted({f.stem for folder in folders for f in (folder / group).glob("*.yaml")})
        near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(available)}"
        what = f"{group}={name}" if group else f"--config-name {name}"
        return UserError(f"{what}: no such file in configs/{group}; {hint}")
    parsed = re.search(r"Error parsing override '(.*)'\n?(.*)", text)
    if parsed:
        override = parsed.group(1).removeprefix("++")
        return UserError(f"cannot read '{override}' on the command line; write key=value, quoting lists and spaces")
    return UserError(_first_line(error))


def _first_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())


def _has_key(file: Path, key: str) -> bool:
    node = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _shown_path(file: Path) -> str:
    try:
        return str(Path("configs") / file.resolve().relative_to(CONFIGS))
    except ValueError:
        return str(file)
