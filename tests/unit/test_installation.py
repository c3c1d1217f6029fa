"""What `pip install` without -e leaves, from a clone to the package; what is imported late."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_configurations_are_installed_with_the_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    clone, site, elsewhere = (tmp_path / name for name in ("clone", "site", "elsewhere"))
    for folder in (site, elsewhere):
        folder.mkdir()
    for name in ("pycls_fast", "configs", "tools"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    run(clone, "-c", f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    run(unpacked, "-c", f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(site)

    shipped, installed = (
        {str(file.relative_to(folder)) for file in folder.rglob("*.yaml")}
        for folder in (ROOT / "configs", site / "pycls_fast" / "configs")
    )
    assert installed == shipped
    code, kept = (
        {str(file.relative_to(folder)) for suffix in ("py", "c") for file in folder.rglob(f"*.{suffix}")}
        for folder in (ROOT / "pycls_fast", site / "pycls_fast")
    )
    assert kept == code

    # Others install a folder of that name, too.
    (site / "configs").mkdir()
    said = run(
        elsewhere,
        "-c",
        "from pycls_fast.config import load_config; print(load_config('vit_b16', ['data.root=/']).model.width)",
        PYTHONPATH=str(site),
    )
    assert said == "768\n"
    run(elsewhere, "-m", "pycls_fast", "train", "schedule.max_steps=2", "run_dir=run", PYTHONPATH=str(site))
    said = run(elsewhere, "-m", "pycls_fast", "runs", "run", PYTHONPATH=str(site))
    assert "finished" in said
    said = run(unpacked, "tools/train_net.py", "model.depth=3", "--cfg", "job", PYTHONPATH=str(site))
    assert "depth: 3\n" in said


@pytest.mark.slow
def test_what_takes_long_to_import_is_imported_where_it_is_used() -> None:
    late = ("timm", "matplotlib", "torch.utils.tensorboard")
    command = (
        "import sys; import pycls_fast.inference, pycls_fast.train.loop, pycls_fast.train.tasks.lr_range; "
        f"print([name for name in {late!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
