"""The keys that exist, and the one that was probably meant by a misspelt word."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from pycls_fast.choice import FAMILIES


def section_keys(schema: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """Field name -> the section types that it may hold (none for a plain value, several for a tagged union)."""
    return {name: tuple(_sections(field.annotation)) for name, field in schema.model_fields.items()}


def _sections(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        family = next((family for family in FAMILIES.values() if family is annotation), None)
        yield from (annotation,) if family is None else family.choices().values()
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from _sections(part)


def known_keys(schema: type[BaseModel], prefix: str = "") -> set[str]:
    """Every dotted key that the schema accepts, including those of all members of a tagged union."""
    keys = set()
    for name, sections in section_keys(schema).items():
        keys.add(prefix + name)
        for section in sections:
            keys |= known_keys(section, f"{prefix}{name}.")
    return keys


# Keys under the names of other projects, for which the nearest key by spelling would be wrong.
USUAL_KEYS = {
    "batch_size": "data.global_batch_size",
    "bs": "data.global_batch_size",
    "workers": "data.num_workers",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "data_dir": "data.root",
    "data_path": "data.root",
    "learning_rate": "optim.lr",
    "wd": "optim.weight_decay",
    "auto_augment": "augment.policy",
    "trivial_augment": "augment.policy",
    "three_augment": "augment.policy",
    "clip_grad": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "num_epochs": "schedule.epochs",
    "max_epochs": "schedule.epochs",
    "amp": "precision",
    "pretrained": "weights",
    "checkpoint": "weights",
    "output_dir": "run_dir",
}
_USUAL_WORDS = {"gpu": "cuda", "ce": "cross_entropy", "float32": "fp32"}


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that was probably meant: by its usual name, by its parts in a different order, or by spelling."""
    known = sorted(words)
    if _USUAL_WORDS.get(word) in known:
        return _USUAL_WORDS[word]
    reordered = next((other for other in known if _parts(other) == _parts(word)), None)
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return reordered or next(iter(near), None)


def _parts(word: str) -> list[str]:
    return sorted(re.split(r"[_-]", word.lower()))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the words, or "" if none is near."""
    near = nearest(word, words)
    return f"; did you mean {near}?" if near is not None else ""
