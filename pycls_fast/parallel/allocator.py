"""Make glibc's malloc keep freed memory, so that a step does not page-fault its activations in again."""

from __future__ import annotations

import ctypes

# From malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULT_MMAP_MAX = 65536
# The values that glibc's dynamic thresholds reach once large blocks have been freed (mallopt(3), M_MMAP_THRESHOLD).
_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 << 20


class _Kept:
    """Whether this process currently keeps freed memory."""

    now = False


def keep_freed_memory(keep: bool) -> None:
    """Make this process keep freed memory, or return it to the system as usual.

    When it is kept, large blocks come from the heap instead of `mmap` and the heap is never trimmed: the process stays
    at its peak size. torch's CPU tensors are such blocks; by default most activations of a step are returned in its
    backward pass, and the next step gets the memory page by page, zeroed by the kernel. After turning this off, the
    process still holds part of its memory, so compare the two settings in separate processes.

    Raises:
        RuntimeError: the C library refuses. (`speed.resolve` ensures that it is glibc.)
    """
    if keep == _Kept.now:
        return
    # Setting a threshold makes it static, so the default is restored as the values that glibc's dynamic ones reach.
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
