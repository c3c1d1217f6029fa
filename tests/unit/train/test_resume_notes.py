"""The command that resumes a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.train import resume
from pycls_fast.train.resume import resume_notes as notes_of

TYPED = "-u tools/train_net.py --config-name vit_digits"


@pytest.mark.parametrize("python", ["python", ".venv/bin/python", "/opt/my python/bin/python3"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_interpreter_stays_as_typed_and_torchrun_takes_its_place(
    python: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "is_command", lambda: True)
    monkeypatch.setattr("sys.orig_argv", [python, *TYPED.split()])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    run: Any = SimpleNamespace(
        config=load_config("vit_digits"), folder=SimpleNamespace(path=Path("RUN")), world=SimpleNamespace(size=ranks)
    )
    quoted = f"'{python}'" if " " in python else python
    launcher = f"{quoted} -u" if ranks == 1 else "torchrun --nproc_per_node 4"
    assert notes_of(run) == [f"resume with: {launcher} {TYPED.removeprefix('-u ')} run_dir=RUN"]
