"""Files that stay open between reads: opening one for each image costs network disks requests."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache

# Of each source in each process. Processes may have 1,024 files open by default.
_MOST = 256


class OpenFiles:
    """Reads pieces of files and keeps those open that were read last.

    Reads give positions instead of moving one, so processes may share what was open before a fork. A pickled copy has
    no open files. A file that is replaced while it is open is still read as it was.
    """

    def __init__(self) -> None:
        self._file = lru_cache(_MOST)(_File)

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on.

        Raises:
            OSError: it cannot be opened or read, or ends before that.
        """
        file = self._file(path)
        try:
            data = os.pread(file.descriptor, size, start)
            if len(data) < size:
                raise OSError(f"{path} ends before the image does; was it replaced?")
        except OSError:
            # After a fault a network disk may accept only a new descriptor.
            self._file.cache_clear()
            raise
        return data

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()


class _File:
    """A file, open as long as this object lives: a thread may still read what another one's read pushed out."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
