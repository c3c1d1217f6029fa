"""glibc's malloc told to keep what is freed, so that a step does not fault its activations in again."""

from __future__ import annotations

import ctypes

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULT_MMAP_MAX = 65536
# Where glibc's thresholds end up by themselves once large blocks have been freed (mallopt(3), M_MMAP_THRESHOLD).
_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 << 20


class _Kept:
    """Whether the process is set to keep what it frees."""

    now = False


def keep_freed_memory(keep: bool) -> None:
    """Let this process keep freed memory for itself, or give it back to the system as usual.

    Kept, large blocks come from the heap instead of from `mmap` and the heap is never trimmed: the process stays as
    large as it was at its largest. torch's CPU tensors are such blocks; by default most activations of a step are given
    back in its backward pass, and the next step gets the memory page by page, zeroed by the kernel. Turned off again,
    the process goes on holding part of what it has, so the two are best compared in processes of their own.

    Raises:
        RuntimeError: the C library refuses. (`speed.resolve` sees to it that it is glibc.)
    """
    if keep == _Kept.now:
        return
    # The default is put back as glibc's own thresholds are after some large blocks: setting one stops them from moving.
    settings = (
        {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
        if keep
        else {
            _MMAP_MAX: _DEFAULT_MMAP_MAX,
            _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD,
            _TRIM_THRESHOLD: 2 * _LARGEST_MMAP_THRESHOLD,
        }
    )
    libc = ctypes.CDLL(None)
    for parameter, value in settings.items():
        if libc.mallopt(parameter, value) != 1:
            raise RuntimeError(f"mallopt({parameter}, {value}) failed")
    _Kept.now = keep
