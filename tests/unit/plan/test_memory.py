"""The peak of a step that the plan predicts, against what is alive during real steps."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pycls_fast import build
from pycls_fast.choice import give
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.launch import make_mesh
from pycls_fast.parallel.tensor import divide
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.plan import race
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.plan.memory_plan import MemoryPlan, group
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.plan.peak import Copies, Sizes, State
from pycls_fast.plan.peak import state as state_of
from pycls_fast.train.metrics import StepMemory, TrainMetrics
from pycls_fast.train.step import Step
from tests.factories import config_of, imagined, small_vit, step_of
from tests.integration.fairscale_cpu import play_cuda

CPU = torch.device("cpu")
COMMON = ("augment=none", "optim=adamw", "speed.optimizer=loop", "speed.compile=off")
VIT = (
    *("vit_digits", "model.width=128", "model.depth=4", "model.heads=2", "model.mlp_width=512"),
    *("model.patch_size=8", "data.image_size=64", *COMMON),
)
RESNET = ("resnet_digits", "data.image_size=32", *COMMON)


def configured(base: tuple[str, ...], images: int, ranks: int, *overrides: str) -> RunConfig:
    """A configuration with so many images in a rank's microbatch."""
    parts = next((int(each[-1]) for each in overrides if each.startswith("optim.accumulation_steps=")), 1)
    batch = f"data.global_batch_size={images * ranks * parts}"
    return config_of(*base[1:], f"optim.accumulation_steps={parts}", batch, *overrides, name=base[0])


def stepping(config: RunConfig, world: World, images: int) -> tuple[Step, Any]:
    """The step of a rank, and its batch."""
    batch = synthetic_batch(images, config.data.image_size, 10, erase_probability=0.0, seed=0, device=CPU)
    return step_of(config, world), batch


def assert_held(world: World, base: tuple[str, ...], *overrides: str, images: int = 8, within: float = 0.05) -> None:
    """The peak over whole steps is the plan's, and what a run says of a step."""
    config = configured(base, images, world.data_size, *overrides)
    metrics = TrainMetrics(CPU)
    with LiveMemory() as memory:
        step, batch = stepping(config, world, images)
        # The optimizer has its state after the first.
        for index in range(2):
            memory.peak = memory.live
            step(index, [batch] * config.optim.microbatches, metrics)
    alone = StepMemory(world, compiled=False)
    with alone.counting(step.persistent_tensors):
        step(2, [batch] * config.optim.microbatches, metrics)
    planned = MemoryPlan(config, world, 10).peak(config.optim.microbatches)
    assert [memory.peak, alone.bytes()] == pytest.approx([planned] * 2, rel=within)


@pytest.mark.parametrize(
    ("base", "recompute", "precision"),
    [
        (VIT, "full", "fp32"),
        (VIT, "off", "amp_bf16"),
        pytest.param(RESNET, "off", "fp32", marks=pytest.mark.slow),
        pytest.param(RESNET, "full", "amp_bf16", marks=pytest.mark.slow),
    ],
)
def test_the_peak_is_what_mem_tracker_counts(base: tuple[str, ...], recompute: str, precision: str) -> None:
    config = configured(base, 16, 1, f"speed.recompute={recompute}", f"precision={precision}")
    step, batch = stepping(config, ALONE, 16)
    network, metrics = step.wrapped.evaluated, TrainMetrics(CPU)
    step(0, [batch], metrics)
    tracker = MemTracker()
    tracker.track_external(network, step.optimizer, batch.images_BHWC)
    with tracker:
        step(1, [batch], metrics)
    counted = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert MemoryPlan(config, ALONE, 10).peak(1) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("precision=bf16_params", "optim.ema_decay=0.9", "optim.trainable=head"),
        ("speed.activation_compression=8bit",),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                ("optim.ema_decay=0.9", "optim.trainable=head"),
                ("precision=amp_bf16", "optim.accumulation_steps=2", "optim.trainable=[head,blocks.2]"),
                ("precision=bf16",),
                ("precision=bf16", "optim.accumulation_steps=2"),
                ("speed.recompute=selective",),
                ("speed.optimizer=foreach", "optim.ema_decay=0.9"),
            )
        ),
    ],
)
def test_one_process_holds_what_the_plan_says(overrides: tuple[str, ...]) -> None:
    assert_held(ALONE, VIT, *overrides)


def test_blocks_of_a_kind_run_again_in_each_format_of_their_input() -> None:
    """A stage of ConvNeXt begins in bfloat16 and goes on in float32."""
    convnext = ("vit_digits", "model=timm", "model.name=test_convnext", "data.image_size=64", *COMMON)
    assert_held(ALONE, convnext, "speed.recompute=selective", "precision=amp_bf16")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "adafactor optim.momentum_dtype=float32", "adamw", "lamb"])
def test_optimizers_keep_what_the_plan_says(optimizer: str) -> None:
    # So wide that rows and columns are few beside their matrix.
    wide = ("model.width=256", "model.mlp_width=1024", "model.depth=2")
    config = config_of(*VIT[1:], *wide, *f"optim={optimizer}".split(), name=VIT[0])
    step, batch = stepping(config, ALONE, 1)
    step(0, [batch], TrainMetrics(CPU))
    kept = sum(
        value.nbytes
        for state in step.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    weights = sum(parameter.nbytes for parameter in step.network.parameters())
    # What Adafactor keeps of its second moments is a row and a column of each matrix.
    expected = config.optim.state_copies
    assert kept / weights == pytest.approx(expected, abs=0.05)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The first of eight ranks, whose messages go nowhere."""
    play_cuda(monkeypatch)
    with imagined(8):
        yield World(rank=0, size=8, device=CPU, mesh=make_mesh("cpu", None, 8, datetime.timedelta(seconds=60)))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("average", ["null", "0.9"])
def test_a_rank_of_oss_holds_what_the_plan_says(eight: World, average: str, accumulation: int) -> None:
    overrides = ("parallel=fairscale_sharded_ddp", f"optim.accumulation_steps={accumulation}")
    assert_held(eight, VIT, *overrides, f"optim.ema_decay={average}", within=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "more"),
    [(VIT, "parallel.reshard_after_forward=false"), (VIT, "precision=bf16_params"), (RESNET, "precision=fp32")],
)
def test_a_rank_of_fsdp_holds_what_the_plan_says(eight: World, base: tuple[str, ...], more: str) -> None:
    """Other layouts, with ranks that answer: tests/integration/test_plan_ranks.py."""
    assert_held(eight, base, "parallel=fsdp", more, images=16, within=0.1)


def test_a_rank_of_fsdp_with_all_shards_gathers_them_too() -> None:
    """As where ranks divide only blocks."""
    with imagined(1):
        world = World(rank=0, size=1, device=CPU, mesh=make_mesh("cpu", None, 1, datetime.timedelta(seconds=60)))
        assert_held(world, VIT, "parallel=fsdp", "precision=bf16_params", images=2)


def test_the_state_of_each_strategy() -> None:
    def held(strategy: str, degree: int = 4, *, trained: int = 1000, **keys: Any) -> State:
        return state_of(Sizes(1000, trained, 100), Copies(strategy, degree, 2, **keys))

    assert held("single", 1).updating == held("ddp", 1).updating == 16_000
    # DDP's buckets are never freed.
    assert (held("single", 1).kept, held("ddp", 1).kept) == (12_000, 16_000)
    # Until the last microbatch the others' gradients are not in them.
    assert held("ddp", 1, accumulates=True).accumulated == 4_000
    assert (held("fsdp").kept, held("fsdp").updating) == (3_000, 4_000)
    assert held("fsdp", averaged=True).updating == 5_000
    assert held("fsdp", trained=40).updating == 1_000 + 120


def resolved(*overrides: str, ranks: int = 1) -> RunConfig:
    config = config_of(*VIT[1:], "precision=fp32", "data.global_batch_size=64", *overrides, name=VIT[0])
    return resolve_auto(config, 1_000, World(rank=0, size=ranks, device=CPU), classes=10)


def test_the_fewest_microbatches_that_fit_are_taken() -> None:
    assert resolved().optim.accumulation_steps == 1
    config = resolved("runtime.device_memory=1GB")
    assert config.optim.accumulation_steps == 1
    made = MemoryPlan(config, ALONE, 10)
    memory = made.peak(8) / 0.92
    config = resolved(f"runtime.device_memory={memory / 1e6 + 0.01}MB")
    assert config.optim.accumulation_steps == 8
    auto = resolved("data.global_batch_size=auto", f"runtime.device_memory={memory / 1e6 + 0.01}MB")
    assert (auto.data.global_batch_size, auto.optim.accumulation_steps) == (64, 8)
    assert made.peak(4) > 0.92 * memory
    # A saved run has the number.
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert (again.optim.accumulation_steps, again.runtime.device_memory) == (8, config.runtime.device_memory)
    assert resolved("optim.accumulation_steps=2", "runtime.device_memory=1MB").optim.accumulation_steps == 2


def test_what_fits_nowhere_is_a_mistake_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"^optim.accumulation_steps: auto finds .* 10 MB: .*; fits with parallel=fsdp"):
        resolved("runtime.device_memory=10MB")


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("speed.cuda_graphs=on speed.optimizer=fused speed.metrics=interval", "recompute"),
        ("speed.compile=model speed.compile_mode=reduce-overhead", "fsdp"),
        ("optim.lora_rank=4 optim.trainable=[blocks.0,head]", "fsdp"),
    ],
)
def test_no_way_out_is_one_that_the_settings_refuse(settings: str, refused: str) -> None:
    config = config_of(*VIT[1:], "precision=amp_bf16", *settings.split(), name=VIT[0])
    made = MemoryPlan.imagined(config, torch.device("cuda"), 1, 10)
    assert all(refused not in made.way_out(memory) for memory in (2e6, 10e6))


def test_ranks_that_divide_experts_look_for_a_way_out_in_their_groups() -> None:
    settings = ("data=synthetic", "precision=fp32", "parallel=fsdp", "parallel.expert_degree=2")
    config = config_of(*settings, name="vit_moe_digits")
    with group({"expert": 2}, None) as mesh:
        made = MemoryPlan(config, World(0, 2, torch.device("cpu"), experts=mesh), 10)
        assert made.way_out(1e3) == ""


def test_groups_that_are_gone_are_not_asked_for() -> None:
    """torch remembers how it divides tensors on a mesh, with the names of the mesh's groups."""

    def compute(mesh: DeviceMesh) -> None:
        network = small_vit(width=16, depth=1, heads=2)
        ((_, block),) = network.units()
        divide(network, [block], mesh["tensor"])
        block(torch.randn(1, 16, 16, requires_grad=True)).sum().backward()

    ranks = {"expert": 2, "tensor": 2}
    with imagined(4):
        dist.new_group([0, 1])
        compute(init_device_mesh("cpu", tuple(ranks.values()), mesh_dim_names=tuple(ranks)))
    with group(ranks, None) as mesh:
        compute(mesh)


def test_networks_of_one_class_are_measured_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one name in a configuration."""
    monkeypatch.setattr(race, "_measure", lambda config: race.Race("fp32", len(raced), None, 1.0))
    peaks, raced = [], []
    for width in (8, 800):
        module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, width), nn.Linear(width, 10))
        keys = ["model=given", f"model.module={give(module)}", "precision=fp32", "data.global_batch_size=8"]
        config = config_of(*keys)
        peaks.append(MemoryPlan(config, ALONE, 10).peak(1))
        raced.append(race.race(config).ratio)
    assert peaks[1] > 10 * peaks[0]
    assert raced == [0, 1]


def test_mixing_gets_two_images() -> None:
    mixes = ("augment.mixup_alpha=0.8", "data.global_batch_size=12")
    config = config_of(*VIT[1:], "precision=fp32", *mixes, name=VIT[0])
    assert MemoryPlan(config, ALONE, 10).microbatch_counts() == [6, 4, 3, 2, 1]


def test_stages_take_turns_with_four_microbatches_each() -> None:
    config = config_of(*VIT[1:], "precision=fp32", "parallel.pipeline_degree=2", "augment=none", name=VIT[0])

    def chosen(batch: int, ranks: int = 4) -> RunConfig:
        world = World(rank=0, size=ranks, device=CPU, pipeline=2)
        return resolve_auto(config.with_values(data={"global_batch_size": batch}), 1_000, world, classes=10)

    assert chosen(64).optim.accumulation_steps == 8
    assert chosen(12).optim.accumulation_steps == 6
    with pytest.raises(UserError, match=r"^data.global_batch_size: 6 cannot be divided .*; use a multiple of 4"):
        chosen(6)


@pytest.mark.slow
@pytest.mark.skipif(not build.has_compiler("cpu"), reason="needs a C++ compiler")
def test_compiled_blocks_hold_what_the_plan_says_of_their_budget() -> None:
    """By the bytes that autograd keeps. What they keep at least is their input."""
    for budget in (0.6, 0.3):
        torch._dynamo.reset()
        keys = ("speed.compile=blocks", "speed.recompute=budget", f"parallel.recompute_budget={budget}")
        config = configured(VIT, 16, 1, "precision=fp32", *keys)
        switches = build.switches(config, CPU)
        planned = MemoryPlan(config, ALONE, 10).activations(16, config.data.image_size, gradients_exist=False)
        network = build.model(config, 10, switches)
        build.wrap(config, network, ALONE, switches)
        block = network.units()[1][1]
        kept = {parameter.data_ptr(): 0 for parameter in block.parameters()}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            block(torch.randn(16, 64, 128, requires_grad=True))
        assert 0.85 < sum(kept.values()) / planned.blocks[1].held < 1


def test_the_time_does_not_grow_with_the_depth() -> None:
    counts = []
    for depth in (2, 12):
        config = configured(VIT, 4, 1, f"model.depth={depth}", "model.drop_path=0.1")
        made = MemoryPlan(config, ALONE, 10)
        activations = made.activations(4, config.data.image_size, gradients_exist=False)
        assert len(activations.blocks) == depth
        # The first block drops nothing.
        counts.append(len({id(block) for block in activations.blocks}))
    assert counts == [2, 2]


def test_what_was_emptied_before_counts_when_it_is_filled() -> None:
    tensor = torch.empty(100)
    tensor.untyped_storage().resize_(0)
    with LiveMemory() as memory:
        tensor.untyped_storage().resize_(400)
        tensor.untyped_storage().resize_(0)
    assert (memory.peak, memory.live) == (400, 0)


def test_what_is_compiled_is_not_counted() -> None:
    memory = StepMemory(ALONE, compiled=True)
    with memory.counting(list):
        torch.zeros(100)
    assert memory.counted is None
