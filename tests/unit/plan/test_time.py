"""Kernels that are counted on fake tensors, and the seconds that they take on a device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pycls_fast.parallel.world import ALONE
from pycls_fast.plan import calibrate as calibrating
from pycls_fast.plan import cluster as clusters
from pycls_fast.plan.calibrate import calibrate, dispatch, links
from pycls_fast.plan.cluster import Accelerator, Kernels, TimedWork, errors, fitted
from pycls_fast.plan.memory_plan import MemoryPlan
from pycls_fast.plan.operators import CountWork, Work
from tests.factories import config_of

CPU = torch.device("cpu")
DEVICE = Accelerator(
    memory=1e9, flops={2: 1e12, 4: 5e11}, bandwidth=1e11, units=8, kernel=1e-6, efficiency={"taps": 0.05}
)


def counted(*overrides: str, images: int = 4) -> tuple[float, float]:
    """FLOPs of the forward and of the backward pass of a configuration."""
    config = config_of("data=synthetic", "precision=fp32", *overrides)
    made = MemoryPlan(config, ALONE, 10)
    found = made.activations(images, config.data.image_size, gradients_exist=False)
    forward = [*found.around.forward, *(work for block in found.blocks for work in block.kernels.forward)]
    backward = [*found.around.backward, *(work for block in found.blocks for work in block.kernels.backward)]
    return Kernels.of(forward).flops, Kernels.of(backward).flops


def passes(network: nn.Module, images: int = 4) -> list[Work]:
    """The kernels of a forward and a backward pass."""
    network.zero_grad()
    with CountWork() as found:
        network(torch.randn(images, 3, 8, 8, requires_grad=True)).sum().backward()
    return found.found


def test_products_are_those_that_torch_counts() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, 2), nn.Flatten(), nn.Linear(16, 5))
    with FlopCounterMode(display=False) as known:
        network(torch.randn(4, 3, 8, 8, requires_grad=True)).sum().backward()
    assert Kernels.of(passes(network)).flops == known.get_total_flops()


def test_groups_divide_the_products_of_a_convolution() -> None:
    # (torch's counter takes the backward pass of groups for whole products.)
    whole, grouped = (Kernels.of(passes(nn.Conv2d(3, 12, 3, groups=groups, bias=False))) for groups in (1, 3))
    assert whole.flops == 3 * grouped.flops == 3 * 2 * 4 * 36 * 12 * 27
    assert "grouped" not in {work.kind for work in passes(nn.Conv2d(3, 12, 3))}


@pytest.mark.parametrize(
    ("channels", "groups", "kind"),
    [(64, 1, "convolution"), (64, 64, "depthwise"), (64, 32, "direct"), (64, 16, "grouped"), (2112, 32, "grouped")],
)
def test_convolutions_are_of_the_kind_that_has_a_kernel(channels: int, groups: int, kind: str) -> None:
    layer, images_BCHW = nn.Conv2d(channels, channels, 3, groups=groups, bias=False), torch.randn(1, channels, 3, 3)
    with CountWork() as found:
        layer(images_BCHW).sum().backward()
    assert {work.kind for work in found.found} == {kind, "pass"}


def test_views_are_free_and_updates_in_place_move_what_they_read_and_write() -> None:
    values, step = torch.ones(10, 10), torch.ones(10, 10)
    with CountWork() as found:
        values.t().reshape(100).view(50, 2)
        torch._foreach_add_([values], [step])
    # The transposed view is copied once.
    assert [work.bytes for work in found.found] == [800, 1200]


def test_recomputing_adds_the_blocks_forward_pass() -> None:
    forward, backward = counted()
    again, more = counted("speed.recompute=full")
    assert again == forward
    assert backward < more < backward + forward
    assert more > backward + 0.8 * forward


def test_kernels_of_other_numbers_of_images_are_affine() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    few, many, asked = (Kernels.of(passes(network, images)) for images in (4, 8, 20))
    made = few.between(many, 4.0)
    assert (made.numbers == asked.numbers).all()
    assert DEVICE.seconds(made) == DEVICE.seconds(asked) > DEVICE.seconds(few)


def test_a_product_that_leaves_tiles_empty_takes_longer_for_its_flops() -> None:
    def rate(m: int, n: int) -> float:
        table = Kernels.of([Work("product", 0.0, 1, m, n, 4096, 2)])
        return table.flops / DEVICE.seconds(table)

    assert rate(1024, 1024) > 1.5 * rate(1024, 72)
    # 9 waves of 8 tiles for 65 tiles.
    assert rate(1024, 1024) > rate(128 * 65, 128) > rate(128, 128) / 8
    # Plain multiply-adds need no tiles.
    assert rate(1024, 1) == pytest.approx(DEVICE.flops[4] * 0.05, rel=0.1)


def test_compiled_code_moves_less_and_does_not_wait_for_the_host() -> None:
    device = replace(DEVICE, launch=1e-3, fused=0.5)
    table = Kernels.of([Work("pass", 1e8)] * 4)
    assert device.seconds(table) == pytest.approx(4e-3 + 4e-6)
    assert device.seconds(table, compiled=True) == pytest.approx(2e-3 + 4e-6)
    assert device.seconds(Kernels.of([Work("pass", 8.0)] * 4)) == pytest.approx(4e-3)


def test_the_host_thinks_about_each_kernel_of_a_divided_layer() -> None:
    table = Kernels.of([Work("pass", 1e8)] * 4)
    cuda, cpu = (replace(DEVICE, device=device, dispatch=1e-2) for device in ("cuda", "cpu"))
    assert cuda.seconds(table) == cpu.seconds(table) == pytest.approx(4e-3 + 4e-6)
    assert cuda.seconds(table, divided=True) == pytest.approx(4e-2)
    assert cpu.seconds(table, divided=True) == pytest.approx(4.4e-2 + 4e-6)
    assert dispatch() > 1e-6


def test_a_product_takes_the_longer_of_arithmetic_and_bytes_and_on_a_cpu_both() -> None:
    table = Kernels.of([Work("product", 1e9, 1, 1024, 1024, 1024, 4)])
    cuda = replace(DEVICE, units=1, kernel=0.0)
    assert cuda.seconds(table) == pytest.approx(1e-2)
    assert replace(cuda, device="cpu").seconds(table) == pytest.approx(1e-2 + 2.0 * 1024**3 / 5e11)


def test_depthwise_convolutions_take_their_bytes_or_the_taps_of_large_kernels() -> None:
    device = replace(DEVICE, efficiency={"depthwise": 0.5, "taps": 0.1}, kernel=0.0)

    def seconds(side: int) -> float:
        return device.seconds(Kernels.of([Work("depthwise", 1e6, 64, 1024, 1, side * side, 2)]))

    assert seconds(1) == seconds(2) == pytest.approx(1e6 / 5e10)
    assert seconds(9) == pytest.approx(2.0 * 64 * 1024 * 81 / 5e10)


def test_without_tf32_products_are_slower_and_depthwise_convolutions_are_not() -> None:
    device = replace(DEVICE, float32=DEVICE.flops[4] / 8, efficiency={"taps": 0.1}, kernel=0.0)
    for kind, times in (("product", 8.0), ("depthwise", 1.0)):
        table = Kernels.of([Work(kind, 1.0, 64, 1024, 1024, 1024)])
        assert device.without_tf32.seconds(table) == pytest.approx(times * device.seconds(table))
        assert DEVICE.without_tf32.seconds(table) == pytest.approx(DEVICE.seconds(table))


def test_fitting_finds_the_constants_that_made_the_rows() -> None:
    true = replace(DEVICE, efficiency={"product": 0.5, "pass": 0.7}, kernel=5e-6)
    tables = [
        Kernels.of([Work("product", 1e6, 1, 2.0**m, 512, 512, 2), Work("pass", 10.0**size)] * 3)
        for m in range(8, 14)
        for size in range(4, 9)
    ]
    rows = [TimedWork(partial(Accelerator.seconds, kernels=table), true.seconds(table)) for table in tables]
    started = replace(true, efficiency={"product": 0.8, "pass": 0.5}, kernel=1e-6)
    assert abs(errors(started, rows)).max() > 0.3
    # The start has some weight.
    assert abs(errors(fitted(started, rows), rows)).max() < 0.05


def test_a_ring_takes_its_bytes_and_its_hops() -> None:
    cluster = clusters.cluster("h100x16")
    one = clusters.cluster("h100x8")
    assert one.gather(8e9, 8) == pytest.approx(7e9 / one.inside + 7 * one.latency[0])
    assert cluster.reduce(8e9, 16) > one.reduce(8e9, 8)
    # Neighbours in other nodes share the network with seven more groups.
    assert cluster.gather(8e9, 2, apart=8) == pytest.approx(4e9 / (cluster.network / 8) + cluster.latency[1])
    assert cluster.gather(8e9, 1) == 0.0
    slow = one.model_copy(update={"gathers": 0.5})
    assert slow.gather(8e9, 8) == pytest.approx(14e9 / one.inside + 7 * one.latency[0])
    assert slow.reduce(8e9, 8) == one.reduce(8e9, 8)


def test_an_all_reduce_of_many_nodes_waits_for_the_logarithm_of_their_hops() -> None:
    cluster = clusters.cluster("h100x3584")
    inside, across = cluster.latency
    assert cluster.reduce(8.0, 3584) == pytest.approx(2 * (7 * inside + 9 * across), rel=1e-3)
    assert cluster.gather(8.0, 3584) == pytest.approx(3136 * inside + 447 * across, rel=1e-3)
    # Of many bytes a ring sends a part less.
    assert clusters.cluster("h100x8").reduce(8e9, 8) < 2 * 8e9 / cluster.inside


def test_statistics_are_read_for_in_training_only() -> None:
    features, network = torch.randn(4, 3, 8, 8), nn.BatchNorm2d(3)
    moved = []
    for training in (True, False):
        network.train(training)
        with CountWork() as found, torch.no_grad():
            network(features)
        moved.append(sum(work.bytes for work in found.found))
    assert moved[0] - moved[1] == pytest.approx(features.nbytes, rel=0.05)


def test_a_gpu_computes_longer_than_its_host_takes_to_launch() -> None:
    """By its data sheet, in all that `plan calibrate` times there: times of the host say nothing of the GPU."""
    h200 = clusters.accelerator("h200")
    for images in calibrating._IMAGES["cuda"]:
        with FakeTensorMode():
            for layer, features in calibrating._examples(images):
                gradient = torch.ones_like(layer(features.requires_grad_()))
                with CountWork() as found:
                    layer(features).backward(gradient)
                kernels = Kernels.of(found.found)
                assert h200.seconds(kernels, compiled=True) > h200.launch * len(found.found), layer


def test_a_gpus_convolutions_are_timed_in_the_format_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "seconds", lambda run, device: 1.0)
    strides: dict[str, Any] = {}
    for device in ("cpu", "meta"):
        layer = nn.Conv2d(8, 8, 3, groups=2)
        layer.register_forward_hook(lambda layer, inputs, out, key=device: strides.update({key: inputs[0].stride()}))
        calibrating._timed(layer, torch.zeros(2, 8, 4, 4), torch.device(device))
    assert strides == {"cpu": (128, 16, 4, 1), "meta": (128, 1, 32, 8)}


def test_a_hop_between_gpus_is_half_of_a_small_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a CPU meet late, and are timed with arithmetic."""

    def spawn(function: Any, args: tuple[Any, ...], nprocs: int) -> None:
        *_, backend, found = args
        assert backend == "nccl"
        for size, seconds in ((2**12, 2e-5), (2**24, 1e-3)):
            found[size] = dict.fromkeys(("reduce", "gather", "scatter"), seconds)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(calibrating.mp, "spawn", spawn)
    assert links()["latency"] == [1e-5, 1e-5]


@pytest.mark.slow
def test_the_links_of_this_machine_are_a_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    before, passes = torch.get_num_threads(), calibrating._block_passes

    def noting(*args: Any) -> Any:
        threads.append(torch.get_num_threads())
        return passes(*args)

    monkeypatch.setattr(calibrating, "_block_passes", noting)
    torch.set_num_threads(2)
    try:
        calibrate(tmp_path / "here.yaml")
        # As the ranks that they are compared with.
        assert threads == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    here = clusters.cluster(f"{tmp_path / 'here.yaml'}:herex2")
    assert here.accelerator.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert 0 < here.gather(2**24, 2) < 10
    assert 0.05 < here.gathers < 5
    assert 1 < here.images_per_core < 1e5
