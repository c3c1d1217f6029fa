"""What ranks compare before training."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train.same_everywhere import check_same_data, check_same_settings


def two_ranks(other: Any) -> Any:
    """A world of two ranks, this one and one whose values are these changed by `other`."""
    return SimpleNamespace(gather=lambda own: [own, (other(dict(own[0])), "far")])


def test_a_setting_that_only_another_rank_has() -> None:
    with pytest.raises(UserError, match=r"^model.options.layers: \[1\] on rank 1 \(far\), but None on rank 0"):
        check_same_settings(load_config("vit_digits"), two_ranks(lambda own: own | {"model.options.layers": "[1]"}))
    check_same_settings(load_config("vit_digits"), two_ranks(lambda own: own))


def test_class_names_that_are_not_utf_8() -> None:
    names = tuple(os.fsdecode(name) for name in (b"caf\xe9", b"dog"))
    source: Any = type("Two", (), {"classes": names, "labels": np.array([0, 1]), "__len__": lambda self: 2})()
    check_same_data({"train": source}, two_ranks(lambda own: own))
    with pytest.raises(UserError, match=r"^data.root: checksum of the train class names: "):
        check_same_data(
            {"train": source}, two_ranks(lambda own: own | {"checksum of the train class names": "00000000"})
        )
