"""The images that saved weights are scored on, labelled with the classes that the weights were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import EvalSet, Source, is_drawn, match_classes
from pycls_fast.errors import UserError, first_few
from pycls_fast.files import user_path
from pycls_fast.parallel import World
from pycls_fast.train.display import Display
from pycls_fast.train.weights import Weights, opened

if TYPE_CHECKING:
    from pycls_fast.data import LabelledSource


def scored_split(config: RunConfig, split: str, found: Path | str, world: World, display: Display) -> EvalSet:
    """The split, or the set that `data.eval_set` names.

    Args:
        split: "train", "val", or "test" if the data has one; "all" for data that has only one split.
        found: the weights, from `find_weights`.
        display: reports a random split that is not the one that the weights were trained on.

    Raises:
        UserError: no such split or set, or a class that the weights were not trained on.
    """
    ours = opened(found, world)
    if config.data.eval_set is not None:
        if split != "val":
            raise UserError(f"split: data.eval_set={config.data.eval_set} has none; leave split={split} out")
        return build.eval_set(config, _classes(config, found, ours), world)
    sources = build.sources(config, world, whole=split == "all")
    if split not in sources:
        has_all = any(is_drawn(source) for source in sources.values())
        raise UserError(f"split: the data has {', '.join([*sources, *(['all'] if has_all else [])])}; got {split}")
    source = sources[split]
    note = _other_split(config, sources, split, found, ours) if is_drawn(source) else None
    if split == "all" and _is_own_root(config, ours):
        note = f"data.root: {found} was trained on most of these images"
    if note is not None:
        display.note(note)
    if ours is not None and ours.classes is not None:
        source = _with_classes(source, ours.classes, found)
    return EvalSet(source, "best of all classes")


def _classes(config: RunConfig, found: Path | str, ours: Weights | None) -> tuple[str, ...]:
    """Class names of the outputs, by which evaluation sets are matched."""
    if ours is not None and ours.classes is not None:
        return ours.classes
    # Other projects' files do not name classes; 1,000 outputs are taken to be ImageNet-1k's, in its order.
    if config.model.num_classes in (None, 1000):
        return build.imagenet_wnids()
    raise UserError(
        f"weights: {found} does not name its classes, which data.eval_set needs, and model.num_classes="
        f"{config.model.num_classes} is not ImageNet-1k's 1000"
    )


def _other_split(
    config: RunConfig, sources: dict[str, Source], split: str, found: Path | str, ours: Weights | None
) -> str | None:
    """What to say of a random split that is not the one that the weights were trained on."""
    names = None if ours is None else ours.train_names
    if names is not None and names == build.names_id(sources["train"]):
        return None
    if not _is_own_root(config, ours):
        total = sum(len(source) for source in sources.values())
        return (
            f"data.root: split at random, so {len(sources[split]):,} of its {total:,} images are scored; split=all "
            "scores all"
        )
    if names is None:
        return None
    return (
        f"data.root: the random split is not the one that {found} was trained on (other images, or other values of "
        "data.val_fraction, data.split_seed or data.fold): the weights may have been trained on images scored here"
    )


def _is_own_root(config: RunConfig, ours: Weights | None) -> bool:
    """Whether these are the data that the weights were trained on."""
    root = None if ours is None or ours.config is None else ours.config["data"].get("root")
    return root is not None and config.data.root is not None and user_path(root) == user_path(config.data.root)


def _with_classes(source: Source, classes: tuple[str, ...], found: Path | str) -> Source:
    """The source labelled with these classes by name; all of its own that have images must be among them."""
    if not hasattr(source, "labels"):
        return source
    matched, unknown = match_classes(cast("LabelledSource", source), classes)
    if unknown:
        raise UserError(
            f"data.root: {found} was not trained on the class {first_few(unknown)} (it was on {first_few(classes)}); "
            "name the classes as in training, or remove these images"
        )
    return matched
