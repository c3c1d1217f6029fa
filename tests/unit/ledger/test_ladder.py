"""A ladder at work, with a stand-in for its processes: what goes on from where, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.config.ladder import Ladder, Mode, Rung, for_experiment, read_ladder
from pycls_fast.config.locations import CONFIGS
from pycls_fast.errors import UserError
from pycls_fast.ledger import conditions as condition
from pycls_fast.ledger import outcome
from pycls_fast.ledger import runner as at_work
from pycls_fast.ledger.charts import charts
from pycls_fast.ledger.conditions import changed, code_digest, conditions
from pycls_fast.ledger.folder import LedgerFolder, default_folder
from pycls_fast.ledger.lock import FolderLock
from pycls_fast.ledger.outcome import collect
from pycls_fast.ledger.page import page
from pycls_fast.ledger.plan import EVERYTHING, arms, pick
from pycls_fast.ledger.processes import Process, ProcessResult
from pycls_fast.ledger.run_ladder import refusal, run_ladder
from pycls_fast.ledger.runner import Ledger
from pycls_fast.ledger.settings import LadderSettings
from pycls_fast.ledger.table import markdown, rows
from pycls_fast.speed import CATALOGUE, SwitchName

LADDER = Ladder(
    description="two changes",
    baseline=Rung(name="base"),
    rungs=(Rung(name="B", overrides=("b=1",)), Rung(name="C", overrides=("c=1",))),
)
SETTINGS = {"seeds": 0, "rounds": 2, "numerics_steps": None, "gradients": False}
ARM = ("a=", "b=", "c=", "precision=")


class FakeProcess:
    """Writes what its tool would, or ends with the status and words that `broken` has for a part of its log's name."""

    broken: ClassVar[Mapping[str, tuple[int, str]]] = {}
    started: ClassVar[list[list[str]]] = []
    trees: ClassVar[list[tuple[object, Path]]] = []
    devices: ClassVar[list[object]] = []

    def __init__(
        self,
        tool: Path,
        arguments: list[str],
        *,
        ranks: int,
        log: Path,
        inherits: object = (),
        tree: object = None,
        devices: object = (),
    ) -> None:
        del ranks, inherits
        self.trees.append((tree, tool))
        self.devices.append(devices)
        self.started.append(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._status, said = next((end for part, end in self.broken.items() if part in log.name), (0, ""))
        log.write_text(said)
        if self._status == 0:
            given = dict(argument.partition("=")[::2] for argument in arguments)
            self._write(
                Path(given["output"]) if "output" in given else Path(given["run_dir"]) / "summary.json", arguments
            )

    def _write(self, file: Path, arguments: list[str]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        step = {"step_seconds_each": [[0.1, 0.1]], "images_per_step": 8, "images_per_second": 80.0}
        about = {
            "forward_flops_per_image": 1, "train_forward_flops_per_image": 1, "precision": "fp32", "switches": {},
            "device": "cpu", "model": "vit", "parameters": 9, "image_size": 8, "train_image_size": 8, "num_classes": 10,
            "data": "x", "global_batch_size": 8,
        }  # fmt: skip
        record = {
            "errors": [],
            "train": {**step, "step_seconds_p50": 0.1},
            "both": {**step, "step_seconds_p50": 0.125},
            "input_pipeline": {"images_per_second_per_core": 400.0},
            "steps_per_run": 9000,
            "evaluated_images_per_run": 1600,
            "memory_peak_bytes": None,
            "time": time.time(),
            **about,
        }
        file.write_text(json.dumps({**record, "arguments": arguments}))

    def finished(self) -> ProcessResult:
        return ProcessResult(self._status, 1.0, self._log)

    wait = finished

    def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    monkeypatch.setattr(at_work, "Process", FakeProcess)
    monkeypatch.setattr(FakeProcess, "broken", {})
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(FakeProcess, "trees", [])
    monkeypatch.setattr(FakeProcess, "devices", [])
    return FakeProcess


def start(
    folder: Path, ladder: Ladder = LADDER, *, device: str = "cpu", typed: Sequence[str] = (), **settings: Any
) -> Ledger:
    ledger = Ledger(
        ladder, LadderSettings(**{**SETTINGS, **settings}), ["--config-name", "x"], typed, device,
        LedgerFolder(folder, say=_no), Path("tools"), say=_no,
    )  # fmt: skip
    with closing(ledger):
        ledger.open()
        ledger.run()
    return ledger


def _no(text: str) -> None:
    del text


def composed(overrides: Sequence[str]) -> RunConfig:
    """An experiment that has no convolutions, and knows nothing of keys that the ladders here make up."""
    if "c=conv" in overrides:
        raise UserError("c: conv is for a ResNet; use c=1")
    return load_config("vit_digits")


def measured_with(file: Path) -> tuple[str, ...]:
    """The overrides of the arm that a file's process was given."""
    return tuple(a for a in json.loads(file.read_text())["arguments"] if a.startswith(ARM))


def assert_arms_are_what_was_measured(ledger: Ledger) -> None:
    found = 0
    for arm in ledger.selection.runnable():
        for number in range(ledger.settings.rounds):
            assert measured_with(ledger.folder.timing_file(arm, number)) == arm.overrides
            found += 1
        for seed in ledger.seeds():
            assert measured_with(ledger.folder.run_dir(arm, seed) / "summary.json") == arm.overrides
            found += 1
    assert found


def test_a_rung_that_was_mended_is_below_the_others_from_the_beginning(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    first = start(tmp_path, seeds=1)
    assert {arm.name: arm.overrides for arm in first.selection.runnable()} == {"base": (), "C": ("c=1",)}
    assert_arms_are_what_was_measured(first)
    fake.broken = {}
    fake.started.clear()
    second = start(tmp_path, seeds=1)
    assert {arm.name: arm.overrides for arm in second.selection.runnable()}["C"] == ("b=1", "c=1")
    assert_arms_are_what_was_measured(second)
    # Two rounds and a training of B and of C; the base's are there.
    assert len(fake.started) == 6


def test_rounds_of_different_starts_are_no_pairs(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """A machine's speed today is not that of the day on which the first rung was timed."""
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    start(tmp_path)
    fake.broken = {}
    second = collect(start(tmp_path), "x")
    missing = {"B: interval of the speed-up over 'base'", "C: interval of the speed-up over 'base'"}
    assert set(second["unmeasured"]) == missing
    timing = second["arms"][2]["timing"]
    assert (timing["speedup"]["ratio"], timing["speedup"]["low"], timing["speedup"]["rounds"]) == (1.0, None, 0)
    # B and C were timed by the same start.
    assert timing["speedup_before"]["low"] == pytest.approx(1.0)
    third = collect(start(tmp_path, rounds=4), "x")
    assert set(third["unmeasured"]) == {f"{name}: 2 of 4 rounds of the speed-up over 'base'" for name in "BC"}
    found = third["arms"][2]["timing"]["speedup"]
    assert (found["low"], found["rounds"]) == (pytest.approx(1.0), 2)
    assert [arm["timing"]["paired_rounds"] for arm in third["arms"]] == [[0, 1, 2, 3], [2, 3], [2, 3]]


def test_a_single_round_of_another_start_is_told(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    assert collect(start(tmp_path, rounds=1), "x")["unmeasured"] == {}
    fake.broken = {}
    record = collect(start(tmp_path, rounds=1), "x")
    missing = {"B: interval of the speed-up over 'base'", "C: interval of the speed-up over 'base'"}
    assert set(record["unmeasured"]) == missing
    # The first of them has two numbers as well, but B and C have a round of one start.
    assert [arm["timing"]["speedup_before"]["rounds"] for arm in record["arms"][1:]] == [0, 1]
    (chart,) = (chart for chart in charts(record) if chart.name == "throughput")
    assert chart.caption.endswith(" Rounds from different starts, not paired: B, C.")


def test_a_rung_has_the_size_of_its_training_images(tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Its steps are timed at that one, and evaluation may have another."""
    ledger = start(tmp_path)
    (first, *_) = collect(ledger, "x")["arms"]
    assert first["timing"]["image_size"] == 8
    for number in range(2):
        file = ledger.folder.timing_file(ledger.selection.arms()[0], number)
        record = json.loads(file.read_text())
        record["train"]["flops_per_second"] = 0.0
        file.write_text(json.dumps({**record, "train_image_size": 4, "train_forward_flops_per_image": 7}))
    timing = collect(ledger, "x")["arms"][0]["timing"]
    assert (timing["image_size"], timing["flops_per_second"]) == (4, pytest.approx(3 * 7 * 80))


def test_the_environment_is_of_no_arm(tmp_path: Path) -> None:
    """Each has its own ranks, and the device is that of the timings."""
    record = collect(start(tmp_path), "x")
    assert record["device"] == "cpu"
    assert not {"device", "world_size"} & set(record["environment"])


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_is_done(
    number: signal.Signals,
    tmp_path: Path,
    fake: type[FakeProcess],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished = fake.finished

    def interrupted(process: FakeProcess) -> ProcessResult:
        if len(fake.started) == 2:
            os.kill(os.getpid(), number)
        return finished(process)

    def stopped_again(process: FakeProcess) -> None:
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)
        stopped.append(process)

    stopped: list[FakeProcess] = []
    before = signal.getsignal(number)
    monkeypatch.setattr(fake, "finished", interrupted)
    monkeypatch.setattr(fake, "stop", stopped_again)
    assert work(tmp_path) == 3
    assert len(stopped) == 1
    assert signal.getsignal(number) == before
    assert "the same command resumes" in capsys.readouterr().out
    record = json.loads((tmp_path / "ledger.json").read_text())
    assert record["arms"][0]["timing"]["rounds"] == [80.0]
    assert record["unfinished"] == {"done": 2, "of": 6}
    assert "**unfinished: 2 of 6 measurements**" in (tmp_path / "ledger.md").read_text()
    assert "Unfinished: 2 of 6 measurements." in (tmp_path / "index.html").read_text()
    # Started again, the whole of it replaces this.
    monkeypatch.setattr(fake, "finished", finished)
    assert work(tmp_path) == 0
    assert "unfinished" not in (tmp_path / "ledger.md").read_text()


def work(folder: Path, **settings: Any) -> int:
    return run_ladder(
        load_config("vit_digits"), LADDER, LadderSettings(**{**SETTINGS, **settings}), switches=(), base=([], []),
        compose=composed, folder=folder, tools=Path("tools"), dry_run=False,
    )  # fmt: skip


def test_a_reference_that_fails_leaves_a_page(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {"timings-base-": (1, "error: no")}
    with pytest.raises(UserError, match="base"):
        work(tmp_path)
    assert "Unfinished: 0 of " in (tmp_path / "index.html").read_text()
    assert "unfinished: 0 of " in (tmp_path / "ledger.md").read_text()


def test_there_is_a_page_after_the_timings(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    write = fake._write

    def looking(process: FakeProcess, file: Path, arguments: list[str]) -> None:
        page = tmp_path / "ledger.md"
        seen.append([line for line in page.read_text().splitlines() if "unfinished" in line] if page.is_file() else [])
        write(process, file, arguments)

    monkeypatch.setattr(fake, "_write", looking)
    assert work(tmp_path, numerics_steps=2) == 0
    assert seen == [[]] * 6 + [["**unfinished: 6 of 9 measurements**"]] * 3


@pytest.mark.parametrize(("tracker", "typed"), [("wandb", ["a=1", "runtime.tracker=none"]), ("none", ["a=1"])])
def test_its_trainings_are_not_tracked(
    tracker: str, typed: list[str], tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tracker the key is left out: a rung may run an older checkout, which does not know it."""
    begun: list[Ledger] = []

    def begin(ledger: Ledger, name: str) -> None:
        begun.append(ledger)
        raise KeyboardInterrupt

    monkeypatch.setattr("pycls_fast.ledger.run_ladder._work", begin)
    run_ladder(
        load_config("vit_digits", [f"runtime.tracker={tracker}"]), LADDER, LadderSettings(**SETTINGS), switches=(),
        base=([], ["a=1"]), compose=composed, folder=tmp_path, tools=Path("tools"), dry_run=False,
    )  # fmt: skip
    assert [ledger.typed for ledger in begun] == [typed]


def test_a_rung_that_fails_later_fails_alone(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"timings-{_slug('B')}-round_1": (1, "RuntimeError: broken")}
    ledger = start(tmp_path, rounds=3, seeds=1)
    assert ledger.selection.failed == {"B": "RuntimeError: broken"}
    assert [arm.overrides for arm in ledger.selection.runnable()] == [(), ("b=1", "c=1")]
    assert_arms_are_what_was_measured(ledger)
    assert not ledger.folder.run_dir(ledger.selection.arms()[1], 0).exists()


def test_a_reference_that_fails_later_ends_the_work(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"timings-{_slug('base')}-round_1": (1, "RuntimeError: broken")}
    with pytest.raises(UserError, match="ladder: the reference 'base' does not run: RuntimeError"):
        start(tmp_path, rounds=3, seeds=2)
    # Three in the first round; in the second, which goes back, base is the last, and is tried once more.
    assert len(fake.started) == 7


def test_a_failure_after_the_first_round_may_be_chance(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took the memory, say."""
    finished = fake.finished
    ends: list[Path] = []

    def once(process: FakeProcess) -> ProcessResult:
        ends.append(process._log)
        if process._log.name == f"timings-{_slug('base')}-round_1.txt" and ends.count(process._log) == 1:
            return ProcessResult(1, 1.0, process._log)
        return finished(process)

    monkeypatch.setattr(fake, "finished", once)
    ledger = start(tmp_path, rounds=3)
    assert (ledger.selection.failed, len(fake.started)) == ({}, 10)
    assert ledger.total() == ledger.progress.done == 9


def test_without_the_references_training_no_other_one_starts(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"runs-{_slug('base')}-seed_0": (1, "RuntimeError: broken")}
    ledger = start(tmp_path, seeds=2)
    assert ledger.untrained == {"base": "seed 0: RuntimeError: broken"}
    assert sum(any(a.startswith("run_dir=") for a in arguments) for arguments in fake.started) == 1


@pytest.mark.slow
def test_a_report_without_the_references_training_is_no_success(
    tmp_path: Path, fake: type[FakeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.broken = {f"runs-{_slug('base')}-seed_0": (1, "RuntimeError: broken")}
    status = run_ladder(
        load_config("vit_digits"), LADDER, LadderSettings(**{**SETTINGS, "seeds": 2}), switches=(), base=([], []),
        compose=composed, folder=tmp_path, tools=Path("tools"), dry_run=False,
    )  # fmt: skip
    assert status == 1
    assert "nothing to compare with: no training is started without 'base'" in capsys.readouterr().out
    assert (tmp_path / "index.html").is_file()


def _slug(name: str) -> str:
    return next(arm.slug for arm in arms(LADDER, "cumulative") if arm.name == name)


def test_gradients_are_of_the_first_arm_as_it_is_now(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    first = start(tmp_path, mode="leave_one_out", gradients=True)
    assert measured_with(first.folder.gradients_file(first.selection.arms()[0])) == ("c=1", "precision=fp32")
    fake.broken = {}
    second = start(tmp_path, mode="leave_one_out", gradients=True)
    assert measured_with(second.folder.gradients_file(second.selection.arms()[0])) == ("b=1", "c=1", "precision=fp32")


def test_weights_are_of_the_trainings_alone(tmp_path: Path) -> None:
    """`time_net` refuses them, and an experiment that fine-tunes is refused without them."""
    given = "weights=timm:vit"
    ledger = start(tmp_path, typed=[given], seeds=1, numerics_steps=2, gradients=True)
    for arm in ledger.selection.runnable():
        for number in range(2):
            timed = json.loads(ledger.folder.timing_file(arm, number).read_text())["arguments"]
            assert [a for a in timed if a.startswith("weights=")] == ["weights=null"]
        for file in (
            ledger.folder.numerics_file(arm),
            ledger.folder.run_dir(arm, 0) / "summary.json",
            ledger.folder.gradients_file(ledger.selection.arms()[0]),
        ):
            assert given in json.loads(file.read_text())["arguments"]


@pytest.mark.parametrize("mode", ["cumulative", "leave_one_out"])
def test_alternatives_are_not_put_together(mode: Mode, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^mode: .* alternatives, which {mode} .*; use mode=one_at_a_time$"):
        run_ladder(
            load_config("vit_digits"), LADDER.model_copy(update={"mode": "one_at_a_time"}), LadderSettings(mode=mode),
            switches=(), base=([], []), compose=composed, folder=tmp_path / "report", tools=Path("tools"),
            dry_run=False,
        )  # fmt: skip
    assert not (tmp_path / "report").exists()


def test_weights_that_are_not_there_are_missed_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights: .*nowhere is neither a weights file"):
        run_ladder(
            load_config("vit_digits", [f"weights={tmp_path / 'nowhere'}"]), LADDER, LadderSettings(), switches=(),
            base=([], []), compose=composed, folder=tmp_path / "report", tools=Path("tools"), dry_run=False,
        )  # fmt: skip
    assert not (tmp_path / "report").exists()


def test_what_could_not_be_measured_is_on_record(tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.broken = {f"numerics-{_slug('B')}": (2, "error: parallel.x: no"), "gradients-": (1, "RuntimeError: g")}
    record = collect(start(tmp_path, gradients=True, numerics_steps=2), "x")
    assert record["unmeasured"] == {"B: rounding": "parallel.x: no", "gradients": "RuntimeError: g"}
    assert [arm["status"] for arm in record["arms"]] == ["measured"] * 3


SHIPPED = sorted((CONFIGS / "ladder").glob("*.yaml"))


def shipped(file: Path, mode: Mode, device: str, folder: Path, typed: Sequence[str] = ()) -> Ledger:
    ladder = for_experiment(read_ladder(file.stem, [CONFIGS]), load_config("vit_digits"))
    settings = LadderSettings(**{**SETTINGS, "mode": mode, "rounds": 1, "numerics_steps": 2, "gradients": True})
    return Ledger(ladder, settings, [], typed, device, LedgerFolder(folder, say=_no), Path("tools"), say=_no)


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_one_process_takes_nothing_of_the_strategies(file: Path, tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Rounding is measured by one process, whatever the arm, or the experiment, sets for several."""
    typed = [
        *("parallel=hsdp", "parallel.reshard_after_forward=false", "parallel.shard_degree=2"),
        *("parallel.prefetch_units=2", "parallel.powersgd_rank=4", "parallel.powersgd_start_step=8"),
    ]
    modes: dict[str, tuple[Mode, ...]] = {"parallel": ("one_at_a_time", "cumulative"), "switches": ("one_at_a_time",)}
    for mode in modes.get(file.stem, ("cumulative",)):
        ledger = shipped(file, mode, "cuda", tmp_path / mode, typed)
        ledger.run()
        measured = [each for each in fake.started if {"mode=numerics", "mode=gradients"} & set(each)]
        assert len(measured) == len(ledger.with_rounding()) + 1
        for arguments in measured:
            own = ("mode=", "steps=", "output=")
            config = load_config("vit_digits", [a for a in arguments if not a.startswith(own)])
            assert config.parallel.name == "single"
        fake.started.clear()


@pytest.mark.parametrize("mode", ["one_at_a_time", "cumulative"])
def test_what_one_process_cannot_have_is_no_rounding_of_its_own(
    mode: Mode, tmp_path: Path, fake: type[FakeProcess]
) -> None:
    """It would be the number of the rung without it."""
    rungs = (
        Rung(name="ddp", overrides=("parallel=ddp",), ranks=2),
        Rung(name="half the traffic", overrides=("parallel=ddp", "parallel.compression=fp16"), ranks=2),
        Rung(name="B", overrides=("b=1",), ranks=2),
        Rung(name="whole again", overrides=("parallel.compression=none",), ranks=2),
        Rung(name="C", overrides=("c=1",), ranks=2),
    )
    ledger = start(tmp_path, LADDER.model_copy(update={"rungs": rungs}), mode=mode, numerics_steps=2)
    measured = [each for each in fake.started if "mode=numerics" in each]
    assert len(measured) == 3
    record = collect(ledger, "x")
    found = [arm["name"] for arm in record["arms"] if arm["numerics"] is not None]
    # One on top of the other, B includes the compression, and the next one is the first with b=1 that has none.
    assert found == (["base", "B", "C"] if mode == "one_at_a_time" else ["base", "whole again", "C"])
    why = "one process measures it, which has no parallel settings"
    assert record["unmeasured"]["half the traffic: rounding"] == why
    assert len(record["unmeasured"]) == 6 - len(found)
    assert ledger.total() == ledger.progress.done


# What vit_digits cannot have on a CPU, beside what needs CUDA.
REFUSED = {"switches": {"convolution products"}}


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_is_left_of_a_ladder_on_a_cpu_runs_there(file: Path, tmp_path: Path) -> None:
    """What a dry run lists and counts; it starts none of the rungs."""
    cpu = torch.device("cpu")
    ledger = shipped(file, "one_at_a_time", "cpu", tmp_path)
    before = set(ledger.selection.impossible)
    ledger.selection.rule_out(lambda arm: refusal(arm, lambda overrides: load_config("vit_digits", overrides), cpu))
    assert set(ledger.selection.impossible) - before == REFUSED.get(file.stem, set())
    for arm in ledger.selection.runnable():
        config = load_config("vit_digits", arm.overrides)
        switches = build.switches(config, cpu)
        build.set_backend(config, cpu, switches)
        build.apply_precision(config, build.model(config, 10, switches), cpu)
        assert config.parallel.name != "fairscale_fsdp"


@pytest.mark.slow
def test_every_value_of_every_switch_is_a_rung_of_a_ladder_that_ships() -> None:
    """No switch exists unmeasured: the ledger can be asked for each by its name, and what it needs comes along."""
    (file,) = (file for file in SHIPPED if file.stem == "switches")
    ladder = read_ladder(file.stem, [CONFIGS])
    assert ladder.baseline.overrides == ("speed=reference",)
    expected = {f"{switch.name} {value}": (switch, value) for switch in CATALOGUE for value in switch.values[1:]}
    company = {rung.against for rung in ladder.rungs}
    assert [rung.name for rung in ladder.rungs if rung.name not in {*expected, *company}] == []
    assert [name for name in expected if name not in {rung.name for rung in ladder.rungs}] == []
    for rung in ladder.rungs:
        if rung.name not in expected:
            continue
        switch, value = expected[rung.name]
        needed = switch.requires.get(value)
        assert rung.overrides[0] == f"speed.{switch.name}={value}"
        if needed == "cuda":
            assert rung.needs == "cuda"
        experiment = "vit_digits" if "vit" in switch.applies_to else "resnet_digits"
        # The kernels that FlashAttention and cuDNN have are for 16 bits.
        half = ["precision=amp_bf16"] if value in ("sdpa_flash", "sdpa_cudnn") else []
        config = load_config(experiment, [*ladder.baseline.overrides, *half, *rung.overrides])
        device = torch.device("cpu" if needed == "cpu" else "cuda")
        assert build.switches(config, device)[switch.name] == value


def test_a_switch_is_one_change_away_from_what_it_is_compared_with() -> None:
    ladder = read_ladder("switches", [CONFIGS])
    found = {rung.name: dict(o.split("=") for o in rung.overrides) for rung in ladder.rungs}
    for rung in ladder.rungs:
        switch, value = rung.name.split()
        own, other = found[rung.name], {} if rung.against is None else found[rung.against]
        if value != "off":
            assert {key for key in {*own, *other} if own.get(key) != other.get(key)} == {f"speed.{switch}"}
        assert {rung.name, rung.against or rung.name} <= {picked.name for picked in pick(ladder, [switch]).rungs}
    assert [rung.name for rung in pick(ladder, ["decode_scale"]).rungs] == ["decode region", "decode_scale dct"]
    assert [rung.name for rung in pick(ladder, ["gelu"]).rungs] == ["gelu polynomial", "compile model"]
    assert [rung.name for rung in pick(ladder, ["mix_on"]).rungs] == ["mix_on device"]


def test_a_folder_goes_on_whatever_its_rungs_are_against(tmp_path: Path) -> None:
    start(tmp_path, mode="one_at_a_time")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert not [rung for rung in (plan["ladder"]["baseline"], *plan["ladder"]["rungs"]) if "against" in rung]
    b, c = LADDER.rungs
    against = LADDER.model_copy(update={"rungs": (b, c.model_copy(update={"against": "B"}))})
    record = collect(start(tmp_path, against, mode="one_at_a_time"), "x")
    assert [arm["before"] for arm in record["arms"]] == [None, "base", "B"]


def test_names_that_look_alike_in_paths_share_nothing(tmp_path: Path, fake: type[FakeProcess]) -> None:
    names = ("基线", "注意力", "wd+", "WD -", "w" * 300)
    base, *rungs = (Rung(name=name, overrides=() if i == 0 else (f"c={i}",)) for i, name in enumerate(names))
    ledger = start(tmp_path, Ladder(description="names", baseline=base, rungs=tuple(rungs)), mode="one_at_a_time")
    assert len(fake.started) == 10
    assert_arms_are_what_was_measured(ledger)


def test_what_is_compared_stays_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    before = conditions(load_config("vit_digits", ["optim.lr=0.001"]), "cpu")
    after = conditions(load_config("vit_digits", ["optim.lr=0.002", "schedule.epochs=7"]), "cpu")

    def opened(now: Mapping[str, Any]) -> None:
        place = LedgerFolder(folder, say=_no)
        ledger = Ledger(LADDER, LadderSettings(), [], [], "cpu", place, Path("tools"), say=_no, conditions=now)
        with closing(ledger):
            ledger.open()

    opened(before)
    opened(before)
    with pytest.raises(UserError) as caught:
        opened(after)
    refusal = f"output: {folder} holds a ledger with different {{}}; choose another folder, or remove it"
    assert caught.value.lines == (refusal.format("optim.lr, schedule.epochs"),)
    for key in ("device", "processor", "cores", "torch", "torchvision", "timm"):
        with pytest.raises(UserError) as caught:
            opened({**before, key: "?"})
        assert caught.value.lines == (refusal.format(key),)
    with pytest.raises(UserError, match=r"another config_name, model\.[a-z_, .]* more keys|[0-9]+ more keys; choose"):
        opened(conditions(load_config("resnet_digits"), "cpu"))


def test_a_folder_of_a_version_without_a_key_goes_on(tmp_path: Path) -> None:
    """The key had its default there."""

    def opened(now: Mapping[str, Any]) -> None:
        place = LedgerFolder(tmp_path, say=_no)
        ledger = Ledger(LADDER, LadderSettings(), [], [], "cpu", place, Path("tools"), say=_no, conditions=now)
        with closing(ledger):
            ledger.open()

    older = conditions(load_config("vit_digits"), "cpu")
    del older["experiment"]["model"]["init"]
    opened(older)
    with pytest.raises(UserError, match=r"holds a ledger with different model\.init; choose"):
        opened(conditions(load_config("vit_digits", ["model.init=trunc_normal"]), "cpu"))
    opened(conditions(load_config("vit_digits"), "cpu"))


def test_other_code_is_not_measured_into_the_same_folder(tmp_path: Path) -> None:
    """Else the old numbers would be reported as those of the new code."""

    def opened(code: str, *, accept: bool = False, rounds: int = 1) -> list[str]:
        said: list[str] = []
        place = LedgerFolder(tmp_path, say=said.append, code=lambda: code, accept_code=accept)
        settings = LadderSettings(**{**SETTINGS, "rounds": rounds})
        ledger = Ledger(LADDER, settings, [], [], "cpu", place, Path("tools"), say=said.append)
        with closing(ledger):
            ledger.open()
            ledger.run()
        said = [line for line in said if "timing" not in line]
        assert json.loads((tmp_path / "plan.json").read_text())["code"] == place.codes
        return [*place.codes, *said]

    assert opened("a") == opened("a") == ["a"]
    with pytest.raises(UserError) as caught:
        opened("b")
    way_out = "choose another folder, remove it, or add accept_code=true if the change does not affect the measurements"
    assert caught.value.lines == (f"output: {tmp_path} was measured with different code; {way_out}",)
    note = "the code differs from that of earlier measurements in this folder; the report says so"
    # Nothing is left to measure, so that all is still of the first.
    assert opened("b", accept=True) == ["a"]
    assert opened("b", accept=True, rounds=2) == ["a", "b", note]
    assert opened("a", rounds=2) == ["a", "b"]


def test_code_that_changes_under_way_is_in_the_report(tmp_path: Path, fake: type[FakeProcess]) -> None:
    place = LedgerFolder(tmp_path, say=_no, code=lambda: "old" if len(fake.started) < 3 else "new")
    ledger = Ledger(LADDER, LadderSettings(**SETTINGS), [], [], "cpu", place, Path("tools"), say=_no)
    with closing(ledger):
        ledger.open()
        ledger.run()
    record = collect(ledger, "x")
    assert record["code"] == ["old", "new"]
    record = {**record, "model": {"image_size": 8}}
    words = "easured with 2 states of the code, which need not be equally fast or accurate."
    assert words in markdown(record)
    assert words in page(record, [])
    assert "states of the code" not in markdown({**record, "code": ["old"]})


def test_the_code_is_that_of_the_package_the_tools_and_the_groups(tmp_path: Path) -> None:
    tools, configs = tmp_path / "tools", tmp_path / "configs"
    files = {
        name: tmp_path / name
        for name in ("tools/a.py", "configs/augment/own.yaml", "configs/mine.yaml", "configs/ladder/l.yaml")
    }
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x: 1")
    found = [code_digest(tools, [configs])]
    for file in files.values():
        file.write_text("x: 2")
        found.append(code_digest(tools, [configs]))
    assert [now != before for before, now in pairwise(found)] == [True, True, False, False]
    # A lock of an editor: a link to nothing.
    (tools / ".#a.py").symlink_to("nobody@nowhere")
    assert code_digest(tools, [configs]) == found[-1]


def test_the_package_is_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pycls_fast"
    for name in ("ledger/conditions.py", "data/native/region.c"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("a")
    monkeypatch.setattr(condition, "__file__", str(package / "ledger" / "conditions.py"))
    before = code_digest(tmp_path, [])
    (package / "data" / "native" / "region.c").write_text("b")
    assert code_digest(tmp_path, []) != before


def test_a_folder_is_that_of_the_rungs_that_were_picked() -> None:
    """The next one that is picked is measured beside it, not refused."""
    folders = [
        default_folder("vit_digits", "switches", "one_at_a_time", picked)
        for picked in ((), ("attention",), ("speed.optimizer", "bf16"), ("bf16", "speed.optimizer"), ("注",))
    ]
    every = "vit_digits-switches-one_at_a_time"
    names = [every, f"{every}-attention", *2 * [f"{every}-bf16_speed_optimizer"], f"{every}-arm"]
    assert [str(folder) for folder in folders] == [f"ledgers/{name}" for name in names]


def test_a_ledger_resumes_by_itself(tmp_path: Path) -> None:
    for resume in ("never", str(tmp_path)):
        with pytest.raises(UserError, match="resume: the trainings of a ledger resume by themselves; leave it out"):
            run_ladder(
                load_config("vit_digits", [f"resume={resume}"]), LADDER, LadderSettings(), switches=(), base=([], []),
                compose=composed, folder=tmp_path, tools=Path("tools"), dry_run=True,
            )  # fmt: skip


def make_checkout(folder: Path) -> None:
    for name in ("pycls_fast/__init__.py", *(f"tools/{tool}.py" for tool in ("time_net", "train_net", "ledger"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tree_that_is_not_a_checkout_is_refused_before_anything_is_measured(
    dry_run: bool, tmp_path: Path, fake: type[FakeProcess]
) -> None:
    for name in ("complete", "src layout/src", "older"):
        make_checkout(tmp_path / name)
    (tmp_path / "older" / "tools" / "ledger.py").unlink()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    every = "pycls_fast/__init__.py, tools/time_net.py, tools/train_net.py, tools/ledger.py"
    reasons = {
        "missing": f"there is no folder {tmp_path / 'missing'}",
        "file": f"there is no folder {tmp_path / 'file'}",
        "empty": f"{tmp_path / 'empty'} is not a checkout of pycls_fast (it has no {every})",
        "src layout": f"{tmp_path / 'src layout'} is not a checkout of pycls_fast (it has no {every})",
        "older": f"{tmp_path / 'older'} is not a checkout of pycls_fast (it has no tools/ledger.py)",
    }
    rungs = tuple(Rung(name=name, tree=str(tmp_path / name)) for name in ("complete", *reasons))
    with pytest.raises(UserError) as caught:
        run_ladder(
            load_config("vit_digits"), LADDER.model_copy(update={"rungs": rungs}),
            LadderSettings(**{**SETTINGS, "mode": "one_at_a_time"}), switches=(), base=([], []), compose=composed,
            folder=tmp_path / "report", tools=Path("tools"), dry_run=dry_run,
        )  # fmt: skip
    way_out = "give the folder of a checkout as its tree"
    assert caught.value.lines == tuple(f"ladder: '{name}': {why}; {way_out}" for name, why in reasons.items())
    assert not fake.started
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_a_rung_runs_the_code_of_its_checkout(
    tmp_path: Path, fake: type[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # This code refuses the override of the rung; the other checkout may have it.
    rungs = (Rung(name="old", tree="old", overrides=("c=conv",)), Rung(name="new"))
    ladder = LADDER.model_copy(update={"rungs": rungs, "mode": "one_at_a_time"})

    def run(mode: Mode = "one_at_a_time", ladder: Ladder = ladder) -> int:
        return run_ladder(
            load_config("vit_digits"), ladder, LadderSettings(**{**SETTINGS, "rounds": 1, "mode": mode}), switches=(),
            base=([], []), compose=composed, folder=tmp_path / "report", tools=Path("tools"), dry_run=False,
        )  # fmt: skip

    make_checkout(tmp_path / "old")
    assert run() == 0
    theirs = (tmp_path / "old", tmp_path / "old" / "tools" / "time_net.py")
    assert fake.trees == [(None, Path("tools/time_net.py")), theirs, (None, Path("tools/time_net.py"))]
    record = json.loads((tmp_path / "report" / "ledger.json").read_text())
    assert [(arm["tree"], arm["note"]) for arm in record["arms"]] == [
        (None, ""),
        ("old", "the code in old"),
        (None, ""),
    ]
    state = {"commit": "0123456789abcdef", "changed": True}
    monkeypatch.setattr(outcome, "git_state", {tmp_path / "old": state}.get)
    assert run() == 0
    record = json.loads((tmp_path / "report" / "ledger.json").read_text())
    assert [arm["git"] for arm in record["arms"]] == [None, state, None]
    assert record["arms"][1]["note"] == "the code in old (commit 0123456789, changed)"
    (tmp_path / "old" / "pycls_fast" / "__init__.py").write_text("# changed")
    with pytest.raises(UserError, match="was measured with different code"):
        run()
    with pytest.raises(UserError, match=r"mode: 'old' runs other code, .* use mode=one_at_a_time"):
        run("cumulative", ladder.model_copy(update={"mode": None}))


def test_a_plan_with_a_key_that_is_gone_is_another(tmp_path: Path) -> None:
    now = conditions(load_config("vit_digits"), "cpu")
    assert changed({**now, "experiment": {**now["experiment"], "speedy": 1}}, now) == ["speedy"]


def test_leave_one_out_shows_what_cannot_run(tmp_path: Path, fake: type[FakeProcess]) -> None:
    ladder = LADDER.model_copy(update={"rungs": (*LADDER.rungs, Rung(name="G", overrides=("c=3",), needs="cuda"))})
    fake.broken = {"timings-b-": (2, "error: b needs a package")}
    ledger = start(tmp_path, ladder, mode="leave_one_out")
    table = {row["rung"]: row for row in rows(collect(ledger, "x"))}
    assert list(table) == [EVERYTHING, "B", "without C", "G"]
    assert (table["B"]["against the first"], table["G"]["against the first"]) == ("cannot run here", "needs CUDA")
    assert not [started for started in fake.started if "c=3" in started]
    assert_arms_are_what_was_measured(ledger)


def test_leave_one_out_does_not_run_the_same_twice(tmp_path: Path, fake: type[FakeProcess]) -> None:
    rungs = (Rung(name="B", overrides=("b=1",)), Rung(name="C", overrides=("c=1",)), Rung(name="D", overrides=("b=2",)))
    ledger = start(tmp_path, LADDER.model_copy(update={"rungs": rungs}), mode="leave_one_out")
    assert [arm.name for arm in ledger.selection.runnable()] == [EVERYTHING, "without C", "without D"]
    record = collect(ledger, "x")["arms"][1]
    why = "B is overridden by D: the same settings as 'everything'"
    assert (record["name"], record["status"], record["reason"]) == ("without B", "overridden", why)
    assert not record["timing"]
    # Three rungs alone, and two rounds of three arms.
    assert len(fake.started) == 9
    assert ledger.total() == ledger.progress.done == 9


def test_a_baseline_for_another_device(tmp_path: Path) -> None:
    ladder = LADDER.model_copy(update={"baseline": Rung(name="base", needs="cuda")})
    with pytest.raises(UserError, match="ladder: the baseline 'base' needs CUDA"):
        start(tmp_path, ladder)


def test_the_modern_ladder_ends_with_the_fast_step() -> None:
    """On CUDA, where the switches are that a step is timed with (images are prepared by the loader)."""
    ladder, cuda = read_ladder("modern", [CONFIGS]), torch.device("cuda")
    overrides = [text for rung in (ladder.baseline, *ladder.rungs) for text in rung.overrides]
    last = build.switches(load_config("vit_digits", overrides), cuda)
    fast = build.switches(load_config("vit_digits", ["speed=fast", "precision=fp8"]), cuda)
    loading = {name for name in fast if name.endswith("_on")} | {SwitchName.DECODE, SwitchName.INPUT_COPY}
    # What the ladder adds: the preset has recomputation off, and the experiment compilation.
    added = {SwitchName.COMPILE, SwitchName.RECOMPUTE}
    assert {name for name in fast if last[name] != fast[name]} - loading == added


def test_the_cpu_ladder_ends_with_the_fast_step() -> None:
    """For a ViT, without the switches that a step is not timed with (images are prepared by the loader)."""
    ladder, cpu = read_ladder("cpu", [CONFIGS]), torch.device("cpu")
    overrides = [text for rung in (ladder.baseline, *ladder.rungs) for text in rung.overrides]
    last = build.switches(load_config("vit_s16", ["data.root=unread", *overrides]), cpu)
    fast = build.switches(load_config("vit_s16", ["data.root=unread", "speed=fast", "precision=amp_bf16"]), cpu)
    different = {
        switch.name for switch in CATALOGUE if "vit" in switch.applies_to and last[switch.name] != fast[switch.name]
    }
    assert different == {name for name in fast if name.endswith("_on")} | {SwitchName.DECODE}


def test_one_ledger_at_a_time(tmp_path: Path) -> None:
    def made() -> Ledger:
        return Ledger(LADDER, LadderSettings(), [], [], "cpu", LedgerFolder(tmp_path, say=_no), Path("tools"), say=_no)

    with closing(made()) as first:
        first.open()
        with closing(made()) as second, pytest.raises(UserError) as caught:
            second.open()
        assert f"process {os.getpid()} on " in caught.value.lines[0]
    with closing(made()) as third:
        third.open()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with closing(LedgerFolder(tmp_path, say=said.append)) as folder:
        folder.open({})
    assert said == [f"{tmp_path} cannot be locked (Function not implemented): do not start a second ledger in it"]


def test_a_process_that_is_left_behind_is_waited_for(tmp_path: Path) -> None:
    tool = tmp_path / "tool.py"
    tool.write_text("import sys, time\ntime.sleep(0.5)\nopen(sys.argv[1], 'w').close()\n")
    ended = tmp_path / "ended"
    said: list[str] = []
    first = FolderLock(tmp_path, said.append)
    process = Process(tool, [str(ended)], ranks=1, log=tmp_path / "log.txt", inherits=(first.inherited,))
    first.release()
    assert not said
    second = FolderLock(tmp_path, said.append)
    assert ended.exists()
    assert said == [f"{tmp_path}: waiting for a process of an earlier start, which was killed, to end"]
    second.release()
    assert process.wait().status == 0


def dry_run(tmp_path: Path, ladder: Ladder, capsys: pytest.CaptureFixture[str], **settings: Any) -> list[str]:
    status = run_ladder(
        load_config("vit_digits"), ladder, LadderSettings(**{**SETTINGS, **settings}), switches=(), base=([], []),
        compose=composed, folder=tmp_path / "report", tools=Path("tools"), dry_run=True,
    )  # fmt: skip
    assert status == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cumulative", "one_at_a_time", "leave_one_out"])
def test_a_dry_run_counts_what_can_run(
    mode: str,
    tmp_path: Path,
    fake: type[FakeProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = Rung(name="G", overrides=("c=3",), needs="cuda")
    fake.broken = {"c-": (2, "error: c needs a package")}
    with_more = dry_run(
        tmp_path, LADDER.model_copy(update={"rungs": (*LADDER.rungs, elsewhere)}), capsys, mode=mode, seeds=1
    )
    assert "G: not run, needs CUDA" in with_more
    assert not [started for started in fake.started if "c=3" in started]
    without = dry_run(tmp_path, LADDER, capsys, mode=mode, seeds=1)
    assert with_more[-4:] == without[-4:]
    assert ("C: not run, c needs a package" in without) == (mode == "leave_one_out")


@pytest.mark.slow
def test_a_dry_run_leaves_out_what_its_folder_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And refuses the folder if the work itself would."""
    settings = {**SETTINGS, "rounds": 30, "seconds": 0.0}

    def run(*typed: str, dry_run: bool) -> list[str]:
        run_ladder(
            load_config("vit_digits", typed), LADDER, LadderSettings(**settings), switches=(), base=([], []),
            compose=composed, folder=tmp_path / "report", tools=Path("tools"), dry_run=dry_run,
        )  # fmt: skip
        return [line for line in capsys.readouterr().out.splitlines() if "about" in line and "left" not in line]

    # 90 timings of 0.7 s and 15 steps of 0.1 s.
    assert [line.partition(" if ")[0] for line in run(dry_run=True)] == ["timings: about 3 min", "in total about 3 min"]
    run(dry_run=False)
    (said,) = run(dry_run=True)
    assert said.startswith(
        "in total about 0 min if every rung is as fast as the first (100 ms a step, 9,000 steps a run)"
    )
    assert said.endswith(f"; what {tmp_path / 'report'} already has is not counted")
    with pytest.raises(UserError, match=r"holds a ledger with different optim\.lr; choose"):
        run("optim.lr=0.5", dry_run=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cumulative", "one_at_a_time"])
def test_a_dry_run_rules_out_what_the_experiment_cannot_have(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    convolution = Rung(name="K", overrides=("c=conv",))
    rungs = (LADDER.rungs[0], convolution, LADDER.rungs[1])
    said = dry_run(tmp_path, LADDER.model_copy(update={"rungs": rungs}), capsys, mode=mode, seeds=1)
    assert "K: not run, c: conv is for a ResNet; use c=1" in said
    # It is below no other, and counts for nothing.
    assert ("C: b=1 c=1" if mode == "cumulative" else "C: c=1") in said
    assert said[-4:] == dry_run(tmp_path, LADDER, capsys, mode=mode, seeds=1)[-4:]


def trainable(overrides: Sequence[str]) -> RunConfig:
    """An experiment whose training does not go with b=lamb."""
    if "b=lamb" in overrides:
        raise UserError("b: lamb leaves the head at zero; use b=1")
    return load_config("vit_digits")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cumulative", "one_at_a_time", "leave_one_out"])
def test_what_training_would_refuse_is_not_timed(
    mode: Mode,
    tmp_path: Path,
    fake: type[FakeProcess],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the dry run and in the ledger itself, alike; it is below no other rung."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ladder = LADDER.model_copy(update={"rungs": (Rung(name="B", overrides=("b=lamb",)), LADDER.rungs[1])})
    why = "b: lamb leaves the head at zero; use b=1"
    done: list[Any] = []
    for dry_run in (True, False):
        run_ladder(
            load_config("vit_digits"), ladder, LadderSettings(**{**SETTINGS, "mode": mode}), switches=(), base=([], []),
            compose=trainable, folder=tmp_path, tools=Path("tools"), dry_run=dry_run,
        )  # fmt: skip
        done.append(capsys.readouterr().out.splitlines())
    assert f"B: not run, {why}" in done[0]
    assert f"B: cannot run: {why}" in done[1]
    assert not [started for started in fake.started if "b=lamb" in started]
    # The pieces of work that are announced are those that there are.
    counts = [line.partition(" s  (")[2].partition(",")[0] for line in done[1] if " s  (" in line]
    assert counts == [f"{i + 1} of {len(counts)}" for i in range(len(counts))]
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "ledger.json").read_text())["arms"]}
    assert (arms["B"]["status"], arms["B"]["reason"], arms["B"]["timing"]) == ("cannot run", why, None)
    last = arms["without C" if mode == "leave_one_out" else "C"]
    assert (last["status"], "b=lamb" in last["overrides"]) == ("measured", False)


def test_a_rung_for_the_cpu_is_checked_there() -> None:
    rung = Rung(name="B", overrides=("runtime.device=cpu", "speed.allocator=keep"))
    arm = arms(LADDER.model_copy(update={"rungs": (rung,)}), "cumulative")[1]
    cuda = torch.device("cuda")
    assert refusal(arm, lambda overrides: load_config("vit_digits", overrides), cuda) is None
    assert "keep needs CPU" in str(refusal(arm, lambda overrides: load_config("vit_digits", overrides[1:]), cuda))


def test_a_reference_that_cannot_be_trained_is_not_timed(tmp_path: Path, fake: type[FakeProcess]) -> None:
    ladder = LADDER.model_copy(update={"baseline": Rung(name="base", overrides=("b=lamb",))})
    for dry_run in (True, False):
        with pytest.raises(UserError, match="ladder: the reference 'base' does not run: b: lamb"):
            run_ladder(
                load_config("vit_digits"), ladder, LadderSettings(**SETTINGS), switches=(), base=([], []),
                compose=trainable, folder=tmp_path / "report", tools=Path("tools"), dry_run=dry_run,
            )  # fmt: skip
    assert not fake.started
    assert not (tmp_path / "report").exists()
