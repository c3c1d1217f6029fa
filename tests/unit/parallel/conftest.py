"""One rank with a process group and a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pycls_fast.parallel import World, start_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with start_world(device="cpu", backend="gloo", timeout_seconds=60, strategy="fsdp") as made:
        yield made
