"""Images given by the user (paths, folders, patterns, addresses, videos, Pillow images, arrays) as one `Images`.

Frames of videos, through PyAV, are found without decoding, then decoded one after the other.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import EXTENSIONS, UNREAD_EXTENSIONS, files_below, note_unread
from pycls_fast.data.sources.remote import is_remote, list_files, read_range
from pycls_fast.data.to_rgb import AS_STORED, Conversion, decode
from pycls_fast.errors import UserError, refuse, refusing
from pycls_fast.files import user_path
from pycls_fast.reading import IMAGE_BYTES, read_bytes

_KINDS = "a path, an address, a Pillow image, or a uint8 array or tensor (height, width, 3)"


VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".wmv")
"""Extensions of videos, in any case."""
# Each process keeps so many open.
_MOST_OPEN = 4
# The longest wait for a server.
_SECONDS = 30.0
_PAGES = ("http://", "https://")
_IN_ADDRESSES = "%:/?#[]@!$&'()*+,;=~"


class Address(str):
    """The address of an image (`https://...`, or what fsspec knows: `s3://...`)."""

    __slots__ = ()


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


class GivenImages(Images):
    """Images without labels, at least one; files are read on access, and converted by whoever decodes them."""

    def __init__(
        self, items: Sequence[Path | Address | Frame | Image.Image | np.ndarray], convert: Conversion = AS_STORED
    ) -> None:
        if not items:
            raise UserError("images: none were given; give files, folders or patterns")
        self.classes = ()
        self.labels = np.zeros(len(items), dtype=np.int32)
        self._items = list(items)
        self._convert = convert

    @property
    def in_memory(self) -> bool:
        """Whether all images are in memory, so that no file is read."""
        return not any(isinstance(item, Path | Address | Frame) for item in self._items)

    def read(self, index: int) -> bytes | np.ndarray:
        item = self._items[index]
        if isinstance(item, Path):
            return read_bytes(item, IMAGE_BYTES)
        if isinstance(item, Address):
            return _fetched(item)
        if isinstance(item, Frame):
            return item.read()
        if isinstance(item, Image.Image):
            return np.asarray(decode(item, self._convert))
        return item

    def name(self, index: int) -> str:
        """The path as printable text, that of a frame as "clip.mp4@12.0s", or "image 3"."""
        item = self._items[index]
        name = f"{item.path}@{item.seconds}s" if isinstance(item, Frame) else item
        # Bytes of a name that are not UTF-8 become backslash escapes.
        if isinstance(name, str | Path):
            return os.fsencode(name).decode("utf-8", "backslashreplace")
        return f"image {index}"

    def short_name(self, index: int) -> str:
        """The last part of the name; where others end with the same, as in folders of classes, the last two."""
        path = Path(self.name(index))
        return str(Path(*path.parts[-2:])) if self._ends[path.name] > 1 else path.name

    @cached_property
    def _ends(self) -> Counter[str]:
        return Counter(Path(self.name(index)).name for index in range(len(self)))


def _fetched(address: str) -> bytes:
    """The contents of an address, which is an image that cannot be read if they cannot be fetched."""
    try:
        if not address.startswith(_PAGES):
            return read_range(address, 0, IMAGE_BYTES)
        # For these fsspec would need aiohttp. Spaces and letters with accents are escaped, as browsers do.
        with urlopen(quote(address, _IN_ADDRESSES), timeout=_SECONDS) as file:
            data: bytes = file.read(IMAGE_BYTES)
            return data
    except (UserError, HTTPException, ValueError) as error:
        raise OSError(str(error)) from error


def given_images(images: Any, convert: Conversion = AS_STORED, every: float = 1.0) -> GivenImages:
    """Turn any kind of input into one source.

    Args:
        images: a path, a folder, a pattern, an address or a video; a Pillow image; a uint8 array or tensor (H, W, 3),
            (H, W) or, for several, (B, H, W, 3); a sequence of these.
        convert: how Pillow images are converted.
        every: seconds from one frame of a video to the next.

    Raises:
        UserError: nothing was given, an unsupported type, or a path that does not exist.
    """
    return GivenImages(list(_flat(images, every)), convert)


def _flat(images: Any, every: float) -> Iterator[Path | Address | Frame | Image.Image | np.ndarray]:
    if isinstance(images, str | os.PathLike):
        yield from find_images([os.fspath(images)], every)
    elif isinstance(images, Image.Image):
        yield images
    elif isinstance(images, np.ndarray | torch.Tensor):
        yield from _pixels(images)
    elif isinstance(images, Iterable) and not isinstance(images, bytes | dict):
        for item in images:
            yield from _flat(item, every)
    else:
        raise UserError(f"images: must be {_KINDS}; got {type(images).__name__}")


def _pixels(images: np.ndarray | torch.Tensor) -> Iterator[np.ndarray]:
    dtype, shape = str(images.dtype).removeprefix("torch."), tuple(images.shape)
    colors = shape if len(shape) > 2 else (*shape, 1)
    # Checked before a tensor becomes an array: NumPy lacks some of torch's types.
    if dtype != "uint8" or 0 in shape or len(colors) not in (3, 4) or colors[-1] not in (1, 3):
        raise UserError(f"images: must be {_KINDS}; got {dtype} {shape}")
    array = (images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else images).reshape(colors)
    array = np.repeat(array, 3, axis=-1) if colors[-1] == 1 else array
    yield from array if array.ndim == 4 else [array]


def find_images(words: Iterable[str], every: float = 1.0) -> list[Path | Address | Frame]:
    """The files that arguments name, in the order of the arguments.

    Args:
        words: files with any name; folders, whose images and videos at any depth are taken in the order of their
            paths, without hidden ones, and each folder once whatever links lead to it; patterns with `*`, `?`, `[...]`
            and `**`; addresses of files, with `*` of several. A file that is called like a video stands for its frames.
        every: seconds from one frame of a video to the next.

    Raises:
        UserError: a line for each argument that matches nothing.
    """
    found: list[Path | Address | Frame] = []
    mistakes: list[str] = []
    for word in words:
        # A name that begins with "~" but is not a user's home is an ordinary name.
        path, here = user_path(word), list[Path | Address]()
        problem = "is not a file, a folder or a pattern that matches images"
        if is_remote(word):
            here = [Address(name) for name in (list_files(word) if "*" in word else [word])]
        elif path.is_dir():
            # Compared as text: hashes of a million paths take a minute.
            names = list(files_below(str(path), (*EXTENSIONS, *VIDEOS, *UNREAD_EXTENSIONS)))
            unread = [name for name in names if name.lower().endswith(UNREAD_EXTENSIONS)]
            note_unread(path, Counter(Path(name).suffix.lower() for name in unread))
            here = sorted(Path(name) for name in names if not name.lower().endswith(UNREAD_EXTENSIONS))
            problem = f"holds no images ({' '.join(EXTENSIONS)})"
        elif path.exists():
            here = [path]
        else:
            matches = (Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207  # absolute too
            of_images = (each for each in matches if each.name.lower().endswith((*EXTENSIONS, *VIDEOS)))
            here = sorted(each for each in of_images if each.is_file() and not each.name.startswith("."))
        found += frames_of(here, every)
        if not here:
            mistakes.append(f"images: {word} {problem}")
    refuse(mistakes)
    return found


def frames_of(files: Iterable[Path | Address], every: float) -> Iterator[Path | Address | Frame]:
    """The files, with frames in place of videos; see `find_frames`."""
    for file in files:
        # What else fsspec knows FFmpeg does not.
        readable = isinstance(file, Path) or file.startswith(_PAGES)
        if readable and str(file).lower().endswith(VIDEOS):
            yield from find_frames(file, every)
        else:
            yield file


if TYPE_CHECKING:
    from av.container import InputContainer


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
            length = None if stream.duration is None else float(stream.duration * unit)
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
