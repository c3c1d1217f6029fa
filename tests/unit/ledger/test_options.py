"""The keys of `pycls-fast ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.commands import measure
from pycls_fast.commands.measure import LedgerVerb
from pycls_fast.config import launch
from pycls_fast.config.keys import CONFIGS
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import run
from tests.factories import config_of


@pytest.mark.parametrize(
    ("ladder", "given", "expected"),
    [
        ("modern", {}, "cumulative"),
        ("apex", {}, "crossed"),
        ("modern", {"mode": "crossed"}, None),
        ("auto", {"switches": ("precision.amp_bf16",)}, "crossed"),
    ],
)
def test_a_ladder_may_bring_its_mode(
    ladder: str, given: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def instead(config: Any, ladder: Any, settings: Any, **_: Any) -> int:
        del config, ladder
        asked.append(settings.mode)
        return 0

    monkeypatch.setattr(run, "run_ladder", instead)
    monkeypatch.setattr(launch, "config_folders", lambda: [CONFIGS])
    monkeypatch.setattr(launch, "same_command", lambda **_: ([], []))
    monkeypatch.setattr(measure, "variant", lambda overrides, *_, **__: config_of(*overrides))
    assert LedgerVerb(ladder=ladder, **given)(config_of()) == 0
    assert asked == [expected or given["mode"]]


@pytest.mark.parametrize(("runs", "refused"), [(32, ["model.init"]), (0, [])])
def test_variants_are_checked_as_what_is_trained(
    runs: int, refused: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is trained, they are timed: LAMB's steps take the same time whatever the head begins with."""
    lines: list[str] = []

    def instead(*_: Any, compose: Any, **__: Any) -> int:
        try:
            assert compose(["optim=lamb"]).optim.name == "lamb"
        except UserError as error:
            lines.extend(error.lines)
        return 0

    monkeypatch.setattr(run, "run_ladder", instead)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ledger.py", "--config-name", "vit_digits", f"runs_at_most={runs}"])
    try:
        with pytest.raises(SystemExit) as stopped:
            launch.command_line(LedgerVerb)
    finally:
        GlobalHydra.instance().clear()
    assert stopped.value.code == 0
    assert [line.partition(":")[0] for line in lines] == refused


def test_a_question_whose_answer_is_no_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "config_folders", lambda: [CONFIGS])
    monkeypatch.setattr(measure, "variant", lambda overrides, *_, **__: config_of(*overrides))
    with pytest.raises(UserError, match="switches: the experiment has them already"):
        LedgerVerb(switches=("precision.fp32",))(config_of())
