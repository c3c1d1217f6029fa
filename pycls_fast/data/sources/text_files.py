"""Text files that people write, with whatever editor they have."""

from __future__ import annotations

from pathlib import Path

from pycls_fast.errors import UserError

ENCODING = "utf-8-sig"
"""UTF-8, with or without the mark that Windows puts before it."""


def read_lines(file: Path) -> list[str]:
    """The lines that hold something, without blanks around them.

    Raises:
        OSError: there is no such file, or it may not be read.
        UserError: it is not UTF-8.
    """
    try:
        text = file.read_text(encoding=ENCODING)
    except UnicodeDecodeError as error:
        raise not_utf8(file) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def not_utf8(file: Path) -> UserError:
    """For a file that could not be decoded; says the line."""
    content = file.read_bytes()
    line = 1
    try:
        content.decode(ENCODING)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
    return UserError(f"{file}: line {line} is not UTF-8; save the file as UTF-8")
