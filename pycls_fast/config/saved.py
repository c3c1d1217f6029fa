"""Configurations that were saved: in a run's folder, in its checkpoints, and in weights exported from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pycls_fast.errors import refusing
from pycls_fast.files import EXPORTED, STATE, exists, weights_at
from pycls_fast.reading import SavedConfiguration, check, our_config, read_json, read_yaml


@dataclass(frozen=True)
class SavedConfig:
    """A saved configuration: plain values as written, and their file."""

    values: Mapping[str, Any]
    file: Path

    @property
    def name(self) -> str:
        return str(self.values.get("config_name", self.file.stem))


def saved_at(source: Path, *, around: bool = True) -> SavedConfig | None:
    """The configuration of a run's folder, a checkpoint or exported weights; None if there is none. What is `around`
    counts, too: any file or folder in a run's folder stands for it."""
    # Below, search both the link's target and its own folder: a link to another disk may be in the run folder.
    if not exists(source):
        return None  # A hub name, or an error that is reported when it is opened.
    path, found = source.resolve(), weights_at(source)
    if found is not None and found.suffix in (".safetensors", *EXPORTED) and (values := _in_file(found)) is not None:
        return SavedConfig(values, found)
    if found is not None and not (path / "config.yaml").is_file() and (state := found / STATE).is_file():
        return SavedConfig(_read(lambda file: read_json(file)["config"], state), state)
    nearby = (path, *source.absolute().parents[:2], *path.parents[:2]) if around else (path,)
    run_dir = next((folder for folder in nearby if (folder / "config.yaml").is_file()), None)
    return None if run_dir is None else saved_in_run(run_dir)


def _in_file(file: Path) -> dict[str, Any] | None:
    """The configuration in the metadata of an exported file; None if there is none."""
    try:
        if file.suffix in EXPORTED:
            from pycls_fast.models.export_formats import open_exported

            texts = open_exported(file)[1]
        else:
            with safe_open(file, "numpy") as opened:
                texts = opened.metadata() or {}
        return our_config(texts)
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError):
        return None  # Reported when the tensors are read.


def _read(read: Callable[[Path], Any], file: Path) -> dict[str, Any]:
    what, use = f"{file}: is not a run's configuration", "give the folder of a run, as pycls-fast runs lists them"
    with refusing(what, OSError, ValueError, LookupError, TypeError, use=use):
        values = read(file)
        check(SavedConfiguration, values)
        return dict(values)


def saved_in_run(run_dir: Path) -> SavedConfig:
    file = run_dir / "config.yaml"
    return SavedConfig(_read(read_yaml, file), file)
