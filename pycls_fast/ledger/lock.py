"""Folder locks: one ledger per folder at a time, and none while processes of a killed one still run there."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path

from pycls_fast.errors import UserError


class FolderLock:
    """Two locked files, which the kernel unlocks when the last process that has them open ends.

    One is the ledger's own. The other stays open in the processes that it starts (`inherited`): if the ledger is killed
    with -9, they continue for a while and save their state in folders that the next start would write to.

    Args:
        folder: an existing folder.
        say: called with a message if locking has to wait or is not possible.

    Raises:
        UserError: another ledger is using the folder.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._own = _open(folder / ".ledger.lock")
        self.inherited = _open(folder / ".processes.lock")
        try:
            self._take(folder, say)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path, say: Callable[[str], None]) -> None:
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._own, 200, 0).decode(errors="replace") or "another process"
            raise UserError(
                f"output: {folder} is in use by another ledger ({other}); wait until it has ended, or choose another "
                "folder"
            ) from None
        except OSError as error:
            # Network file systems may not support locks.
            say(f"{folder} cannot be locked ({error.strerror}): do not start a second ledger in it")
            return
        os.ftruncate(self._own, 0)
        os.pwrite(self._own, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        try:
            fcntl.flock(self.inherited, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: waiting for a process of an earlier start, which was killed, to end")
            fcntl.flock(self.inherited, fcntl.LOCK_EX)

    def release(self) -> None:
        """Unlock the folder for another ledger, which still waits for the processes of this one to end."""
        os.close(self._own)
        os.close(self.inherited)


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
