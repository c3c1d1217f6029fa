"""Mean and standard deviation for normalising images, taken from the weights that were trained with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pycls_fast.config.run import RunConfig, TimmModel
from pycls_fast.models import pretrained
from pycls_fast.models.pretrained.preprocessing import rgb_triple
from pycls_fast.parallel import ALONE, World
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.weights import find_weights, opened

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

# google-research/vision_transformer, `input_pipeline.py`: images from -1 to 1.
_JAX: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def resolve_normalization(
    config: RunConfig, world: World, resumed_from: Checkpoint | None = None, *, note: Callable[[str], None]
) -> RunConfig:
    """The configuration with its weights' mean and standard deviation, if it asks for them and they are known.

    Args:
        resumed_from: the checkpoint whose values are used instead: those of the weights when the run began.
        note: reports weights for which they are not known, if the configuration's values are the default.

    Raises:
        UserError: no such weights.
    """
    if config.data.normalization == "configured":
        return config
    update: dict[str, Any] = {"normalization": "configured"}
    if resumed_from is not None:
        found: Statistics | None = _of_config(resumed_from.plain["config"])
    else:
        found = None if config.weights is None else statistics(config.weights, world, model=timm_name(config))
    if found is not None:
        if resumed_from is None:
            note(f"normalization: mean {_text(found[0])}, std {_text(found[1])}, those of {config.weights}")
        update |= {"mean": found[0], "std": found[1]}
    elif config.weights is not None and all(
        getattr(config.data, key) == type(config.data).model_fields[key].default for key in ("mean", "std")
    ):
        note(
            f"data.normalization: {config.weights} does not say how its images were normalised, so ImageNet's mean and "
            "standard deviation are used; set data.mean and data.std if they were others"
        )
    return config.with_values(data=update)


def _text(values: tuple[float, float, float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def timm_name(config: RunConfig) -> str | None:
    """timm's name of the model, if it is timm's."""
    return config.model.name if isinstance(config.model, TimmModel) else None


def statistics(source: str | Path, world: World = ALONE, *, model: str | None = None) -> Statistics | None:
    """Mean and standard deviation, for pixels in [0, 1], with which these weights were trained.

    Our runs and files record them, timm and torchvision know those of their hubs, timm's folders have them in
    `config.json`, and Google's `.npz` files all use the same. Any other file has those that timm knows of its `model`;
    None without one.

    Raises:
        UserError: no such weights.
    """
    found = find_weights(source)
    path = Path(found)
    if path.suffix == ".npz":
        return _JAX
    ours = opened(found, world)
    if ours is not None and ours.config is not None:
        return _of_config(ours.config)
    about = pretrained.described(found, model=model, for_scoring=False)
    return None if about is None else (about.mean, about.std)


def _of_config(config: Mapping[str, Any]) -> Statistics:
    return rgb_triple(config["data"]["mean"]), rgb_triple(config["data"]["std"])
