"""Reading every image of a source to find the damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycls_fast.data.decode import DamagedImage, decode
from pycls_fast.data.packing.workers import map_images
from pycls_fast.data.sources import Source, checksum_holds
from pycls_fast.data.sources.progress import progress


class Damaged(NamedTuple):
    """An image that cannot be used."""

    position: int
    name: str
    reason: str


def verify(source: Source, *, workers: int, title: str) -> Iterator[Damaged]:
    """Read and decode every image, in the source's order; yield those that a run would skip.

    Args:
        workers: processes.
        title: title of the progress bar.
    """
    with progress(title, len(source), "images") as advance:
        for index, reason in map_images(source, _check, workers=workers):
            advance(1)
            if reason is not None:
                yield Damaged(index, source.name(index), reason)


def _check(source: Source, index: int) -> str | None:
    try:
        data, label = source.read(index)
        if not checksum_holds(source, index):
            return "the stored bytes are not those that were packed (checksum)"
        decode(data)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except DamagedImage as error:
        return error.reason
    return None if 0 <= label < len(source.classes) else f"the label {label} is none of {len(source.classes):,} classes"
