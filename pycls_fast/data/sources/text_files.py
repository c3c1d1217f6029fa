"""Text files written by hand, in any editor."""

from __future__ import annotations

from pathlib import Path

from pycls_fast.errors import UserError

ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that Windows adds."""


def read_lines(file: Path) -> list[str]:
    """The lines that are not blank, stripped.

    Raises:
        OSError: there is no such file, or it may not be read.
        UserError: the file is not UTF-8.
    """
    try:
        text = file.read_text(encoding=ENCODING)
    except UnicodeDecodeError as error:
        raise not_utf8(file) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def not_utf8(file: Path) -> UserError:
    """The error for a file that is not UTF-8, with the line number."""
    content = file.read_bytes()
    line = 1
    try:
        content.decode(ENCODING)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
    return UserError(f"{file}: line {line} is not UTF-8; save the file as UTF-8")
