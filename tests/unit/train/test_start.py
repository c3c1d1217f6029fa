"""What is told at the start of a run and on the terminal; what a run that goes on has to keep, and its command."""

from __future__ import annotations

import errno
import io
import os
import re
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pycls_fast import build
from pycls_fast.data.sampling import order_of
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.plan.race import Race
from pycls_fast.speed import Speed
from pycls_fast.train import resume, start
from pycls_fast.train.agreement import check_same_settings, check_same_switches
from pycls_fast.train.display import Display, plain_table, wide_console
from pycls_fast.train.resolving import as_saved
from pycls_fast.train.resume import _check_resumable, _print_changes
from pycls_fast.train.resume import resume_notes as notes_of
from pycls_fast.train.start import _notes
from tests.factories import config_of


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine both formats are equally fast."""
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", 1.0, None, 0.0))


def noted(*overrides: str) -> list[str]:
    """The notes of a run of 100 steps."""
    config = config_of(*overrides)
    run: Any = SimpleNamespace(
        config=config, total_steps=100, world=ALONE, switches=build.switches(config, ALONE.device),
        sources={"train": SyntheticImages(4, 8, 2, 0)},
    )  # fmt: skip
    return list(_notes(run))


def test_a_short_run_says_its_own_epochs() -> None:
    """Not those that schedule.max_steps cuts off."""
    parts = {"total_steps": 2, "start_step": 0, "steps_per_epoch": 4, "epoch": lambda step: step / 4}
    run: Any = SimpleNamespace(config=config_of(), world=ALONE, **parts)
    assert start._steps(run).endswith(" images (0.5 epochs of 4)")


@pytest.mark.parametrize(
    ("counts", "overrides", "is_told"),
    [
        ([40, 13], [], True), ([39, 13], [], False), ([3, 0], [], False),
        ([40, 13], ["data.sampling=balanced"], False), ([40, 13], ["loss.class_weights=auto"], False),
    ],
)  # fmt: skip
def test_classes_of_very_different_sizes_are_told(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], overrides: list[str], is_told: bool
) -> None:
    monkeypatch.setattr(SyntheticImages, "class_counts", lambda self: np.array(counts))
    notes = [note.partition(";")[0] for note in noted(*overrides)]
    assert notes == ["classes have 13 to 40 images"] * is_told


@pytest.mark.parametrize(("sets", "is_told"), [([[1, 0], [0, 1]], True), ([[1, 0], [1, 1]], False)])
def test_labels_that_were_not_separated_are_told(
    monkeypatch: pytest.MonkeyPatch, sets: list[list[int]], is_told: bool
) -> None:
    monkeypatch.setattr(SyntheticImages, "label_sets", np.array(sets, dtype=bool))
    notes = [note.partition(",")[0] for note in noted("data.sampling=balanced")]
    assert notes == ["data.label_separator: every image has exactly one label"] * is_told


@pytest.mark.parametrize(("ema", "said"), [(None, "about 115 min"), ("an average", "about 2.1 h")])
def test_the_time_is_that_of_steps_and_evaluations(monkeypatch: pytest.MonkeyPatch, ema: str | None, said: str) -> None:
    """100 steps of 64 images, and a third as long for each of 300 images in 5 evaluations."""
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", 1.0, None, 1.0))
    run: Any = SimpleNamespace(
        config=config_of("data.global_batch_size=64", "runtime.eval_every_epochs=1"), world=ALONE, start_step=10,
        total_steps=110, steps_per_epoch=20, step=SimpleNamespace(ema=ema), sources={"val": range(300)},
    )  # fmt: skip
    assert start._time(run) == said


@pytest.mark.parametrize(
    ("ratio", "overrides", "told"),
    [
        (3.0, ["precision=fp32"], "precision: a step takes 3 times as long as with precision=amp_bf16 on this CPU"),
        (0.025, ["precision=amp_bf16"], "precision: a step takes 40 times as long as with precision=fp32 on this CPU"),
        (1.9, ["precision=fp32"], None),
        (0.6, ["precision=bf16"], None),
        (1.0, ["precision=fp32", "speed.compile=model"], "speed.compile: the first step compiles"),
        (1.0, ["precision=fp8", "precision.fp8_emulate=true"], None),
        # 0.99 ** 100 is 0.366.
        (
            1.0,
            ["precision=fp32", "optim.ema_decay=0.99", "optim.ema_warmup=false"],
            "optim.ema_decay: after all 100 steps the initial weights are still 37% of the average",
        ),
        (1.0, ["precision=fp32", "optim.ema_decay=0.95", "optim.ema_warmup=false"], None),
        (1.0, ["precision=fp32", "optim.ema_decay=0.99"], None),
    ],
)
def test_notes(monkeypatch: pytest.MonkeyPatch, ratio: float, overrides: list[str], told: str | None) -> None:
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", ratio, None, 0.0))
    notes = noted(*overrides)
    assert len(notes) == (told is not None)
    assert told is None or notes[0].startswith(told)


class Failing(io.StringIO):
    """A terminal that is gone, or a file on a full disk."""

    def __init__(self, number: int, *, at: str) -> None:
        super().__init__()
        self.error = OSError(number, os.strerror(number))
        self.at = at

    def write(self, text: str) -> int:
        if self.at == "write":
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.at == "flush":
            raise self.error


@pytest.mark.parametrize("at", ["write", "flush"])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("mode", ["plain", "bar"])
def test_output_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str, number: int, at: str
) -> None:
    monkeypatch.setattr("sys.stdout", Failing(number, at=at))
    record = {"step": 1, "loss": 1.0, "lr": 0.1, "images_per_second": 1.0, "epoch": 0.1}
    with Display(speaks=True, mode=mode) as display:
        display.table("title", [("a", "b")])
        display.begin_training(0, 2)
        display.training(record, 2, epochs=1, seconds_left=1)
        display.advance(2)
        display.warn("text")
        display.note("text")
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: standard output failed ({os.strerror(number)}); nothing more is shown"


def test_square_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(speaks=True, mode="plain")
    display.table("[title]", [("run folder", "/data/[old]/:car:/x\\")])
    wide_console().print(plain_table([{"[images/s]": "optim.trainable=[head]"}]))
    out = capsys.readouterr().out
    for text in ("[title]", "/data/[old]/:car:/x\\", "optim.trainable=[head]", "[images/s]"):
        assert text in out


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_without_standard_output(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """As Python has it where a process was started with the descriptor closed."""
    monkeypatch.setattr("sys.stdout", None)
    with Display(speaks=True, mode=mode) as display:
        display.table("vit", [("steps", "7")])
        display.note("done")


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("total", [44, 1_234_567])
def test_a_bar_fits_the_terminal_and_leaves_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, total: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    record = {"step": 40, "loss": 1.2345, "lr": 0.1, "images_per_second": 12345.6, "epoch": 123.4}
    with ExitStack() as interrupted, Display(speaks=True, mode="bar") as display:
        display.begin_training(0, total, compiles=True)
        assert "compiling" in capsys.readouterr().out
        display.training(record, total, epochs=300, seconds_left=1)
        interrupted.enter_context(display.scoring("evaluating val", 50_000))
        said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
        display.note("run folder: here")
    rows = said.splitlines()
    evaluating = next(row for row in rows if "evaluating val" in row)
    assert " 0/50000 " in evaluating
    training = next(row for row in reversed(rows) if "epoch 123.4/300" in row)
    assert f"40/{total}" in training
    assert "loss 1.2345" in training
    assert ("lr 1.00e-01" in training) == (columns == "200")
    after = capsys.readouterr().out.rpartition("run folder: here")[2]
    # The bar is drawn once more and then erased, line by line.
    assert after.endswith("\x1b[1A\x1b[2K" * 2)


def test_scoring_is_told_of_without_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pycls_fast.train.display._PATIENCE", 0.0)
    with Display(speaks=True, mode="plain").scoring("features of train", 1_500) as advance:
        advance(1_000)
    assert capsys.readouterr().out == "features of train: 1,000 of 1,500 images\n"


@pytest.mark.parametrize(("key", "same"), [("weights", True), ("distill.teacher", True), ("seed", False)])
def test_only_paths_may_differ_between_nodes(key: str, same: bool) -> None:
    gathered: list[Any] = []
    world: Any = SimpleNamespace(gather=lambda value: gathered.append(value) or gathered)
    for value in (1, 2):
        config = config_of(f"{key}={'/node' if same else ''}{value}")
        with nullcontext() if same or not gathered else pytest.raises(UserError, match="seed: 2 on rank 1"):
            check_same_settings(config, world)


def test_a_node_without_the_fast_decoder_is_told() -> None:
    gathered: list[Any] = []
    world: Any = SimpleNamespace(gather=lambda value: gathered.append(value) or gathered)
    check_same_switches(Speed(decode="region"), world)
    with pytest.raises(UserError, match=r"speed\.decode: pillow on rank 1 .*, but region on rank 0 .*; install what"):
        check_same_switches(Speed(decode="pillow"), world)


@pytest.mark.parametrize(
    ("counts", "told"),
    [([3, 3], "2 classes, 3 of each"), ([120, 20, 60], "3 classes, most of a (120), fewest of b\xe9 (20)")],
)
def test_the_table_has_the_rarest_and_the_commonest_class(counts: list[int], told: str) -> None:
    source: Any = SimpleNamespace(class_counts=lambda: np.array(counts), classes=("a", "b\xe9", "c"))
    assert start._classes(source) == told


@pytest.mark.parametrize(
    ("drawn", "told"), [(True, "1,024, drawn at random"), (False, f"1,024, from {'/long' * 12}/data/test/cat/1.jpg on")]
)
def test_the_table_has_where_the_validation_images_are_from(
    monkeypatch: pytest.MonkeyPatch, drawn: bool, told: str
) -> None:
    val = Images()
    val.labels, val.drawn = np.zeros(1024, dtype=int), drawn
    monkeypatch.setattr(val, "name", lambda index: f"{'/long' * 20}/data/test/cat/1.jpg")
    assert start._validation(val) == told


@pytest.mark.parametrize(
    ("overrides", "called"),
    [
        (["model=deit_s16"], "deit_s16"),
        (["model=vit_s16", "model.drop_path=0.1", "data.image_size=224"], "vit_s16"),
        (["model.depth=3"], "vit"),
        (["model=timm", "model.name=convnext_tiny.fb_in22k"], "convnext_tiny.fb_in22k (timm)"),
    ],
)
def test_the_table_has_the_name_of_the_model(overrides: list[str], called: str) -> None:
    assert config_of(*overrides).model.called == called


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optim.lr=0.1", "optim.lr_batch_size=null", "optim.weight_decay=0"], "rate 0.1"),
        (["optim.lr=1e-3", "optim.lr_batch_size=1024", "data.global_batch_size=64"],
         "rate 6.25e-05 (optim.lr=0.001 is for 1024 images), weight decay"),
        (["optim.layer_decay=0.75", "optim.ema_decay=0.99"],
         ", 0.75 of it in each layer below, weight decay 0.05, moving average 0.99"),
    ],
)  # fmt: skip
def test_the_table_has_what_becomes_of_the_rate(overrides: list[str], told: str) -> None:
    said = start._optimizer(config_of("optim=adamw", "optim.weight_decay=0.05", *overrides))
    assert said.startswith("adamw, rate ")
    assert told in said


# A change of each.
MUST_STAY = (
    "seed=5", "model.heads=2", "data.global_batch_size=32", "data.image_size=8", "data.shuffle_buffer=8",
    "data.sampling=balanced", "data.split_seed=1", "data.folds=6", "data.fold=1", "augment.repeats=2", "optim=lamb",
    "optim.ema_decay=0.5", "optim.min_factored=16", "optim.trainable=[head]",
)  # fmt: skip


class Shards(Images):
    """Seven images behind a network."""

    prefers_blocks = True

    def __init__(self, *ends: int) -> None:
        self.block_ends = np.array(ends)
        self.labels = np.zeros(7, np.int32)


def go_on(
    *overrides: str,
    images: int = 7,
    source: Any = None,
    ranks: int = 2,
    order: str = "full",
    names: str = "names-1",
) -> list[str]:
    """What is noted when a run of Adafactor goes on with these overrides, now on so many images (or `source`) and
    ranks. The checkpoint is of 7 images and 2 ranks, of this `order` and these `names`, which are "names-1" now."""
    own = () if "optim=lamb" in overrides else ("optim=adafactor",)
    config = config_of(*own, "data.folds=5", *overrides)
    saved = config_of("optim=adafactor", "data.folds=5").model_dump(mode="json")
    said: list[str] = []
    run: Any = SimpleNamespace(
        config=config,
        sources={"train": SyntheticImages(images, 8, 2, 0) if source is None else source},
        world=SimpleNamespace(size=ranks),
        classes=("cat", "dog"),
        train_names="names-1",
        display=SimpleNamespace(note=said.append),
    )
    state = {"config": saved, "train_images": 7, "classes": ["cat", "dog"], "train_names": names, "order": order}
    _print_changes(run, _check_resumable(run, Path("step_000000003"), state), 2)
    return said


@pytest.mark.parametrize("override", MUST_STAY)
def test_what_must_stay(override: str) -> None:
    shards = Shards(3, 7)
    order, _ = order_of(shards, config_of().data)
    with pytest.raises(UserError) as caught:
        go_on(override, source=shards, order=order)
    keys = [line.partition(":")[0] for line in caught.value.lines]
    # Another optimizer has other keys, too.
    assert "optim.name" in keys if override == "optim=lamb" else keys == [override.partition("=")[0]]
    assert all("when step_000000003 was saved; set it back, or start again" in line for line in caught.value.lines)


def test_as_many_other_images() -> None:
    with pytest.raises(UserError, match=r"^data\.root: the 7 training images in 2 classes are not the 7 in 2 of"):
        go_on(names="names-2")
    # Equal; of a layout whose images have only numbers.
    for names in ("names-1", "numbers-2"):
        assert go_on(names=names) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optim.lr=0.25", "augment.hflip=0.125"], ["augment.hflip 0.0 -> 0.125", "optim.lr 0.002 -> 0.25"]),
        (
            ["parallel.compression=bf16", "speed.activation_compression=8bit"],
            ["parallel.compression none -> bf16", "speed.activation_compression null -> 8bit"],
        ),
        # What changes no result.
        (["run_dir=elsewhere", "runtime.threads=3", "parallel=ddp", "speed=reference", "schedule.max_steps=2"], []),
        (["resume=never"], []),
    ],
)
def test_what_changes_the_result_is_told(overrides: list[str], told: list[str]) -> None:
    assert go_on(*overrides, ranks=3) == [f"changed since the checkpoint: {each}" for each in (*told, "ranks 2 -> 3")]


@pytest.mark.slow
def test_the_order_depends_on_the_storage() -> None:
    config, shards = config_of(), Shards(3, 7)
    order, _ = order_of(shards, config.data)
    assert go_on(source=shards, order=order) == []
    assert go_on() == []
    for source in (Shards(4, 7), SyntheticImages(7, 8, 2, 0)):
        with pytest.raises(UserError, match=rf"^data\.shuffle: .* but {order} when .*; use the same shards"):
            go_on(source=source, order=order)
    with pytest.raises(UserError, match=r"^data\.shuffle: .* now, but full when .*; use data\.shuffle=full, or"):
        go_on(source=shards, order="full")
    assert go_on("data.shuffle=full", source=shards, order="full") == [
        "changed since the checkpoint: data.shuffle auto -> full"
    ]


def saved_by(ranks: int) -> Any:
    """A checkpoint of a batch of 48 in two microbatches on each rank."""
    given = ["data.root=/nowhere", "data.global_batch_size=48", "optim.accumulation_steps=2", "precision=fp32"]
    given += ["runtime.threads=1", "data.mean=[0.1,0.2,0.3]"]
    config = config_of(*given, name="finetune").model_dump(mode="json") | {"weights": "hf:me/cats@c0ffee"}
    return SimpleNamespace(plain={"config": config, "world_size": ranks})


@pytest.mark.parametrize(("given", "batch"), [("auto", 48), ("16", 16)])
def test_an_automatic_batch_stays_on_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, given: str, batch: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = config_of("data.root=/nowhere", f"data.global_batch_size={given}", name="finetune")
    config = config.model_copy(update={"weights": "hf:me/cats"})
    found = as_saved(config, ALONE, saved_by(1))
    assert found.weights == "hf:me/cats@c0ffee"
    assert (found.data.global_batch_size, found.precision.name, found.runtime.threads) == (batch, "fp32", 1)
    assert (found.data.normalization, found.data.mean) == ("configured", (0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("given", "ranks", "stages", "steps"),
    [
        *(("auto", 4, 1, 2), ("auto", 1, 1, 8), ("auto", 8, 1, 1), ("auto", 3, 1, 0), ("4", 1, 1, 4)),
        *(("auto", 8, 2, 2), ("auto", 16, 2, 0)),
    ],
)
def test_microbatches_keep_their_images_on_another_number_of_ranks(
    given: str, ranks: int, stages: int, steps: int
) -> None:
    config = config_of("data.root=/nowhere", f"optim.accumulation_steps={given}", name="finetune")
    world = World(rank=0, size=ranks, device=ALONE.device, pipeline=stages)
    # 0 is `auto`: 3 ranks cannot share 8 microbatches, nor two stages of 8 ranks one.
    assert as_saved(config, world, saved_by(4)).optim.accumulation_steps == steps


TYPED = "-u tools/train_net.py --config-name vit_digits"


@pytest.mark.parametrize("python", ["python", "/opt/my python/bin/python3"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("given", "added"), [("auto", ""), ("never", " resume=auto")])
def test_the_interpreter_stays_as_typed_and_torchrun_takes_its_place(
    python: str, ranks: int, given: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "is_command", lambda: True)
    monkeypatch.setattr("sys.orig_argv", [python, *TYPED.split()])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    folder, world = SimpleNamespace(path=Path("RUN")), SimpleNamespace(size=ranks)
    run: Any = SimpleNamespace(config=config_of(f"resume={given}"), folder=folder, world=world)
    quoted = f"'{python}'" if " " in python else python
    launcher = f"{quoted} -u" if ranks == 1 else "torchrun --nproc_per_node 4"
    assert notes_of(run) == [f"resume with: {launcher} {TYPED.removeprefix('-u ')} run_dir=RUN{added}"]
    monkeypatch.setattr(resume, "is_command", lambda: False)
    assert notes_of(run) == ["resume with: the same configuration, run_dir=RUN and resume=auto"]
