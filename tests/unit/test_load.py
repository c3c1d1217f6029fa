"""What is imported late."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_where_it_is_used() -> None:
    late = ("timm", "matplotlib", "torch.utils.tensorboard")
    command = (
        "import sys; import pycls_fast.inference, pycls_fast.train.loop, pycls_fast.train.tasks.lr_range; "
        f"print([name for name in {late!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
