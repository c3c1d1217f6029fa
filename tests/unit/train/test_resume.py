"""What a run that goes on has to keep of the one that saved, what it says of the rest, and the command that resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pycls_fast.data.sampling import order_of
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.train import resume
from pycls_fast.train.resolving import as_saved
from pycls_fast.train.resume import _check_resumable, _print_changes
from pycls_fast.train.resume import resume_notes as notes_of
from tests.factories import config_of

# A change of each, and the key that the line begins with.
CHANGES = {
    "seed": ("seed=5", "seed"),
    "model": ("model.heads=2", "model.heads"),
    "data.global_batch_size": ("data.global_batch_size=32", "data.global_batch_size"),
    "data.image_size": ("data.image_size=8", "data.image_size"),
    "data.shuffle_buffer": ("data.shuffle_buffer=8", "data.shuffle_buffer"),
    "data.sampling": ("data.sampling=balanced", "data.sampling"),
    "data.split_seed": ("data.split_seed=1", "data.split_seed"),
    "data.folds": ("data.folds=6", "data.folds"),
    "data.fold": ("data.fold=1", "data.fold"),
    "augment.repeats": ("augment.repeats=2", "augment.repeats"),
    "optim.name": ("optim=lamb", "optim.name"),
    "optim.ema_decay": ("optim.ema_decay=0.5", "optim.ema_decay"),
    "optim.min_factored": ("optim.min_factored=16", "optim.min_factored"),
    "optim.trainable": ("optim.trainable=[head]", "optim.trainable"),
}


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
    changed: tuple[str, Any] | None = None,
) -> list[str]:
    """What is noted when a run of Adafactor goes on with these overrides.

    Args:
        images: in the training split now; the checkpoint is of 7.
        source: the training split, instead of these.
        ranks: now; the checkpoint is of 2.
        order: of the images, in the checkpoint.
        names: of the images, in the checkpoint; now they are "names-1".
        changed: one more setting of now, which nothing has checked.
    """
    own = () if "optim=lamb" in overrides else ("optim=adafactor",)
    config = config_of(*own, "data.folds=5", *overrides)
    saved = config_of("optim=adafactor", "data.folds=5").model_dump(mode="json")
    if changed is not None:
        (section, _, key), value = changed[0].partition("."), changed[1]
        config = config.with_values(**{section: {key: value}})
    said: list[str] = []
    run: Any = SimpleNamespace(
        config=config,
        parts=SimpleNamespace(sources={"train": SyntheticImages(images, 8, 2, 0) if source is None else source}),
        world=SimpleNamespace(size=ranks),
        classes=("cat", "dog"),
        train_names="names-1",
        display=SimpleNamespace(note=said.append),
    )
    state = {"config": saved, "train_images": 7, "classes": ["cat", "dog"], "train_names": names, "order": order}
    _print_changes(run, _check_resumable(run, Path("step_000000003"), state), 2)
    return said


@pytest.mark.parametrize("name", CHANGES)
def test_what_must_stay(name: str) -> None:
    override, key = CHANGES[name]
    shards = Shards(3, 7)
    order, _ = order_of(shards, config_of().data)
    with pytest.raises(UserError) as caught:
        go_on(override, source=shards, order=order)
    keys = [line.partition(":")[0] for line in caught.value.lines]
    # Another optimizer has other keys, too.
    assert key in keys if name == "optim.name" else keys == [key]
    assert all("when step_000000003 was saved; set it back, or start again" in line for line in caught.value.lines)


def test_a_buffer_that_nothing_reads_may_differ() -> None:
    assert go_on("data.shuffle_buffer=8") == ["changed since the checkpoint: data.shuffle_buffer 16384 -> 8"]


def test_as_many_other_images() -> None:
    with pytest.raises(
        UserError, match=r"^data\.root: the 7 training images in 2 classes are not the 7 in 2 of when step_000000003"
    ):
        go_on(names="names-2")
    # Equal; of a layout whose images have only numbers.
    for names in ("names-1", "numbers-2"):
        assert go_on(names=names) == []


def test_what_changes_the_result_is_told() -> None:
    said = go_on("optim.lr=0.25", "augment.hflip=0.125")
    assert [(line.partition(": ")[0], line.split()[4], line.split()[-1]) for line in said] == [
        ("changed since the checkpoint", "augment.hflip", "0.125"),
        ("changed since the checkpoint", "optim.lr", "0.25"),
    ]


def test_what_ranks_and_switches_change_is_told() -> None:
    assert go_on("parallel.compression=bf16", "speed.activation_compression=8bit", ranks=3) == [
        "changed since the checkpoint: parallel.compression none -> bf16",
        "changed since the checkpoint: speed.activation_compression null -> 8bit",
        "changed since the checkpoint: ranks 2 -> 3",
    ]


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


def test_what_changes_no_result_is_not_told() -> None:
    free = ("run_dir=elsewhere", "runtime.threads=3", "parallel=ddp", "speed=reference", "schedule.max_steps=2")
    assert go_on(*free, "resume=never") == []


def saved_by(ranks: int) -> Any:
    """A checkpoint of a batch of 48 in two microbatches on each rank."""
    given = ["data.root=/nowhere", "data.global_batch_size=48", "optim.accumulation_steps=2", "precision=fp32"]
    config = config_of(*given, name="finetune").model_dump(mode="json")
    return SimpleNamespace(plain={"config": config, "world_size": ranks})


@pytest.mark.parametrize(("given", "batch"), [("auto", 48), ("16", 16)])
def test_an_automatic_batch_stays_on_another_number_of_ranks(given: str, batch: int) -> None:
    config = config_of("data.root=/nowhere", f"data.global_batch_size={given}", name="finetune")
    found = as_saved(config, ALONE, saved_by(1))
    assert (found.data.global_batch_size, found.precision.name) == (batch, "fp32")


@pytest.mark.parametrize(
    ("given", "ranks", "steps"), [("auto", 4, 2), ("auto", 1, 8), ("auto", 8, 1), ("auto", 3, 0), ("4", 1, 4)]
)
def test_microbatches_keep_their_images_on_another_number_of_ranks(given: str, ranks: int, steps: int) -> None:
    config = config_of("data.root=/nowhere", f"optim.accumulation_steps={given}", name="finetune")
    world = World(rank=0, size=ranks, device=ALONE.device)
    # 0 is `auto`: 3 ranks cannot share 8 microbatches.
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
