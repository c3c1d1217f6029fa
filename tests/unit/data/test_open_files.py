"""Files that stay open between reads."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from pycls_fast.data.sources.arrays import _MOST, OpenFiles


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened from here on."""
    paths: list[str] = []
    real = os.open

    def counting(path: str, flags: int) -> int:
        paths.append(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", counting)
    return paths


def shards(folder: Path, count: int) -> list[str]:
    paths = [folder / str(number) for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%06d" % number)
    return [str(path) for path in paths]


def held() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    files, paths = OpenFiles(), shards(tmp_path, 3)
    for _ in range(100):
        for number, path in enumerate(paths):
            assert files.read(path, 4, 2) == b"%02d" % number
    assert opened == paths
    assert pickle.loads(pickle.dumps(files)).read(paths[2], 0, 6) == b"000002"
    assert opened == [*paths, paths[2]]


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    files, paths, before = OpenFiles(), shards(tmp_path, 2 * _MOST), held()
    for _ in range(2):
        for number, path in enumerate(paths):
            assert files.read(path, 0, 6) == b"%06d" % number
    assert held() == before + _MOST
    del files
    assert held() == before


def test_after_an_error_the_file_is_opened_again(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server that was restarted refuses what was open before."""
    files, (path,) = OpenFiles(), shards(tmp_path, 1)
    files.read(path, 0, 6)

    def stale(*arguments: int) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(OSError, match="Stale"):
            files.read(path, 0, 6)
    assert files.read(path, 0, 6) == b"000000"
    assert len(opened) == 2
    with pytest.raises(OSError, match="ends before the image does"):
        files.read(path, 4, 3)
    Path(path).unlink()
    with pytest.raises(FileNotFoundError):
        files.read(path, 0, 6)
