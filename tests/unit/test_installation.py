"""What `pip install` without -e leaves, from a clone to the package; what is imported late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import installed, run_process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_configurations_are_installed_with_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    sources, site = installed(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(folder: Path, *arguments: str) -> str:
        return run_process([sys.executable, *arguments], cwd=folder, package=site).stdout

    def files(folder: Path, *suffixes: str) -> set[str]:
        return {str(file.relative_to(folder)) for suffix in suffixes for file in folder.rglob(f"*.{suffix}")}

    assert files(site / "pycls_fast" / "configs", "yaml") == files(ROOT / "configs", "yaml")
    assert files(site / "pycls_fast", "py", "c") == files(ROOT / "pycls_fast", "py", "c")
    # Others install a folder of that name, too.
    (site / "configs").mkdir()
    code = "from pycls_fast.config import load_config; print(load_config('vit_b16', ['data.root=/']).model.width)"
    assert run(elsewhere, "-c", code) == "768\n"
    assert "depth: 3\n" in run(sources, "tools/train_net.py", "model.depth=3", "--cfg", "job")


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_where_it_is_used() -> None:
    late = ("timm", "matplotlib", "torch.utils.tensorboard")
    command = (
        "import sys; import pycls_fast.inference, pycls_fast.train.loop, pycls_fast.train.tasks.lr_range; "
        f"print([name for name in {late!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
