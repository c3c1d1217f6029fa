"""What a tool prints besides its results, and its exit status: one line per error, no traceback for a mistake."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pycls_fast.errors import DONE, INTERRUPTED, MISTAKE, OUT_OF_MEMORY, UserError, first_line, is_out_of_memory


def reporting(action: Callable[[], int], batch: str = "data.global_batch_size or data.eval_batch_size") -> int:
    """Run `action`; turn a `UserError` into its lines on standard error (once per node) and status 2, Ctrl-C into 130.

    If the reader of standard output is gone (`| head`), the status is that of `action`, or 0 if this ended it.

    An error that only other ranks of a node hit has been printed already (`parallel/launch.py`). Running out of
    device memory is one line from each rank that does; the line proposes to lower `batch`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: names of files and classes that are not UTF-8 can be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = DONE
    try:
        status = action()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UserError as error:
        print_lines("error", error.lines)
        return MISTAKE
    except OSError as error:
        if not (_output_is_broken() or _output_is_full(error)):
            raise
        discard_output()
        if isinstance(error, BrokenPipeError):
            # The reader (`| head`) has seen enough.
            return status
        print_lines("error", [f"standard output: cannot be written ({error.strerror})"])
        return MISTAKE
    except KeyboardInterrupt:
        print_lines("interrupted", ["Ctrl-C ended this at once"])
        return INTERRUPTED
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = first_line(error).rpartition("DefaultCPUAllocator: ")[2].partition(" GPU ")[0].rstrip(".")
        rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(f"error: {rank}the device is {OUT_OF_MEMORY} ({asked}); lower {batch}, or the model", file=sys.stderr)
        return MISTAKE


@contextmanager
def cleanup_at_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP (unless `nohup` ignores it) end the process after a line and the cleanup.

    The status is that of the bare signal, which would leave the locks of other processes. A second signal ends the
    process at once.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    # None is a handler that Python did not set and cannot set again.
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        # Not `print`: the signal may have interrupted another one.
        with suppress(OSError):
            os.write(2, f"interrupted: {signal.Signals(number).name} ended this at once\n".encode())
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


def print_lines(kind: str, lines: Iterable[str]) -> None:
    """Print `kind: line` for each line on standard error, once per node: data may be missing on one node only."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        # The terminal may be gone; the exit status still reports the error.
        with suppress(OSError):
            for line in lines:
                print(f"{kind}: {line}", file=sys.stderr)


def show(page: str) -> int:
    """Print a page."""
    print(page)
    return DONE


def discard_output() -> None:
    """Redirect a broken standard output to /dev/null: Python would flush its buffer again at exit and fail."""
    # Python code may have replaced it by an object without a file.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _output_is_broken() -> bool:
    try:
        # What could not be written is still in the buffer, if there is one.
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, ValueError):
        return False  # no standard output, or an object without a file
    except OSError:
        return True
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _output_is_full(error: OSError) -> bool:
    """Whether standard output is a file and `error` says that there is no space for it.

    A text larger than the buffer is written directly and not kept, so that nothing fails again. All other files of the
    tools are written by functions that raise a `UserError`, those of libraries are not.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename is not None:
        return False
    try:
        number = sys.stdout.fileno()
        about = os.fstat(number)
        if stat.S_ISREG(about.st_mode):
            # Libraries write files of their own, which may be on another disk.
            return error.errno != errno.ENOSPC or os.fstatvfs(number).f_bavail == 0
        is_device = stat.S_ISCHR(about.st_mode) and not os.isatty(number)
        return is_device and about.st_rdev != Path(os.devnull).stat().st_rdev
    except (OSError, AttributeError, ValueError):
        return False
