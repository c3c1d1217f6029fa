"""Which files belong to which split, files that stay open between reads, and class lists."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.data.source import ColumnSource
from pycls_fast.data.sources.files import _MOST_OPEN, OpenFiles, find_files
from pycls_fast.errors import UserError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def found(root: Path, **options: str) -> dict[str, list[str]]:
    files = find_files(str(root), (".tar",), ColumnSource(**options))
    return {split: [str(Path(file).relative_to(root)) for file in own] for split, own in files.items()}


def test_splits_by_names_and_folders(tmp_path: Path) -> None:
    touch(tmp_path, "test/train-0.tar", "a/validation/0.tar", "a/Training-1.TAR", "dev/.hidden.tar", "lost+found/x.tar")
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "a/above").symlink_to(tmp_path)
    assert found(tmp_path) == {"train": ["a/Training-1.TAR", "test/train-0.tar"], "val": ["a/validation/0.tar"]}
    assert set(found(touch(tmp_path / "one", "x.tar"))) == {"all"}


def test_files_that_are_named(tmp_path: Path) -> None:
    root = touch(tmp_path / "set [1]{1..2}", *(f"x-{n:03d}.tar" for n in range(4)))
    assert found(root, train="x-{000..002}.tar", val="*3.tar") == {
        "train": ["x-000.tar", "x-001.tar", "x-002.tar"],
        "val": ["x-003.tar"],
    }
    with pytest.raises(UserError, match=r"data.train: there is no file .*/x-004.tar"):
        found(root, train="x-{000..004}.tar")
    with pytest.raises(UserError, match=r"data.val: there is no file .*/x-\{3..1}.tar"):
        found(root, train="x-000.tar", val="x-{3..1}.tar")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train.tar", "x.tar"], "no name says that .*/x.tar is train, val or test"),
        (["train-00000-of-00003.tar"], "train-00001-of-00003, .*train-00002-of-00003: missing, of 3 files"),
        ([], "there are no .tar files"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, names: list[str], says: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(UserError, match=says):
        found(tmp_path)


def held() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(2 * _MOST_OPEN)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%06d" % number)
    files, before = OpenFiles(), held()
    for _ in range(2):
        for number, path in enumerate(paths):
            assert files.read(str(path), 4, 2) == (b"%06d" % number)[4:]
    assert held() == before + _MOST_OPEN
    assert pickle.loads(pickle.dumps(files)).read(str(paths[2]), 0, 6) == b"000002"
    del files
    assert held() == before


def test_after_an_error_the_file_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS server that was restarted refuses what was open before."""
    path = tmp_path / "x"
    path.write_bytes(b"000000")
    files, real, opens = OpenFiles(), os.open, []
    monkeypatch.setattr(os, "open", lambda *arguments: (opens.append(arguments), real(*arguments))[1])
    for _ in range(2):
        files.read(str(path), 0, 6)
    assert len(opens) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *a: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
        with pytest.raises(OSError, match="Stale"):
            files.read(str(path), 0, 6)
    assert files.read(str(path), 0, 6) == b"000000"
    assert len(opens) == 2
    with pytest.raises(OSError, match="ends before the image does"):
        files.read(str(path), 4, 3)


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "train.tar").touch()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="closed"):
        find_files(str(tmp_path), (".tar",), ColumnSource())
