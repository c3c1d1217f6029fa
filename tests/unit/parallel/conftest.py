"""One rank with a process group and a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pycls_fast.parallel.launch import start_world
from pycls_fast.parallel.world import World
from pycls_fast.strategies import Parallel


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with start_world("cpu", Parallel(name="fsdp")) as made:
        yield made
