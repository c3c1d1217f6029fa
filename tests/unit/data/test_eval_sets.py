"""ReaL, V2, A, R and Sketch in small, laid out as published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import open_eval_set
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.errors import UserError
from pycls_fast.losses import Criterion
from pycls_fast.train.evaluate import _score

WNIDS = tuple(f"n{number:08d}" for number in range(100, 112))


def images(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(folder / name)


@pytest.fixture
def val(tmp_path: Path) -> Images:
    """Twelve validation images, two of each second class, numbered across the classes."""
    for position, wnid in enumerate(WNIDS[::2]):
        names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in (position + 1, position + 7)]
        images(tmp_path / "val" / wnid, names)
    return scan_classes(tmp_path / "val", CachePolicy("off"))


def labels(source: Images) -> dict[str, int]:
    return {Path(source.name(i)).name: source.labels[i] for i in range(len(source))}


def test_v2_folders_are_numbers_and_not_sorted_as_text(tmp_path: Path) -> None:
    for number in range(12):
        images(tmp_path / "imagenetv2" / str(number), [f"{number}.jpeg"])
    found = open_eval_set("v2", tmp_path, classes=WNIDS, wnids=None, val=None)
    assert labels(found.source) == {f"{number}.jpeg": number for number in range(12)}
    assert found.source.classes == WNIDS
    assert found.among is None
    # Outputs in another order: folder k is the k-th of the sorted ids all the same.
    other = WNIDS[5:] + WNIDS[:5]
    moved = open_eval_set("v2", tmp_path, classes=other, wnids=None, val=None)
    assert labels(moved.source) == {f"{number}.jpeg": other.index(WNIDS[number]) for number in range(12)}
    with pytest.raises(UserError, match="the model has no class 11"):
        open_eval_set("v2", tmp_path, classes=WNIDS[:11], wnids=None, val=None)


@pytest.mark.parametrize(("name", "restricted"), [("a", True), ("r", True), ("sketch", False)])
def test_folders_of_wordnet_ids(tmp_path: Path, name: str, restricted: bool) -> None:
    root = tmp_path / "set"
    chosen = (WNIDS[9], WNIDS[2], WNIDS[4])
    for wnid in chosen:
        images(root / "inner" / wnid, [f"{wnid}.png"])
    (root / "README.txt").write_text("about it")
    found = open_eval_set(name, root, classes=WNIDS, wnids=None, val=None)
    assert labels(found.source) == {f"{wnid}.png": WNIDS.index(wnid) for wnid in chosen}
    assert len(found.source.classes) == 12
    if restricted:
        assert found.among.tolist() == [2, 4, 9]
        assert "3 classes" in found.rule
    else:
        assert found.among is None
    with pytest.raises(UserError, match=f"the model has no class {WNIDS[9]}"):
        open_eval_set(name, root, classes=WNIDS[:9], wnids=None, val=None)


def test_ids_from_a_file_for_classes_with_other_names(tmp_path: Path) -> None:
    images(tmp_path / "a" / WNIDS[3], ["x.png"])
    words = [f"word {number}" for number in range(12)]
    with pytest.raises(UserError, match=r"^data.wnids: not set; .* have other names \(word 0, word 1"):
        open_eval_set("a", tmp_path / "a", classes=words, wnids=None, val=None)
    file = tmp_path / "LOC_synset_mapping.txt"
    file.write_text("".join(f"{wnid} some words, more\n" for wnid in WNIDS))
    found = open_eval_set("a", tmp_path / "a", classes=words, wnids=file, val=None)
    assert labels(found.source) == {"x.png": 3}
    file.write_text("tench\n")
    with pytest.raises(UserError, match="got tench"):
        open_eval_set("a", tmp_path / "a", classes=words, wnids=file, val=None)
    file.write_text(f"{WNIDS[0]}\n")
    with pytest.raises(UserError, match="order of the 12 outputs"):
        open_eval_set("a", tmp_path / "a", classes=words, wnids=file, val=None)


def test_real_labels_belong_to_the_numbers_in_the_names(tmp_path: Path, val: Images) -> None:
    lists = [[number % 12, (number + 3) % 12] for number in range(12)]
    lists[4] = []
    lists[7] = [1]
    (tmp_path / "real.json").write_text(json.dumps(lists))
    found = open_eval_set("real", tmp_path, classes=WNIDS, wnids=None, val=val)
    assert found.source is val
    assert found.answers_NM is not None
    for index in range(len(val)):
        number = int(Path(val.name(index)).stem[-8:])
        assert [label for label in found.answers_NM[index] if label >= 0] == lists[number - 1]


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("[[1", "cannot be read as ReaL"),
        ("[[12]]", "cannot be read as ReaL's labels, lists of the model's classes"),
        ("[[1]]", "it has labels for ILSVRC2012_val_00000001 and so on, none for"),
    ],
)
def test_real_labels_that_do_not_fit(tmp_path: Path, val: Images, content: str, pattern: str) -> None:
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(UserError, match=pattern):
        open_eval_set("real", tmp_path / "real.json", classes=WNIDS, wnids=None, val=val)


def test_counting_as_the_definitions_say() -> None:
    """Against plain loops over images, with ties, many answers, none, and a subset of the outputs."""
    generator = torch.Generator().manual_seed(0)
    logits_BK = torch.randint(0, 6, (200, 12), generator=generator).double()
    logits_BK[3, 4] = torch.nan
    answers_BM = torch.randint(-1, 12, (200, 3), generator=generator)
    for among in (None, torch.tensor([0, 2, 3, 7, 8, 11])):
        kept = list(range(12)) if among is None else among.tolist()
        own = answers_BM if among is None else torch.where(torch.isin(answers_BM, among), answers_BM, -1)
        top1 = top5 = count = 0
        for scores, answers in zip(logits_BK.tolist(), own.tolist(), strict=True):
            right = {label for label in answers if label >= 0}
            if not right:
                continue
            count += 1
            order = sorted(kept, key=lambda k: (-scores[k], k))
            if not any(np.isnan([scores[k] for k in kept])):
                top1 += order[0] in right
                top5 += bool(right & set(order[:5]))
        found = _score(logits_BK, own, among, Criterion())[1].tolist()
        assert found[0] == top1
        assert found[1] == top5
        assert found[2] == found[4] == count
        assert 0 < top1 < top5 < count < 200
