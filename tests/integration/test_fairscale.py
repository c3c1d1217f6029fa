"""FairScale's strategies on gloo, by the stand-ins of fairscale_cpu.py.

The table of test_strategies.py has their training with SGD, the average, accumulation and the evaluation, against one
process; this has the rest: optimizers, formats, checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train import train
from tests.factories import load_checkpoint
from tests.integration.runs import assert_same_state
from tests.integration.test_strategies import run_ranks

pytestmark = pytest.mark.slow

# Three launches come first.
MODELS = {
    "vit": ["model.width=32", "model.depth=2", "model.mlp_width=36", "model.patch_size=4", "data.image_size=8"],
    "resnet": ["model.depth=18", "data.image_size=8"],
}
COMMON = [
    "data.global_batch_size=24",
    "data.num_workers=0",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "augment=none",
    "optim.ema_decay=0.9",
    "optim.clip_norm=0.5",
    "runtime.tensorboard=false",
    "runtime.checkpoint_async=false",
]
# With a large eps, for AdamW makes much of the rounding of gradients that are zero (the biases of the keys).
ADAMW = ("optim=adamw", "optim.lr=0.005", "optim.weight_decay=0.1", "optim.eps=0.001")
LAYERS = (*ADAMW, "optim.layer_decay=0.6")
SAVED_AT, STEPS = 3, 23
FLAT, OSS = "fairscale_fsdp", "fairscale_sharded_ddp"

# Strategy, what is changed, and how near it comes to one process in 4 steps.
BESIDES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "groups": (FLAT, LAYERS, 1e-5),
    "lion": (FLAT, ("optim=lion", "optim.lr=0.0001"), 1e-5),
    "recompute": (FLAT, (*ADAMW, "speed.recompute=full"), 1e-5),
    "amp": (FLAT, (*ADAMW, "precision=amp_bf16"), 2e-3),
    "fp16_master": (FLAT, (*ADAMW, "precision=fp16_master"), 2e-3),
    "oss-groups": (OSS, LAYERS, 1e-5),
    "oss-lamb": (OSS, ("optim=lamb", "optim.lr=0.005", "model.init=trunc_normal"), 1e-5),
    "oss-adafactor": (OSS, ("optim=adafactor", "optim.lr=0.001", "optim.min_factored=8"), 1e-4),
    "oss-muon": (OSS, ("optim=muon", "optim.lr=0.001"), 1e-4),
    "oss-amp": (OSS, (*ADAMW, "precision=amp_bf16"), 2e-3),
}
# On 4 ranks: saved there, and started from what one process saved.
SAVING = {"fsdp": ("fsdp", "vit"), "flat": (FLAT, "vit"), "oss": (OSS, "vit"), "resnet": (FLAT, "resnet")}
# On 2 ranks: strategy, and what was saved on 4 that it starts from.
LOADING = {
    "flat-flat": (FLAT, "flat"),
    "flat-oss": (FLAT, "oss"),
    "flat-fsdp": (FLAT, "fsdp"),
    "oss-flat": (OSS, "flat"),
    "fsdp-flat": ("fsdp", "flat"),
    "ddp-flat": ("ddp", "flat"),
    "ddp-oss": ("ddp", "oss"),
    "flat-resnet": (FLAT, "resnet"),
}


def case(
    strategy: str, digits: Path, *extra: str, steps: int, model: str = "vit", save: bool = False
) -> dict[str, Any]:
    """For strategy_worker.py."""
    chosen = [f"parallel={strategy}", f"data.root={digits}", f"schedule.max_steps={steps}"]
    overrides = [*MODELS[model], *COMMON, *chosen, *extra]
    return {"config_name": f"{model}_digits", "overrides": overrides, "save": save}


def saved(folder: Path, name: str, step: int = SAVED_AT) -> Path:
    """A case's checkpoint."""
    return folder / "runs" / name / "checkpoints" / f"step_{step:09d}"


def ended(folder: Path, name: str) -> dict[str, Any]:
    """What a case ended with, whole."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """One process."""
    folder = tmp_path_factory.mktemp("alone") / "ranks"
    cases = {"saved": case("single", digits, *LAYERS, steps=SAVED_AT, save=True)}
    cases["on"] = case("single", digits, *LAYERS, f"resume={saved(folder, 'saved')}", steps=STEPS)
    cases |= {name: case("single", digits, *extra, steps=4) for name, (_, extra, _) in BESIDES.items()}
    return run_ranks(cases, folder, 1)


@pytest.fixture(scope="module")
def four(alone: Path, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Four ranks that save, and go on from what one process saved."""
    folder = tmp_path_factory.mktemp("four") / "ranks"
    cases = {
        name: case(strategy, digits, *LAYERS, steps=SAVED_AT, model=model, save=True)
        for name, (strategy, model) in SAVING.items()
    }
    resume = f"resume={saved(alone, 'saved')}"
    cases |= {f"{name}-one": case(SAVING[name][0], digits, *LAYERS, resume, steps=STEPS) for name in ("flat", "oss")}
    return run_ranks(cases, folder, 4)


@pytest.fixture(scope="module")
def two(four: Path, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Two ranks that go on from what four saved, and train what one process trained."""
    folder = tmp_path_factory.mktemp("two") / "ranks"
    cases = {}
    for name, (strategy, source) in LOADING.items():
        resume, model = f"resume={saved(four, source)}", SAVING[source][1]
        steps = STEPS if name == "flat-flat" else SAVED_AT
        cases[name] = case(strategy, digits, *LAYERS, resume, steps=steps, model=model)
    cases |= {name: case(strategy, digits, *extra, steps=4) for name, (strategy, extra, _) in BESIDES.items()}
    return run_ranks(cases, folder, 2)


@pytest.mark.parametrize("name", BESIDES)
def test_two_ranks_equal_one(two: Path, alone: Path, name: str) -> None:
    """Initial values to the bit, parameters and average after 4 steps, losses and gradient norms."""
    ours, theirs, tolerance = ended(two, name), ended(alone, name), BESIDES[name][2]
    assert_same_state(ours["began"]["model"], theirs["began"]["model"])
    for kind in ("model", "ema"):
        assert ours[kind].keys() == theirs[kind].keys()
        for key, value in ours[kind].items():
            # Their gradients are rounding alone, which these optimizers bring to the size of the others'.
            if key.endswith("key.bias") and name in ("oss-lamb", "oss-adafactor"):
                continue
            error = (value.double() - theirs[kind][key].double()).abs().max().item()
            assert error <= tolerance, f"{kind} {key}: {error:.1e}"
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=10 * tolerance)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=100 * tolerance)


def test_saved_on_four_ranks_is_what_one_process_has(alone: Path, four: Path) -> None:
    """The three strategies' files hold the same names and shapes, and the values that one process comes to."""
    theirs = load_checkpoint(saved(alone, "saved"))
    for name in ("flat", "oss", "fsdp"):
        ours = load_checkpoint(saved(four, name))
        for part in ("model", "ema", "optimizer"):
            assert ours[part].keys() == theirs[part].keys()
        for key, values in theirs["optimizer"].items():
            assert ours["optimizer"][key].keys() == values.keys()
            for what, value in values.items():
                torch.testing.assert_close(ours["optimizer"][key][what], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LOADING)
def test_loaded_on_two_ranks_is_what_four_saved(four: Path, two: Path, name: str) -> None:
    """To the bit: parameters, buffers, average and optimizer state."""
    on_disk, began = load_checkpoint(saved(four, LOADING[name][1])), ended(two, name)["began"]
    for part in ("model", "ema", "optimizer"):
        assert_same_state(began[part], on_disk[part], part)


@pytest.mark.parametrize("name", ["flat", "oss"])
def test_loaded_on_four_ranks_is_what_one_saved(alone: Path, four: Path, name: str) -> None:
    """To the bit, and the 20 losses after it."""
    ours, theirs = ended(four, f"{name}-one"), ended(alone, "on")
    for part in ("model", "ema", "optimizer"):
        assert_same_state(ours["began"][part], theirs["began"][part], part)
    assert len(ours["losses"]) == STEPS - SAVED_AT
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)


def test_two_ranks_go_on_as_one(alone: Path, two: Path) -> None:
    """From four ranks to two: where one process goes from its own checkpoint."""
    assert ended(two, "flat-flat")["losses"] == pytest.approx(ended(alone, "on")["losses"], abs=1e-5)


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        (["parallel=fairscale_fsdp", "optim=lamb"], "optim.name: lamb needs the shapes of weights"),
        (["parallel=fairscale_fsdp", "optim=muon"], "optim.name: muon needs the shapes of weights"),
        (["parallel=fairscale_fsdp", "precision=bf16"], "precision: bf16 keeps no float32 weights"),
        (["parallel=fairscale_fsdp", "precision=fp8"], "precision: fp8 conflicts with"),
        (["parallel=fairscale_sharded_ddp", "precision=bf16_params"], "precision: bf16_params keeps weights separate"),
        (["parallel=fairscale_sharded_ddp", "optim=adamw8bit"], "optim.name: adamw8bit's state cannot be sent"),
    ],
)
def test_what_cannot_run_is_refused_with_a_way_out(overrides: list[str], begins: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", overrides)
    (line,) = caught.value.lines
    assert line.startswith(begins)
    way_out = re.search(r"use ((optim|precision)=\w+)", line)
    assert way_out is not None
    load_config("vit_digits", [*overrides, way_out[1]])


def test_without_cuda_there_is_one_clear_error(tmp_path: Path, digits: Path) -> None:
    config = load_config("vit_digits", ["parallel=fairscale_fsdp", f"data.root={digits}", f"run_dir={tmp_path / 'x'}"])
    with pytest.raises(UserError) as caught:
        train(config)
    (line,) = caught.value.lines
    assert line.startswith("parallel.name: fairscale_fsdp needs CUDA")
    assert line.endswith("use parallel=fsdp, which runs on both")
    assert not (tmp_path / "x").exists()
