"""Every way to share the work over ranks trains what one process trains: a table of strategies, models and formats."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast.strategies import TURNS
from tests.factories import assert_same_bits
from tests.integration.runs import ROOT, run_process, under_torchrun

pytestmark = pytest.mark.slow

STEPS = 10
ZBV_SHARDS = ["parallel=fsdp", "parallel.pipeline_schedule=zbv", "parallel.reshard_after_forward=false"]
STRATEGIES = {
    "ddp": ["parallel=ddp"],
    "zero2": ["parallel=fsdp", "parallel.reshard_after_forward=false"],
    "zero3": ["parallel=fsdp"],
    "hsdp": ["parallel=hsdp", "parallel.shard_degree=2"],
    "tensor": ["parallel=fsdp", "parallel.tensor_degree=2"],
    "tensor hsdp": ["parallel=hsdp", "parallel.shard_degree=1", "parallel.tensor_degree=2"],
    "tensor 4": ["parallel=fsdp", "parallel.tensor_degree=4"],
    "pipeline": ["parallel=ddp", "parallel.pipeline_degree=2"],
    **{
        f"pipeline {ranks} {each}": [
            *("parallel=ddp", f"parallel.pipeline_degree={ranks}", f"parallel.pipeline_schedule={each}")
        ]
        for ranks in (2, 4)
        for each in TURNS
    },
    "pipeline fsdp": ["parallel=fsdp", "parallel.pipeline_degree=2"],
    "pipeline fsdp zbv": [*ZBV_SHARDS, "parallel.pipeline_degree=2"],
    "pipeline tensor": ["parallel=fsdp", "parallel.pipeline_degree=2", "parallel.tensor_degree=2"],
    "experts": ["parallel=fsdp", "parallel.expert_degree=2"],
    "experts hsdp": ["parallel=hsdp", "parallel.shard_degree=2", "parallel.expert_degree=2"],
    "experts tensor": ["parallel=fsdp", "parallel.expert_degree=2", "parallel.tensor_degree=2"],
    "experts pipeline zbv": [*ZBV_SHARDS, "parallel.expert_degree=2", "parallel.pipeline_degree=2"],
    "experts pipeline": ["parallel=fsdp", "parallel.expert_degree=2", "parallel.pipeline_degree=2"],
    # On the CPU by the stand-ins of fairscale_cpu.py.
    "fairscale2": ["parallel=fairscale_fsdp", "parallel.reshard_after_forward=false"],
    "fairscale3": ["parallel=fairscale_fsdp"],
    "oss": ["parallel=fairscale_sharded_ddp"],
}
VIT = ["model.width=32", "model.depth=2", "model.mlp_width=36", "model.patch_size=4", "data.image_size=8"]
MODELS = {
    "vit": ("vit_digits", VIT),
    # With room for all tokens; the balancing loss is of each rank's own tokens.
    "moe": ("vit_moe_digits", [*VIT, "model.expert_capacity=8", "model.balance_loss=0"]),
    # With seed 0 a rounding turns a ReLU over, which shows as 1e-4 in the strategies that sum in another order.
    "resnet": ("resnet_digits", ["model.depth=18", "data.image_size=8", "parallel.sync_batchnorm=true", "seed=1"]),
}
# Precision and accumulation steps.
PRECISIONS = (("fp32", 1), ("fp32", 4), ("bf16_params", 4))
# SGD, for AdamW makes much of the rounding of gradients that are zero (the biases of the keys).
COMMON = [
    *("optim=sgd", "optim.lr=0.05", "optim.weight_decay=0.01", "optim.clip_norm=0.5", "optim.ema_decay=0.9"),
    *("data.global_batch_size=32", "data.num_workers=0", "augment=none", "trackers=[]"),
    *("schedule.epochs=1", "schedule.warmup_epochs=0", f"schedule.max_steps={STEPS}"),
]
# Those that do not divide a block; how the others are composed is compared in float64 (`WHOLE`).
UNDIVIDED = ("ddp", "zero2", "zero3", "hsdp", "fairscale2", "fairscale3", "oss")
CASES = [
    (strategy, model, *precision)
    for strategy, model, precision in product(UNDIVIDED, ("vit", "resnet"), PRECISIONS)
    # FairScale's ShardedDDP has no place for weights that are apart from the network's (the table of conflicts).
    if (strategy, precision[0]) != ("oss", "bf16_params")
]
DIVIDED = [
    (strategy, model, precision, 4)
    for strategy, model in (("tensor", "vit"), ("pipeline", "vit"), ("experts", "moe"))
    for precision in ("fp32", "bf16_params")
]
# On four ranks a grid of 2 x 2, and one of each kind of the others.
ON = {
    2: [*(case for case in CASES if case[0] != "hsdp"), *DIVIDED],
    4: [case for case in CASES if case[0] == "hsdp" or case[1:] == ("vit", "fp32", 4)],
}
# Largest difference of what is learned, as a share of the whole change; bfloat16 rounds to 4e-3. In float32 no single
# value differs by more than 1e-5 either.
BAND = {"fp32": 1e-5, "bf16_params": 1e-2}
LOSS_BAND = {"fp32": 1e-5, "bf16_params": 2e-3}

LAMB = ["optim=lamb", "optim.lr=0.001", "optim.eps=0.01", "model.init=trunc_normal"]
ADAMW = ["optim=adamw", "optim.lr=0.001", "optim.eps=0.01"]
# Too large a scale for the first step, which all ranks have to skip together.
OVERFLOW = ["precision=fp16_master", "precision.loss_scale_start=134217728", "precision.loss_scale_backoff=0.0078125"]
# What else has to be right when weights are cut or gradients rounded: (strategy, keys, band).
PARTS: dict[str, tuple[str, list[str], float]] = {
    "adamw fused with layers": ("zero3", [*ADAMW, "speed.optimizer=fused", "optim.layer_decay=0.5"], 1e-5),
    "lamb": ("zero3", LAMB, 1e-5),
    "lamb foreach": ("zero3", [*LAMB, "speed.optimizer=foreach"], 1e-5),
    "compiled update": ("zero3", [*ADAMW, "speed.optimizer=loop", "speed.optimizer_compile=on"], 1e-4),
    "loops": ("zero3", ["speed.optimizer=loop", "speed.clip=loop", "speed.ema=loop", "optim.ema_every_steps=3"], 1e-5),
    "recompute": ("zero3", ["speed.recompute=full", "precision=bf16_params"], 1e-2),
    "recompute some": ("zero2", ["speed.recompute=selective"], 1e-5),
    "offload and watchdog": ("zero3", ["speed.activation_offload=cpu", "runtime.watchdog=true"], 1e-5),
    "activations in 8 bits": ("zero3", ["speed.activation_compression=8bit"], 1e-2),
    "tables": ("zero3", ["model.classifier=pooled", "model.positions=sincos2d", "precision=bf16_params"], 1e-2),
    "convolutional stem": (
        "zero3",
        ["model.stem=conv", "model.stem_widths=[8,16]", "model.stem_strides=[2,2]", "parallel.sync_batchnorm=true"],
        1e-5,
    ),
    "overflow": ("zero3", OVERFLOW, 1e-2),
    "overflow on replicas": ("ddp", OVERFLOW, 1e-2),
    "float8": ("zero3", ["precision=fp8", "precision.fp8_emulate=true", "model.mlp_width=64"], 0.1),
    "recompute on replicas": ("ddp", ["speed.recompute=full"], 1e-5),
    "fp16 exchange": ("ddp", ["parallel.compression=fp16", "precision=amp_fp16"], 2e-3),
    "bf16 exchange": ("ddp", ["parallel.compression=bf16"], 1e-2),
    # All ranks see the same images: they draw what one process draws. Five tokens are padded to six.
    "everything drawn": (
        "tensor",
        [
            *(*ADAMW, "model.drop_path=0.2", "augment.mixup_alpha=0.2", "model.class_token=true"),
            *("model.qk_norm=true", "model.layer_scale=0.1"),
        ],
        1e-5,
    ),
    "tensor recompute": ("tensor", ["speed.recompute=full", "model.classifier=map", "model.registers=2"], 1e-5),
    # Only the first stage has statistics and the table.
    "pipeline buffers": (
        "pipeline",
        [
            *("model.stem=conv", "model.stem_widths=[8,16]", "model.stem_strides=[2,2]"),
            *("model.positions=sincos2d", "model.classifier=pooled"),
        ],
        1e-5,
    ),
    "pipeline overflow": ("pipeline", OVERFLOW, 1e-2),
    # Its products are in bfloat16; under ddp it differs by 4e-3.
    "pipeline muon": ("pipeline", ["optim=muon", "optim.lr=0.001"], 1e-2),
    "pipeline lamb": ("pipeline", LAMB, 1e-5),
    # Fills what is not initialised with NaN.
    "pipeline watchdog": ("pipeline", ["runtime.watchdog=true", "runtime.deterministic=true"], 1e-5),
    "pipeline compiled": ("pipeline", ["speed.compile=blocks"], 1e-4),
    "tensor overflow": ("tensor", OVERFLOW, 1e-2),
    "flat layers recomputed": ("fairscale3", [*ADAMW, "optim.layer_decay=0.6", "speed.recompute=full"], 1e-5),
    "flat fp16_master": ("fairscale3", [*ADAMW, "precision=fp16_master"], 1e-2),
    "oss layers": ("oss", [*ADAMW, "optim.layer_decay=0.6"], 1e-5),
    "oss lamb": ("oss", LAMB, 1e-5),
    "oss amp": ("oss", [*ADAMW, "precision=amp_bf16"], 1e-2),
}


# In float64, with everything on: the strategy, the number of its ranks, and the one that it equals, on how many.
APART = ["model.expert_capacity=1", "model.balance_loss=0.01"]
DRAWN = ["model.drop_path=0.2", "augment.mixup_alpha=0.2", "model.class_token=true"]
DEEP, DEEPER = [*DRAWN, "model.depth=5"], [*DRAWN, "model.depth=8"]
EXPERTS_DEEP = [*DEEP, *APART]
WHOLE: dict[str, tuple[str, str, int, str, int, list[str]]] = {
    "tensor 2": ("vit", "tensor", 2, "single", 1, DRAWN),
    "tensor 4": ("vit", "tensor 4", 4, "single", 1, DRAWN),
    "tensor 2 x shard 2": ("vit", "tensor", 4, "single", 1, []),
    "tensor 2 x replicate 2": ("vit", "tensor hsdp", 4, "single", 1, []),
    **{
        f"pipeline {ranks} {each}": ("vit", f"pipeline {ranks} {each}", ranks, "single", 1, deep)
        for ranks, deep in ((2, DEEP), (4, DEEPER))
        for each in TURNS
    },
    "pipeline 2 x replicate 2": ("vit", "pipeline", 4, "ddp", 2, DRAWN),
    "pipeline 2 x shard 2": ("vit", "pipeline fsdp", 4, "zero3", 2, DRAWN),
    "pipeline 2 zbv x shard 2": ("vit", "pipeline fsdp zbv", 4, "zero3", 2, DEEP),
    "pipeline 2 x tensor 2": ("vit", "pipeline tensor", 4, "single", 1, DRAWN),
    "pipeline 2 x tensor 2 x shard 2": ("vit", "pipeline tensor", 8, "zero3", 2, DRAWN),
    "pipeline 2 x tensor 2 x shard 2 and one process": ("vit", "pipeline tensor", 8, "single", 1, []),
    "expert 2": ("moe", "experts", 2, "zero3", 2, [*APART, *DRAWN]),
    "expert 2 x shard 2": ("moe", "experts", 4, "zero3", 4, [*APART, *DRAWN]),
    "expert 2 x replicate 2": ("moe", "experts hsdp", 4, "hsdp", 4, [*APART, *DRAWN]),
    "expert 2 x shard 2 and one process": ("moe", "experts", 4, "single", 1, []),
    "expert 2 x shard 2 x tensor 2 and one process": ("moe", "experts tensor", 8, "single", 1, []),
    "experts in tensor 2 compiled": ("moe", "tensor", 2, "single", 1, [*EXPERTS_DEEP, "speed.compile=blocks"]),
    "expert 2 x tensor 2": ("moe", "experts tensor", 4, "zero3", 2, [*APART, *DRAWN]),
    "expert 2 x shard 2 x tensor 2": ("moe", "experts tensor", 8, "zero3", 4, [*APART, *DRAWN]),
    **{f"experts in pipeline 2 {each}": ("moe", f"pipeline 2 {each}", 2, "single", 1, EXPERTS_DEEP) for each in TURNS},
    "experts in pipeline 2 x tensor 2": ("moe", "pipeline tensor", 4, "single", 1, [*APART, *DRAWN]),
    "expert 2 x pipeline 2 zbv": ("moe", "experts pipeline zbv", 4, "zero3", 2, EXPERTS_DEEP),
    "expert 2 x pipeline 2": ("moe", "experts pipeline", 4, "zero3", 2, [*APART, *DRAWN]),
}


def case_name(*parts: object) -> str:
    return "-".join(map(str, parts))


def case(strategy: list[str], model: str, precision: str | None, accumulation: int, *, digits: Path) -> dict[str, Any]:
    config_name, overrides = MODELS[model]
    if "parallel=single" in strategy:
        overrides = [override for override in overrides if not override.startswith("parallel.")]
    chosen = [f"optim.accumulation_steps={accumulation}", f"data.root={digits}"]
    if precision is not None:
        chosen.append(f"precision={precision}")
    return {"config_name": config_name, "overrides": [*overrides, *COMMON, *strategy, *chosen]}


def run_ranks(cases: dict[str, Any], folder: Path, ranks: int, device: str = "cpu") -> Path:
    """All cases in one launch; the folder with their ends."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = [sys.executable, str(ROOT / "tests/integration/strategy_worker.py")]
    done = run_process(under_torchrun([*worker, str(folder / "cases.json"), str(folder), device], ranks), cwd=folder)
    assert "FSDP2-wrapped" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """What one process ends with."""
    cases = {
        case_name(*each): case(["parallel=single"], *each, digits=digits) for each in {chosen[1:] for chosen in ON[2]}
    }
    for name, (_, keys, _) in PARTS.items():
        here = [key for key in keys if not key.startswith("parallel.")]
        cases[name] = case(["parallel=single", *here], "vit", None, 2, digits=digits)
    return run_ranks(cases, tmp_path_factory.mktemp("alone") / "ends", 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    parts = {
        name: case([*STRATEGIES[strategy], *keys], "vit", None, 2, digits=digits)
        for name, (strategy, keys, _) in PARTS.items()
    }
    return run_ranks(parts, tmp_path_factory.mktemp("ranks") / "parts", 2)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[[int], Path]:
    """What so many ranks end with, by their number; with a parametrised fixture each test would launch them anew."""

    @functools.cache
    def ends(ranks: int) -> Path:
        cases = {case_name(*each): case(STRATEGIES[each[0]], *each[1:], digits=digits) for each in ON[ranks]}
        return run_ranks(cases, tmp_path_factory.mktemp("ranks") / str(ranks), ranks)

    return ends


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(ranks, chosen) for ranks, cases in ON.items() for chosen in cases],
    ids=lambda value: case_name(*value) if isinstance(value, tuple) else str(value),
)
def test_ranks_equal_one_process(
    together: Callable[[int], Path], ranks: int, chosen: tuple[Any, ...], alone: Path
) -> None:
    """Ten steps at the same global batch: weights, statistics, average, losses, norms, evaluations."""
    compare(chosen, together(ranks), alone)


@pytest.mark.parametrize("name", PARTS)
def test_parts_under_ranks_equal_one_process(name: str, two: Path, alone: Path) -> None:
    ours, theirs = torch.load(two / f"{name}.pt"), torch.load(alone / f"{name}.pt")
    band = PARTS[name][2]
    compare_learned(ours, theirs, band)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=band)
    if "overflow" in name:
        # No norm of a step that is skipped.
        assert [math.isnan(norm) for norm in ours["grad_norms"]] == [math.isnan(norm) for norm in theirs["grad_norms"]]
        assert math.isnan(ours["grad_norms"][0])
        assert not math.isnan(ours["grad_norms"][-1])
        assert ours["loss_scaler"] == theirs["loss_scaler"]


def test_divided_models_in_float64(tmp_path: Path, digits: Path) -> None:
    """To 1e-10, with AdamW, recomputation, clipping, an average and four microbatches."""
    on: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}, 8: {}}
    for name, (model, strategy, ranks, reference, theirs, keys) in WHOLE.items():
        for what, of, count in (("ours", strategy, ranks), ("theirs", reference, theirs)):
            given = [*STRATEGIES.get(of, ["parallel=single"]), "optim=adamw", "optim.lr=0.001", *keys]
            if not any(word in " ".join(given) for word in ("zero_bubble", "zbv", "compile")):
                given.append("speed.recompute=full")
            settings = case(given, model, "fp32", 4, digits=digits)
            on[count][f"{name} {what}"] = {**settings, "double": True}
    ends = {count: run_ranks(cases, tmp_path / str(count), count) for count, cases in on.items()}
    for name, (_, _, ranks, _, count, _) in WHOLE.items():
        ours, theirs = torch.load(ends[ranks] / f"{name} ours.pt"), torch.load(ends[count] / f"{name} theirs.pt")
        for part in ("losses", "grad_norms"):
            assert ours[part] == pytest.approx(theirs[part], abs=1e-10), name
        for part in ("model", "ema"):
            for parameter, value in ours[part].items():
                assert value.dtype == torch.float64
                torch.testing.assert_close(value, theirs[part][parameter], rtol=0, atol=1e-10, msg=name)
        for mine, other in zip(ours["evaluations"], theirs["evaluations"], strict=True):
            assert (mine["count"], mine["top1"]) == (other["count"], other["top1"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_ranks_equal_uncompiled_ones(tmp_path: Path, digits: Path, strategy: str) -> None:
    """Blocks of more than DDP's first bucket (1 MiB), with drop-path, whose rate is one number for both branches."""
    wide = ["model.width=256", "model.mlp_width=512", "model.depth=3", "model.drop_path=0.2", "schedule.max_steps=3"]
    cases = {
        what: case([f"parallel={strategy}", *wide, f"speed.compile={what}"], "vit", "fp32", 1, digits=digits)
        for what in ("off", "blocks")
    }
    ends = run_ranks(cases, tmp_path / "ranks", 2)
    compare_learned(torch.load(ends / "blocks.pt"), torch.load(ends / "off.pt"), 1e-4)


def compare(chosen: tuple[Any, ...], folder: Path, alone: Path) -> None:
    """What a case ended with on ranks and in one process."""
    ours = torch.load(folder / f"{case_name(*chosen)}.pt")
    theirs = torch.load(alone / f"{case_name(*chosen[1:])}.pt")
    compare_learned(ours, theirs, BAND[chosen[2]])
    if chosen[2] == "fp32":
        for part in ("model", "ema"):
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=1e-5)
    band = LOSS_BAND[chosen[2]]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=band)
    assert ours["grad_norms"] == pytest.approx(theirs["grad_norms"], rel=5 * band)
    assert [record["weights"] for record in ours["evaluations"]] == ["model", "ema"] * 2
    for mine, other in zip(ours["evaluations"], theirs["evaluations"], strict=True):
        assert mine["count"] == other["count"] == 359
        assert mine["loss"] == pytest.approx(other["loss"], abs=band)
        # Two images may change sides in bfloat16.
        assert mine["top1"] == pytest.approx(other["top1"], abs=1e-9 if chosen[2] == "fp32" else 0.6)
    # What was gathered for the average is not taken for the model, nor the other way round.
    model, average, again, average_again = (record["loss"] for record in ours["evaluations"])
    assert model == again != average == average_again


def compare_learned(ours: dict[str, Any], theirs: dict[str, Any], band: float) -> None:
    """The same beginning to the bit; what was learned from there, of weights, average and statistics, within a band."""
    began = theirs["began"]["model"]
    assert_same_bits(ours["began"]["model"], began)
    for part in ("model", "ema"):
        assert ours[part].keys() == theirs[part].keys()
        for kind in (False, True):
            names = [name for name in began if began[name].is_floating_point() and ("running" in name) == kind]
            if names:
                change = distance(theirs[part], began, names)
                assert change > 1e-3
                assert distance(ours[part], theirs[part], names) < band * change


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: list[str]) -> float:
    return math.sqrt(sum((one[name].double() - other[name].double()).square().sum().item() for name in names))
