"""Frames of videos, through PyAV: found without decoding, then decoded one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pycls_fast.errors import refusing

if TYPE_CHECKING:
    from av.container import InputContainer

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv")
"""Extensions of videos, in any case."""
# The longest wait for a server.
_SECONDS = 30.0
# Each process keeps so many open.
_MOST_OPEN = 4


class Frame(NamedTuple):
    """One frame, not decoded yet."""

    path: Path | str
    """Or an address."""
    seconds: float
    """Since the first one."""
    time: int
    """In the file's own unit."""
    start: int
    """The time of the frame from which it is decoded."""

    def read(self) -> np.ndarray:
        """uint8 (H, W, 3), turned as the file says; an OSError if there is no such frame, or it is damaged."""
        import av

        try:
            # After a fork it has to be opened anew.
            return _reader(self.path, os.getpid()).read(self)
        except (av.FFmpegError, IndexError) as error:
            _reader.cache_clear()
            reason = error.strerror if isinstance(error, av.FFmpegError) else "it has no pictures"
            raise OSError(f"no video that can be read ({reason})") from error


def find_frames(path: Path | str, every: float) -> list[Frame]:
    """The first frame in each `every` seconds of a video, and, where it is damaged, one that cannot be read."""
    with refusing(f"images: {path}: videos need PyAV", ImportError, use="pip install 'pycls_fast[video]'"):
        import av
    found: list[Frame] = []
    start, seconds, due, length = 0, 0.0, 0, None
    try:
        with _opened(path) as container:
            stream = container.streams.video[0]
            # Once the container is closed, the stream's numbers are those of freed memory.
            unit = stream.time_base or 1
            if stream.duration is not None and stream.time_base is not None:
                length = float(stream.duration * stream.time_base)
            elif container.duration is not None and len(container.streams) == 1:
                length = container.duration / av.time_base
            packets = sorted((each.pts, each.is_keyframe) for each in container.demux(stream) if each.pts is not None)
        for time, is_key in packets:
            start = time if is_key else start
            seconds = float((time - packets[0][0]) * unit)
            if seconds >= due * every - 1e-6:
                found.append(Frame(path, round(seconds, 3), time, start))
                due = int((seconds + 1e-6) / every) + 1
    except (av.FFmpegError, IndexError):
        length = None
    if not found or (length is not None and length - seconds > max(every, 1.0)):
        found.append(Frame(path, round(length or 0.0, 3), 2**62, start))
    return found


class _Reader:
    """An open video, and the frames from where it is decoded."""

    def __init__(self, path: Path | str) -> None:
        self._container = _opened(path)
        self._stream = self._container.streams.video[0]
        self._frames: Iterator = iter(())
        self._time: int | None = None

    def read(self, wanted: Frame) -> np.ndarray:
        if self._time is None or not wanted.start <= self._time < wanted.time:
            self._container.seek(wanted.start, stream=self._stream)
            self._frames = self._container.decode(self._stream)
        for frame in self._frames:
            self._time = frame.pts
            if frame.pts >= wanted.time:
                return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90))
        raise OSError("the video ends before")


@lru_cache(_MOST_OPEN)
def _reader(path: Path | str, process: int) -> _Reader:
    return _Reader(path)


def _opened(path: Path | str) -> InputContainer:
    import av

    # As a playlist a file could name addresses, and an address files.
    allowed = "file" if isinstance(path, Path) else "http,https,tcp,tls"
    return av.open(path, options={"protocol_whitelist": allowed}, timeout=_SECONDS)
