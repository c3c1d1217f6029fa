"""The files of a run folder, after accidents as well, and those that tools write."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.files import atomic_write
from pycls_fast.ledger.measure.numerics import count_gradients, measure_numerics
from pycls_fast.train.folder import RunFolder, choose_run_dir, output_file, write_json
from pycls_fast.train.saved_weights import Weights
from pycls_fast.train.tasks import score as scoring
from pycls_fast.train.tasks.lr_range import lr_range_test
from pycls_fast.train.tasks.score import score, score_neighbours
from tests.factories import TRAINED, config_of


def test_values_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, loss=math.nan, grad_norm=math.inf, lr=0.1)
    (line,) = folder.metrics.read_text().splitlines()
    folder.write_json("summary.json", {"loss": math.nan, "grad_norm": -math.inf, "lr": 0.1})
    for text in (line, (tmp_path / "summary.json").read_text()):
        record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (record["loss"], record["grad_norm"], record["lr"]) == (None, None, 0.1)


def test_damaged_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that a kill has cut off is left out, and one before the end told, too."""
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, **TRAINED)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    assert [record["step"] for record in folder.records()] == [1]
    folder.drop_records_after(1)
    assert capsys.readouterr().err == ""
    with folder.metrics.open("a") as file:
        file.write('{"kind": "tr\n')
    folder.add_record("train", 2, 1.0, **TRAINED)
    folder.drop_records_after(2)
    assert "metrics.jsonl: dropped 1 damaged line\n" in capsys.readouterr().err
    assert [record["step"] for record in folder.records()] == [1, 2]


def test_what_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    """The curves and the exported weights that were being written; not what a link leads to, nor other files."""
    (run := tmp_path / "run").mkdir()
    (run / ".curves.png.0a1b2c3d.tmp").touch()
    (run / ".exportab12cd34").mkdir()
    (run / ".exportab12cd34" / "weights").touch()
    (run / ".my.tmp").touch()
    (tmp_path / "other").mkdir()
    (run / ".exportab12cd35").symlink_to("../other")
    with RunFolder(run) as folder:
        folder.lock()
        assert sorted(path.name for path in run.iterdir()) == [".lock", ".my.tmp"]
    assert (tmp_path / "other").is_dir()


def test_forgets_steps_that_are_done_again_but_not_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.add_record("train", step, step / 2, **TRAINED)
    folder.add_record("event", 3, 1.5, event="stopped")
    assert folder.drop_records_after(2) == 1
    assert [(r["kind"], r["step"]) for r in folder.records()] == [("train", 1), ("train", 2), ("event", 3)]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    folder, line = RunFolder(tmp_path), r"^run_dir: .*{} cannot be written \(File too large\); fix this, then the same"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UserError, match=line.format("metrics.jsonl")):
            folder.add_record("train", 1, 0.5, loss=1.0)
        with pytest.raises(UserError, match=line.format("summary.json")):
            folder.write_json("summary.json", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_run_with_a_damaged_summary_is_not_finished(tmp_path: Path) -> None:
    for text in ("", "[]", "3", "[" * 60 + "]" * 60):
        (tmp_path / "summary.json").write_text(text)
        assert not RunFolder(tmp_path).finished


def test_links_in_the_folder_are_not_followed_when_writing(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("as before")
    for name in (".lock", "metrics.jsonl"):
        run = tmp_path / f"run{name}"
        run.mkdir()
        (run / name).symlink_to(victim)
        with suppress(UserError), RunFolder(run) as folder:
            folder.lock()
            folder.add_record("event", 1, 0.5, event="stopped")
        assert victim.read_text() == "as before"


_HOLD = """
import sys
from pathlib import Path
from pycls_fast.train.folder import RunFolder

with (folder := RunFolder(Path(sys.argv[1]))):
    try:
        print(folder.lock(wait_seconds=0.0), flush=True)
    except Exception as error:
        print(error, flush=True)
    sys.stdin.readline()
"""


def _hold(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_one_run_at_a_time(tmp_path: Path) -> None:
    """The next one waits for who leaves, and nothing is left of a killed one."""
    with _hold(tmp_path) as first:
        assert first.stdout.readline() == "None\n"
        folder = RunFolder(tmp_path)
        with pytest.raises(UserError, match=rf"is in use by process {first.pid} on {platform.node()}; wait for it"):
            folder.lock(wait_seconds=0.0)
        threading.Timer(0.3, first.kill).start()
        folder.lock(wait_seconds=60.0)
        with _hold(tmp_path) as second:
            assert f"process {os.getpid()} on" in second.stdout.readline()
            second.communicate("\n", timeout=60)
        with folder:
            pass
    assert list(tmp_path.iterdir()) == []


TOOLS: dict[str, Callable[[RunConfig, str], int]] = {
    "score": lambda config, output: score(config, "val", output),
    "knn": lambda config, output: score_neighbours(config, k=1, temperature=1.0, split="val", output=output),
    "lr_find": lambda config, output: lr_range_test(config, steps=2, lr_min=0.1, lr_max=1.0, output=output),
    "numerics": lambda config, output: measure_numerics(config, steps=1, output=output),
    "gradients": lambda config, output: count_gradients(config, steps=1, warmup_steps=0, loss_scale=1.0, output=output),
}


def test_equal_runs_of_a_launch_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sweep over a seed that is listed twice; ranks that torchrun starts again find the folders again."""
    store, config = dist.HashStore(), config_of()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("pycls_fast.parallel.rendezvous.connect", lambda: store)
    monkeypatch.chdir(tmp_path)
    processes = []
    for _ in range(2):
        monkeypatch.setattr("pycls_fast.parallel.rendezvous._asked", Counter())
        processes.append([choose_run_dir(config, "") for _ in range(2)])
    (first, second), again = processes
    assert first[0] != second[0]
    assert [restarted for _, restarted in (first, second, *again)] == [False, False, True, True]
    assert [path for path, _ in again] == [first[0], second[0]]


def test_folders_are_made_and_nothing_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = output_file("~/new/folder/a.json")
    assert file == tmp_path / "new/folder/a.json"
    assert not list(file.parent.iterdir())
    name = os.fsdecode(b"caf\xe9")
    write_json(file, {"name": name, "class": "caf\u00e9"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"name": name, "class": "caf\u00e9"}
    assert list(file.parent.iterdir()) == [file]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^output: .* cannot be written \(it is a folder\); give another path$"):
        output_file(tmp_path)
    with pytest.raises(UserError, match=r"^output: .*file/a.json cannot be written \(.*\); give another path$"):
        output_file(tmp_path / "file/a.json")
    for length in (255, 300):
        with pytest.raises(UserError, match=r"cannot be written \(File name too long\); give another path$"):
            output_file(tmp_path / ("a" * length))
    file = output_file(tmp_path / "a.json")
    file.mkdir()
    with pytest.raises(UserError, match=r"^output: .*a.json could not be written \(Is a directory\)$"):
        write_json(file, {})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "there" / "a.json"
    link.symlink_to("there/a.json")
    for number in (1, 2):
        write_json(output_file(link), {"number": number})
        assert link.is_symlink()
        assert json.loads(target.read_text()) == {"number": number}
    assert not target.is_symlink()


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(UnicodeEncodeError), atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("half\ud800", encoding="utf-8")
    assert (tmp_path / "a").read_text() == "before"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.mark.parametrize("tool", TOOLS)
def test_told_before_the_work(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "sources", Mock(side_effect=AssertionError("too late")))
    monkeypatch.setattr(scoring, "open_weights", lambda *_, **__: Weights(tmp_path))
    (tmp_path / "file").touch()
    config = config_of(f"weights={tmp_path}", "runtime.device=cpu")
    run = partial(TOOLS[tool], config)
    with pytest.raises(UserError, match=r"^output: .* cannot be written \(.*\); give another path$"):
        run(str(tmp_path / "file/a.json"))
    with pytest.raises(AssertionError, match="too late"):
        run(str(tmp_path / "new/a.json"))
