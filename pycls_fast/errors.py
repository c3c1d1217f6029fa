"""The one exception for user mistakes, any other being a bug in the program, and the exit statuses of all tools."""

from __future__ import annotations

import difflib
import errno
import io
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

DONE, FAULT, MISTAKE, STOPPED = 0, 1, 2, 3
# The shells' convention: 128 + the number of SIGINT.
INTERRUPTED = 130
OUT_OF_MEMORY = "out of memory"
"""In the error line of every tool that ran out of memory."""


class Finished(int):
    """The status `DONE` of a training, with the number that a sweeper such as Optuna's minimises."""

    objective: float | None

    def __new__(cls, objective: float | None) -> Finished:
        """Status 0; `objective` is None if there is no result."""
        status = super().__new__(cls, DONE)
        status.objective = objective
        return status


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, or its class's name if there is none."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


_LACKS_KERNEL = re.compile("No available kernel|No viable backend for scaled_dot_product_attention")
_LACKS_GPU_MEMORY = re.compile(r"(CUDA error|Triton Error \[CUDA\]): (out of memory|CUBLAS_STATUS_ALLOC_FAILED)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory left, on an accelerator or on the CPU."""
    # torch takes seconds to import; if it was not imported, it allocated nothing.
    torch = sys.modules.get("torch")
    # The compiler's errors hold that of the allocator: it times kernels on the device, beside all activations.
    error = getattr(error, "inner_exception", error)
    if torch is None or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # Beside torch's allocator: a context on a GPU that others have filled, the handle of a library, a kernel.
    if isinstance(error, torch.OutOfMemoryError) or _LACKS_GPU_MEMORY.match(text):
        return True
    # Beside a GPU, or in a data worker ("Caught ..."), it is other memory than the advice is about.
    # The last two are all that C++ and oneDNN say.
    known = "can't allocate memory" in text or text in ("std::bad_alloc", "could not create a primitive")
    return known and not (text.startswith("Caught ") or torch.cuda.is_initialized())


def first_few(names: Sequence[str], limit: int = 5) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with escapes in place of characters that control a terminal; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cell(value: Any) -> Any:
    """A value for a CSV file: a text is `printable`; one that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    value = printable(value)
    if not value.lstrip().startswith(("=", "+", "-", "@")):
        return value
    try:
        float(value)
    except ValueError:
        return value if value == "-" else f"'{value}"
    return value


class UserError(Exception):
    """A mistake in the configuration, the data or the machine's set-up that the user can fix.

    Each line says what is wrong, where it was set and what to do. The command line prints the lines to
    standard error without a traceback and exits with status 2.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines

    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        # The default rebuilds from the joined text, which would merge the lines if a worker process raised it.
        return type(self), self.lines


def refuse(lines: Iterable[str]) -> None:
    """Raise a `UserError` of these lines, if there are any."""
    found = tuple(lines)
    if found:
        raise UserError(*found)


@contextmanager
def refusing(what: str, *kinds: type[Exception], use: str = "") -> Iterator[None]:
    """Within the block, an error of these kinds (else an `OSError`) is a `UserError`: `what (the reason); use`."""
    caught = kinds or (OSError,)
    try:
        yield
    except UserError:
        raise
    except caught as error:
        reason = " ".join(first_line(error).split())
        if isinstance(error, OSError) and error.strerror:
            # Without its number and a path that the line has; hidden files are our own, beside that.
            place = str(error.filename or "")[:200]
            known = place in what or Path(place).name.startswith(".")
            reason = error.strerror if known else f"{place}: {error.strerror}"
        elif not isinstance(error, OSError | ValueError | RuntimeError | ImportError):
            # The text of the others says little without the name of their class.
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(f"{what} ({reason}){f'; {use}' if use else ''}") from error


_USUAL_WORDS = {
    "gpu": "cuda", "ce": "cross_entropy", "float32": "fp32", "16-mixed": "amp_fp16", "bf16-mixed": "amp_bf16",
}  # fmt: skip


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that was probably meant: by its usual name, by its parts in a different order, or by spelling."""
    known = sorted(words)
    if _USUAL_WORDS.get(word) in known:
        return _USUAL_WORDS[word]
    reordered = next((other for other in known if _parts(other) == _parts(word)), None)
    # Short words are near many.
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff if len(word) > 3 else 0.8)
    return reordered or next(iter(near), None)


def _parts(word: str) -> list[str]:
    return sorted(re.split(r"[_-]", word.lower()))


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean X?` for the nearest of the words, or "" if none is near."""
    near = nearest(word, words, cutoff)
    return f"; did you mean {near}?" if near is not None else ""


def one_of(key: str, value: object, allowed: Iterable[object], *, more: str = "") -> None:
    """Refuse a value that is none of the allowed ones; `more` says what else may be given."""
    names = list(allowed)
    if value not in names:
        shown = first_few(list(map(str, names)), 50)
        raise UserError(f"{key}: must be one of {shown}{more}; got {value}{did_you_mean(str(value), map(str, names))}")


# A disk is full or broken, or a file may not be read or written.
_OF_FILES = (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


def reporting(action: Callable[[], int]) -> int:
    """Run `action`; turn a `UserError` into its lines on standard error (once per node) and status 2, Ctrl-C into 130.

    If the reader of standard output is gone (`| head`), the status is that of `action`, or 0 if this ended it.

    An error that only other ranks of a node hit has been printed already (`parallel/launch.py`). Running out of
    device memory is one line from each rank that does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on standard error: names of files and classes that are not UTF-8 can be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = DONE
    try:
        check_launcher()
        status = action()
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        discard_output()
        return status
    except (Exception, KeyboardInterrupt) as error:
        if _of_ctrl_c(error):
            print_lines("interrupted", ["Ctrl-C ended this at once"])
            return INTERRUPTED
        lines = error.lines if isinstance(error, UserError) else _of_the_machine(error)
        if lines is None:
            raise
        print_lines("error", lines, of_all=is_out_of_memory(error))
        try:
            print(end="", flush=True)
        except OSError:
            # Standard output is the file that cannot be written.
            discard_output()
        return MISTAKE


def _of_the_machine(error: BaseException) -> Sequence[str] | None:
    """The line for what the machine lacks or does not permit; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    # The last is a library of an import.
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "failed to map segment from shared" in str(error):
        return ["out of host memory (or of ulimit -v); lower the batch size or data.num_workers"]
    if isinstance(error, OSError) and number in _OF_FILES:
        # An open one has no name.
        name = str(error.filename or "")
        return [f"{name[:99]}{'...' * (len(name) > 99)}{': ' * bool(name)}{error.strerror}"]
    if str(error) == "can't start new thread":
        return ["the system gives no more threads (ulimit -u) or no memory for them (ulimit -v)"]
    if _LACKS_KERNEL.search(str(error)):
        return ["speed.attention: this device has no such kernel for the model's sizes and format; use sdpa"]
    if not is_out_of_memory(error):
        return None
    asked = first_line(error).rpartition("DefaultCPUAllocator: ")[2].partition(" GPU ")[0].rstrip(".")
    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    way_out = "lower the batch size or the model, or end what else uses it"
    return [f"{rank}the device is {OUT_OF_MEMORY} ({asked}); {way_out}"]


def _of_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: pydantic has its own if it builds a schema then, and omegaconf fails when it
    cleans up after a part that it has not finished."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or str(error).rstrip().endswith("KeyboardInterrupt:"):
            return True
        error = error.__cause__ or error.__context__
    return False


def print_lines(kind: str, lines: Iterable[str], *, whole: bool = False, of_all: bool = False) -> None:
    """Print `kind: line` for each line on standard error, once per node (data may be missing on one node only), or
    those `of_all` ranks.

    On a terminal a line is wrapped between words, unless it is to be copied as a `whole`.
    """
    if of_all or is_first_of_node():
        # The terminal may be gone; the exit status still reports the error.
        with suppress(OSError):
            width = None
            with suppress(OSError, ValueError, AttributeError):
                width = None if whole else os.get_terminal_size(sys.stderr.fileno()).columns
            for line in lines:
                print(wrapped(f"{kind}: {printable(line)}", width), file=sys.stderr)


def wrapped(text: str, width: int | None) -> str:
    """The text in lines of at most so many columns, unless that is None or 0; words, such as paths, stay whole."""
    if not width:
        return text
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


def is_first_of_node() -> bool:
    """Whether this is the process of its node that prints what all have to say."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def check_launcher() -> None:
    """Refuse to go on if the current folder is gone, or a launcher's environment variable is missing or unusable."""
    with refusing("the current folder is gone", FileNotFoundError, use="change to one that is there"):
        Path.cwd()
    values = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    wrong = [f"{name}: must be a whole number, got {text!r}" for name, text in values.items() if not text.isdecimal()]
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not wrong and size != "1" and "SUBMITIT_EXECUTOR" not in os.environ:
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        wrong += [f"{name}: not set, but WORLD_SIZE={size} is" for name in needed if name not in os.environ]
    if not wrong and int(rank) >= int(size):
        wrong = [f"RANK: must be below WORLD_SIZE={size}, got {rank}"]
    if not wrong and int(values["MASTER_PORT"]) > 65_535:
        # A scheduler's job number in its place, say.
        wrong = [f"MASTER_PORT: must be at most 65535, got {values['MASTER_PORT']}"]
    refuse(f"{line} (the environment); start with torchrun, or unset its variables" for line in wrong)


def discard_output() -> None:
    """Redirect a broken standard output to /dev/null: Python would flush its buffer again at exit and fail."""
    # Python code may have replaced it by an object without a file.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    """Whether nobody reads standard output; other pipes break if a worker process dies."""
    poll = select.poll()
    with suppress(AttributeError, ValueError, OSError):
        poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def end_imports_at_ctrl_c() -> None:
    """From now on, Ctrl-C during an import is one line and status 130.

    Imports take seconds. A KeyboardInterrupt in one of them would be a traceback if `reporting` cannot report it yet;
    in torch it may be lost, or abort the process.
    """
    # Unless it is ignored, as in the background of a shell's script.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_import)


def end_import(number: int, frame: FrameType | None) -> None:
    """End the process if something is being imported or nothing reports a KeyboardInterrupt yet; else raise that."""
    files = []
    inner = frame
    while inner is not None:
        files.append(inner.f_code.co_filename)
        inner = inner.f_back
    if "<frozen importlib._bootstrap>" not in files and __file__ in files[1:]:
        signal.default_int_handler(number, frame)
    if is_first_of_node():
        say_at_once("interrupted: Ctrl-C ended this at once")
    os._exit(INTERRUPTED)


def say_at_once(line: str) -> None:
    """Write to standard error in a handler; not `print`, which the signal may have interrupted."""
    # The terminal may be gone.
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())
