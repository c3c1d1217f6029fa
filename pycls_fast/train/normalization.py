"""Mean and standard deviation of images, from the weights that were trained with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycls_fast.config.schema import RunConfig
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

    Runs and files of ours say them, timm and torchvision know those of their hubs, and Google's `.npz` are all of one
    kind. None for any other file.

    Raises:
        UserError: no such weights.
    """
    found = find_weights(source)
    if isinstance(found, str):
        return _of_hub(found)
    if found.suffix == ".npz":
        return _JAX
    if found.is_dir() or found.suffix == ".safetensors":
        config = open_weights(found, world=world).config
        return None if config is None else (_triple(config["data"]["mean"]), _triple(config["data"]["std"]))
    return None


def _of_hub(source: str) -> Statistics | None:
    """What the library says without a download; None for a name that it does not have, of which loading complains."""
    library, _, name = source.partition(":")
    if library == "timm":
        import timm

        known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        return None if known is None else (_triple(known.mean), _triple(known.std))
    import torchvision

    model, _, tag = name.partition(".")
    try:
        preset = torchvision.models.get_model_weights(model)[tag or "DEFAULT"].transforms()
    except (KeyError, ValueError):
        return None
    return _triple(preset.mean), _triple(preset.std)


def _triple(values: Any) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third
