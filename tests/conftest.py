"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pycls_fast.data import write_digits

# Two tests or ranks side by side must not fight for the same cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as class folders."""
    folder = tmp_path_factory.mktemp("digits") / "images"
    write_digits(folder)
    return folder
