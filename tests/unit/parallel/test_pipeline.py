"""Stages: which blocks a rank has, what it draws, and how long it waits."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations, islice, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pycls_fast.models.layers import SinCos2dPositions
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.pipeline import Pipeline, bubble, orders, partition_blocks, split_into_stages, stage_ranks
from pycls_fast.parallel.world import World, floating_buffers
from pycls_fast.strategies import ScheduleName
from tests.factories import imagined

RANKS = 4


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    with imagined(RANKS):
        yield


def network(**more: Any) -> VisionTransformer:
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 8, "heads": 2, "mlp_width": 8, "depth": 8}
    return VisionTransformer(**sizes, num_classes=3, drop_path=0.5, init="trunc_normal", **more)


def stages(rank: int, schedule: ScheduleName, **more: Any) -> tuple[VisionTransformer, Pipeline]:
    mesh = init_device_mesh("cpu", (RANKS, 1, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    world = World(rank, RANKS, torch.device("cpu"), mesh=mesh, pipeline=RANKS)
    whole = network(**more)
    return whole, split_into_stages(whole, world, schedule, [1] * 10, averages=True)


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_the_bubble_is_that_of_the_paper(fake_ranks: None, microbatches: int) -> None:
    """Narayanan et al., PTD-P, 2021, section 2.2: (p-1)/m and (p-1)/(v m); halved backward passes fill it."""

    def idle(schedule: ScheduleName) -> float:
        group = stages(0, schedule)[1].group
        return bubble(orders(schedule, group, microbatches), len(stage_ranks(schedule, RANKS)))

    for schedule, turns in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        assert idle(schedule) == pytest.approx((RANKS - 1) / (turns * microbatches))
    for schedule in ("interleaved_zero_bubble", "zbv") if microbatches == 8 else ():
        assert idle(schedule) < (RANKS - 1) / (4 * microbatches)


def test_there_and_back() -> None:
    assert stage_ranks("zbv", 3) == [0, 1, 2, 2, 1, 0]
    assert stage_ranks("interleaved_1f1b", 3) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("zbv", 2)])
def test_no_other_division_has_less_work_in_its_longest_stage(schedule: ScheduleName, ranks: int) -> None:
    """Of all that there are; blocks that are alike are divided evenly."""
    costs = torch.randint(1, 9, (20, 9), generator=torch.Generator().manual_seed(0)).tolist()
    for before, *blocks, after in [*costs, [12, *[3] * 8, 0]]:
        parts = partition_blocks(schedule, ranks, (before, *blocks, after))
        assert [owner for owner, _ in parts] == stage_ranks(schedule, ranks)
        assert [index for _, own in parts for index in own] == list(range(len(blocks)))
        work = [before + blocks[0], *blocks[1:-1], blocks[-1] + after]
        ways = [[0, *cuts, len(work)] for cuts in combinations(range(1, len(work)), len(parts) - 1)]
        longest = [max(sum(work[i:j]) for i, j in pairwise(bounds)) for bounds in ways]
        assert max(sum(work[index] for index in own) for _, own in parts) == min(longest)
    assert {len(own) for _, own in partition_blocks(schedule, ranks, (0, *[1] * 12, 0))} == {12 // len(parts)}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_every_parameter_has_one_rank(fake_ranks: None, schedule: ScheduleName) -> None:
    """Under its name in the whole network."""
    parts = [dict(stages(rank, schedule)[0].named_parameters()) for rank in range(RANKS)]
    whole = dict(network().named_parameters())
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert all(part[name].shape == whole[name].shape for part in parts for name in part)


def test_statistics_are_averaged_within_a_stage(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other stages have other buffers, or none; a table of positions never changes."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    world = World(0, RANKS, torch.device("cpu"), mesh=mesh, pipeline=2)
    norm = nn.Sequential(nn.BatchNorm2d(2), SinCos2dPositions(2, 2, 8))
    asked: list[list[int]] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        ranks = dist.get_process_group_ranks(group)
        asked.append(ranks)
        tensor.mul_(len(ranks))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    world.average_buffers(floating_buffers(norm))
    assert asked == [[0, 1], [0]] * 2
    assert torch.equal(norm.get_buffer("0.running_var"), torch.ones(2))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_one_after_another_are_the_network(fake_ranks: None, schedule: ScheduleName) -> None:
    """With the same draws of drop-path. The generator of another device, from which its compiled blocks draw, is where
    it would be after the blocks before."""
    images_BCHW = torch.randn(5, 3, 8, 8)
    torch.manual_seed(0)
    whole = network()
    device, reference = torch.Generator(), torch.Generator()
    states = [(each, each.get_state()) for each in (torch.default_generator, device)]
    expected, draws = whole.train()(images_BCHW), iter(whole.draws())
    features = images_BCHW
    cuts = {}
    for index, rank in enumerate(stage_ranks(schedule, RANKS)):
        torch.manual_seed(0)
        cuts.setdefault(rank, stages(rank, schedule)[1])
        stage = cuts[rank].stages[sum(owner == rank for owner in stage_ranks(schedule, RANKS)[:index])]
        stage.train().generator_states = [states]
        for generator in (torch.default_generator, device):
            torch.rand(3, generator=generator)
        features = stage(features)
        assert torch.equal(device.get_state(), reference.get_state())
        for _ in range(sum(islice(draws, len(stage.units)))):
            torch.rand(5, generator=reference)
    assert not torch.equal(whole.eval()(images_BCHW), expected)
    torch.testing.assert_close(features, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["batch_first", "batch_second"])
def test_gradients_that_are_sent_are_contiguous(fake_ranks: None, layout: str) -> None:
    """Backends refuse others."""
    stage = stages(RANKS - 1, "1f1b", layout=layout)[1].stages[0]
    features = torch.randn(5, 4, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(stage.train()(features).sum(), [features])
    assert gradient.any()
    assert gradient.is_contiguous()


def test_a_step_leaves_no_images_behind() -> None:
    """The loss, which knows the targets, holds them."""
    with imagined(1):
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
        world = World(0, 1, torch.device("cpu"), mesh=mesh)
        pipeline = split_into_stages(network(), world, "1f1b", [1] * 10, averages=False)
        images = [torch.randn(2, 3, 8, 8) for _ in range(2)]
        left = weakref.ref(images[0])
        tried = [
            pipeline.run(images, lambda logits, _, position, seen=images: logits.sum(), (), nullcontext)
            for _ in range(2)
        ]
        del images
        assert left() is None
        # By torch, on uninitialised memory, of which the watchdog must not speak.
        assert tried == [True, False]
