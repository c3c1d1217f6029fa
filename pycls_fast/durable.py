"""Writing that survives a power cut: what the system still holds in memory is flushed to disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, Any


def flush(*files: IO[Any]) -> None:
    """Flush the contents of open files to disk, one after the other.

    Raises:
        OSError: for example, the disk is full.
    """
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the file system supports it.

    Raises:
        OSError: for example, the disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some refuse it for every folder (VirtualBox shares); PostgreSQL's `fsync_fname` ignores the first two as well.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
