"""Where the configuration files are."""

from __future__ import annotations

from pathlib import Path


def _configs() -> Path:
    """The folder `configs/`: beside the package in a clone or its editable install, else inside the package."""
    package = Path(__file__).parents[1]
    beside = package.parent / "configs"
    # In site-packages another package may have a folder of that name.
    return beside if (beside / "vit_digits.yaml").is_file() else package / "configs"


CONFIGS = _configs()


def shown_path(file: Path) -> str:
    """A file of our `configs/` as `configs/...`, any other path unchanged."""
    try:
        return str(Path("configs") / file.resolve().relative_to(CONFIGS))
    except ValueError:
        return str(file)
