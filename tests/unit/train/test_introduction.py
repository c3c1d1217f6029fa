"""What is told at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.build import Race
from pycls_fast.config import load_config
from pycls_fast.data.sources.synthetic import SyntheticImages
from pycls_fast.train.start import _notes

SOURCES = {"train": SyntheticImages(4, 8, 2, 0)}


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine both formats are equally fast."""
    monkeypatch.setattr(build, "race", lambda config: Race("fp32", 1.0, None, 0.0))


@pytest.mark.parametrize(
    ("precision", "ratio", "told"),
    [
        ("fp32", 3.0, "precision: a step takes 3 times as long as with precision=amp_bf16 on this CPU"),
        ("amp_bf16", 0.025, "precision: a step takes 40 times as long as with precision=fp32 on this CPU"),
        ("fp32", 1.9, None),
        ("bf16", 0.6, None),
    ],
)
def test_a_precision_that_is_slow_here(
    monkeypatch: pytest.MonkeyPatch, precision: str, ratio: float, told: str | None
) -> None:
    monkeypatch.setattr(build, "race", lambda config: Race("fp32", ratio, None, 0.0))
    config = load_config("vit_digits", [f"precision={precision}", "speed.compile=off"])
    world = SimpleNamespace(size=1, device=torch.device("cpu"), is_main=True)
    switches = build.switches(config, world.device)
    run: Any = SimpleNamespace(config=config, switches=switches, world=world, sources=SOURCES)
    notes = list(_notes(run))
    assert notes == [] if told is None else notes[0].startswith(told)


@pytest.mark.parametrize(("counts", "told"), [((60, 20), 0), ((61, 20), 1), ((10, 0), 1)])
def test_unbalanced_classes_are_told(counts: tuple[int, int], told: int) -> None:
    config = load_config("vit_digits", ["precision=fp32", "speed.compile=off"])
    world = SimpleNamespace(size=1, device=torch.device("cpu"), is_main=True)
    switches = build.switches(config, world.device)
    train = SimpleNamespace(labels=np.repeat([0, 1], counts), classes=("a", "b"))
    run: Any = SimpleNamespace(config=config, switches=switches, world=world, sources={"train": train})
    assert [note.startswith(f"classes have {counts[1]} to {counts[0]} images") for note in _notes(run)] == [True] * told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["precision=fp32"], []),
        (["precision=fp32", "speed.compile=model"], ["speed.compile: compiling"]),
        (
            ["precision=fp32", "speed.compile=model", "speed.gelu=polynomial"],
            [
                "speed.compile: compiling",
                "speed.gelu: polynomial is for 16 bits; with precision=fp32 torch's GELU is used",
            ],
        ),
        (["precision=amp_bf16", "speed.compile=off"], []),
        (["precision=bf16", "speed.compile=model", "speed.gelu=polynomial"], ["speed.compile: compiling"]),
        (["precision=fp8", "precision.fp8_emulate=true"], []),
        (["precision=fp16_master"], ["precision: fp16_master computes in float16, which CPUs do slowly"]),
        # 0.99 ** 100 is 0.366.
        (
            ["precision=fp32", "optim.ema_decay=0.99", "optim.ema_warmup=false"],
            ["optim.ema_decay: after all 100 steps the initial weights are still 37% of the average"],
        ),
        (["precision=fp32", "optim.ema_decay=0.95", "optim.ema_warmup=false"], []),
        (["precision=fp32", "optim.ema_decay=0.99"], []),
    ],
)
def test_notes(overrides: list[str], told: list[str]) -> None:
    config = load_config("vit_digits", overrides)
    switches = build.switches(config, torch.device("cpu"))
    world = SimpleNamespace(size=1, device=torch.device("cpu"), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, total_steps=100, world=world, sources=SOURCES)
    for note, begins in zip(_notes(run), told, strict=True):
        assert note.startswith(begins)


@pytest.mark.parametrize("found", [True, False])
def test_a_gpu_without_a_compiler_is_told_once(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr(build.switch_values, "has_compiler", lambda kind: found)
    monkeypatch.setattr(build, "has_compiler", lambda kind: found)
    config = load_config("vit_s16", ["data=synthetic", "precision=fp32", "speed=fast"])
    switches = build.switches(config, torch.device("cuda"))
    world = SimpleNamespace(size=1, device=torch.device("cuda"), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, total_steps=100, world=world, sources=SOURCES)
    (note,) = (note for note in _notes(run) if note.startswith("speed.compile"))
    assert note.startswith("speed.compile: compiling" if found else "speed.compile: off, because no C compiler")


@pytest.mark.parametrize(
    ("gpus", "ranks", "overrides", "told"),
    [(8, 1, [], 1), (1, 1, [], 0), (8, 8, [], 0), (8, 1, ["parallel=single"], 0)],
)
def test_gpus_that_idle(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, overrides: list[str], told: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = load_config("vit_digits", ["precision=fp32", "speed=reference", *overrides])
    switches = build.switches(config, torch.device("cpu"))
    world = SimpleNamespace(size=ranks, device=torch.device("cuda"), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, world=world, sources=SOURCES)
    notes = [note for note in _notes(run) if "GPUs is used" in note]
    assert len(notes) == told
    assert all(f"torchrun --nproc_per_node {gpus} " in note for note in notes)


@pytest.mark.parametrize(("device", "ranks", "told"), [("cuda", 8, 1), ("cuda", 4, 0), ("cuda", 1, 0), ("cpu", 8, 0)])
def test_a_small_batch_on_many_gpus(device: str, ranks: int, told: int) -> None:
    config = load_config("vit_digits", ["precision=fp32", "data.global_batch_size=64"])
    switches = build.switches(config, torch.device("cpu"))
    world = SimpleNamespace(size=ranks, device=torch.device(device), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, world=world, sources=SOURCES)
    notes = list(_notes(run))
    assert [note.startswith("data.global_batch_size: 8 images at a time") for note in notes] == [True] * told


@pytest.mark.parametrize(
    ("precision", "capability", "told"),
    [
        ("amp_bf16", (7, 5), True),
        ("bf16", (7, 0), True),
        ("amp_bf16", (8, 0), False),
        ("amp_fp16", (7, 5), False),
        ("fp32", (7, 5), False),
    ],
)
def test_a_gpu_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch, precision: str, capability: tuple[int, int], told: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = load_config("vit_digits", [f"precision={precision}", "speed.compile=off"])
    switches = build.switches(config, torch.device("cpu"))
    world = SimpleNamespace(size=1, device=torch.device("cuda"), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, world=world, sources=SOURCES)
    notes = list(_notes(run))
    expected = f"precision: {precision} is slow on this GPU, which has no units for bfloat16; use precision=amp_fp16"
    assert notes == [expected] * told


@pytest.mark.parametrize(
    ("compiled", "told"), [("off", "precision: the scales and casts of fp8"), ("blocks", "speed.compile: compiling")]
)
def test_the_note_on_float8_that_is_not_compiled(compiled: str, told: str) -> None:
    config = load_config("vit_digits", ["precision=fp8", f"speed.compile={compiled}"])
    switches = build.switches(config, torch.device("cuda"))
    world = SimpleNamespace(size=1, device=torch.device("cuda"), is_main=True)
    run: Any = SimpleNamespace(config=config, switches=switches, total_steps=100, world=world, sources=SOURCES)
    (note,) = _notes(run)
    assert note.startswith(told)
