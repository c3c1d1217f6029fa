"""The only part in C: decodes the region of a JPEG that a crop needs. Compiled on first use, kept in the user's cache.

It needs a C compiler and libjpeg-turbo with its header. Nothing else of the package does, and it is compiled for the
processor of this machine, so it is not built when the package is installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from pycls_fast.data.crop import Crop
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import cache_folder

_SOURCE = Path(__file__).with_name("jpeg_region.c")
# No fused multiply-adds: the coefficients must match Pillow's to the bit.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
_OK, _NO_MEMORY = 0, 2


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled functions; compiles them if this machine has not done so yet.

    Raises:
        UserError: it cannot be compiled here; says what is missing.
    """
    way_out = (
        "install a C compiler and libjpeg-turbo's header (Debian, Ubuntu: libjpeg62-turbo-dev or libjpeg-turbo8-dev), "
        "or use speed.decode=simplejpeg"
    )
    what = "speed.decode: region cannot be compiled here"
    with refusing(what, OSError, subprocess.SubprocessError, use=way_out):
        path = _path()
        if not path.exists():
            _compile(path)
        if not path.is_absolute() and path.stat().st_uid != os.getuid():
            # A user without a home has the cache in the working folder, where others may write.
            raise OSError(f"{path} belongs to another user, whose code is not run; remove it, or set XDG_CACHE_HOME")
        loaded = ctypes.CDLL(str(path))
    loaded.jpeg_size.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    loaded.jpeg_region.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    loaded.array_region.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    return loaded


def _path() -> Path:
    """The library of this code, compiler, system and processor: home folders are shared between machines."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    parts = [line for line in lines if line.startswith((b"flags", b"Features"))][:1]
    about = f"{_compiler()} {_FLAGS} {platform.machine()} {platform.libc_ver()}"
    digest = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), about.encode(), *parts])).hexdigest()[:16]
    return cache_folder() / f"jpeg_region-{digest}.so"


def _compiler() -> list[str]:
    return (os.environ.get("CC") or "cc").split()


def _compile(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [*_compiler(), *_FLAGS, str(_SOURCE), "-o", str(made), "-ljpeg", "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
        if result.returncode:
            problems = [line.strip() for line in result.stderr.splitlines() if "error" in line]
            raise OSError(problems[0] if problems else "no message")
        # Ranks may compile at the same time: each makes its own file, the last one wins.
        made.replace(path)


@functools.cache
def available() -> bool:
    """Whether the functions are compiled or can be, which is tried once."""
    try:
        library()
    except UserError:
        return False
    return True


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a JPEG that `jpeg_region` can decode, None for anything else."""
    width, height = ctypes.c_int32(), ctypes.c_int32()
    status = library().jpeg_size(data, len(data), ctypes.byref(width), ctypes.byref(height))
    return (height.value, width.value) if status == _OK else None


def jpeg_region(data: bytes, crop: Crop, divisor: int = 1) -> np.ndarray | None:
    """A crop of a JPEG that has a `jpeg_size`, uint8 (height, width, 3) of the view.

    Args:
        divisor: 1, 2, 4 or 8: the image is decoded at 1 / divisor of its size before it is resized.

    Returns:
        None if the file is damaged or unusual, so that the reference decoder has to judge it.
    """
    image_HWC = np.empty((crop.view[2], crop.view[3], 3), dtype=np.uint8)
    status = library().jpeg_region(data, len(data), _numbers(crop, divisor), image_HWC.ctypes.data)
    if status == _NO_MEMORY:
        raise MemoryError("decoding a JPEG")
    return image_HWC if status == _OK else None


def array_region(image_HWC: np.ndarray, crop: Crop) -> np.ndarray:
    """`jpeg_region` of decoded pixels: contiguous uint8 (height, width, 3)."""
    cut_HWC = np.empty((crop.view[2], crop.view[3], 3), dtype=np.uint8)
    numbers = _numbers(crop, 1)
    if library().array_region(image_HWC.ctypes.data, image_HWC.shape[1], numbers, cut_HWC.ctypes.data) != _OK:
        raise MemoryError("resizing an image")
    return cut_HWC


def _numbers(crop: Crop, divisor: int) -> ctypes.Array[ctypes.c_int32]:
    is_bicubic = crop.interpolation == "bicubic"
    return (ctypes.c_int32 * 13)(*crop.box, *crop.resized, *crop.view, is_bicubic, crop.mirror, divisor)
