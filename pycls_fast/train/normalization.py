"""Mean and standard deviation of images, from the weights that were trained with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycls_fast.config.schema import RunConfig
from pycls_fast.models import foreign
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import ALONE
from pycls_fast.train.weights import find_weights, open_weights

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

# google-research/vision_transformer, `input_pipeline.py`: images from -1 to 1.
_JAX: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def normalized(config: RunConfig, world: World) -> RunConfig:
    """The configuration with the mean and standard deviation of its weights, where it asks for them and they are known.

    Raises:
        UserError: no such weights.
    """
    if config.data.normalization == "configured":
        return config
    update: dict[str, Any] = {"normalization": "configured"}
    found = None if config.weights is None else statistics(config.weights, world)
    if found is not None:
        update |= {"mean": found[0], "std": found[1]}
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def statistics(source: str | Path, world: World = ALONE) -> Statistics | None:
    """Mean and standard deviation, of values from 0 to 1, that images had for these weights.

    Runs and files of ours say them, timm and torchvision know those of their hubs, timm's folders have them in a file
    beside, and Google's `.npz` are all of one kind. None for any other file.

    Raises:
        UserError: no such weights.
    """
    found = find_weights(source)
    path = Path(found)
    if path.suffix == ".npz":
        return _JAX
    if isinstance(found, Path) and (found.is_dir() or found.suffix == ".safetensors"):
        config = open_weights(found, world=world).config
        if config is not None:
            return _triple(config["data"]["mean"]), _triple(config["data"]["std"])
    about = foreign.described(found, for_scoring=False)
    return None if about is None else (about.mean, about.std)


def _triple(values: Any) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third
