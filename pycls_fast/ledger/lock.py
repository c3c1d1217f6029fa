"""One ledger in a folder at a time, and none while processes of a killed one still run there."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable
from pathlib import Path

from pycls_fast.errors import UserError


class FolderLock:
    """Two locked files, which the kernel lets go of when the last process that has them open ends.

    One is the ledger's own. The other is left open in the processes that it starts (`inherited`): killed with -9 it
    leaves them behind, saving what they have, in folders that the next start would write to.

    Args:
        folder: an existing one.
        say: told of what there is to wait for.

    Raises:
        UserError: another ledger works there.
        OSError: nothing can be written there.
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
            # A file system of several machines may have no locks.
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
        """Let another ledger in, once the processes of this one have ended, too."""
        os.close(self._own)
        os.close(self.inherited)


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
