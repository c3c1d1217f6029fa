"""What ranks compare before training."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train.agreement import check_same_data, check_same_folder, check_same_settings


def two_ranks(other: Any) -> Any:
    """A world of two ranks, this one and one whose values are these changed by `other`."""
    return SimpleNamespace(gather=lambda own: [own, (other(dict(own[0])), "far")])


def test_a_setting_that_only_another_rank_has() -> None:
    with pytest.raises(UserError, match=r"^model.options.layers: \[1\] on rank 1 \(far\), but None on rank 0"):
        check_same_settings(load_config("vit_digits"), two_ranks(lambda own: own | {"model.options.layers": "[1]"}))
    check_same_settings(load_config("vit_digits"), two_ranks(lambda own: own))


def test_class_names_that_are_not_utf_8() -> None:
    names = tuple(os.fsdecode(name) for name in (b"caf\xe9", b"dog"))
    source: Any = MagicMock(classes=names, labels=np.array([0, 1]), block_ends=None, __len__=lambda self: 2)
    check_same_data({"train": source}, two_ranks(lambda own: own))
    with pytest.raises(UserError, match=r"^data.root: checksum of the train class names: "):
        check_same_data(
            {"train": source}, two_ranks(lambda own: own | {"checksum of the train class names": "00000000"})
        )


def rank_of_two(rank: int) -> Any:
    """A world in which the other rank sees everything."""

    def gather(own: Any) -> list[Any]:
        return [(True, "here"), own] if rank else [own, (True, "far")]

    return SimpleNamespace(size=2, is_main=rank == 0, gather=gather, from_main=lambda _: "token", barrier=lambda: None)


def test_a_folder_that_another_rank_does_not_see(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^run_dir: .* on rank 1 \(.*\) is not the folder of rank 0 \(here\); give "):
        check_same_folder(tmp_path, rank_of_two(1))
