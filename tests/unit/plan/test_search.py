"""The layouts of a cluster: what they need, take and exchange, and the command that shows them."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pycls_fast.choice import give
from pycls_fast.commands.train import PlanVerb
from pycls_fast.config import RunConfig, Verb, command_line
from pycls_fast.errors import UserError
from pycls_fast.plan import cluster as clusters
from pycls_fast.plan.cluster import accelerator, interval
from pycls_fast.plan.layout import Layout
from pycls_fast.plan.memory_plan import MemoryPlan
from pycls_fast.plan.report import Report
from pycls_fast.plan.search import Search
from tests.factories import config_of, script

VIT = ("data=synthetic", "model.depth=4", "data.global_batch_size=64")


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(config_of(*VIT), clusters.cluster("h100x16"), 10)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(16),
        Layout(1, 16),
        Layout(2, 8, accumulation=2),
        Layout(16, recompute="full"),
        Layout(1, 16, precision="fp32"),
    ],
)
def test_memory_is_the_memory_plan_of_that_run(search: Search, layout: Layout) -> None:
    config = search.config.with_values(**layout.values)
    whole = MemoryPlan.imagined(config, torch.device("cuda"), 16, 10).peak(layout.accumulation)
    assert search.outcome(layout).memory == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("precision=fp16", "shard"),
        ("speed.activation_compression=8bit", "recompute"),
        ("speed.cuda_graphs=on speed.optimizer=fused speed.metrics=interval", "accumulation"),
    ],
)
def test_no_layout_is_one_that_training_refuses(settings: str, refused: str) -> None:
    config = config_of(*VIT, *settings.split())
    found = list(Search(config, clusters.cluster("h100x8"), 10).layouts())
    assert {getattr(each, refused) for each in found if each.tensor * each.expert * each.pipeline == 1} == {
        getattr(Layout(), refused)
    }


def test_a_configuration_that_keeps_gathered_weights_has_legal_layouts() -> None:
    zero2 = (*VIT, "precision=fp32", "parallel=fsdp", "parallel.reshard_after_forward=false")
    found = list(Search(config_of(*zero2), clusters.cluster("h100x8"), 10).layouts())
    for layout in (Layout(8, precision="fp32"), Layout(1, 8, precision="fp32")):
        assert layout in found
        assert config_of(*zero2, *layout.overrides).parallel.reshard_after_forward == (layout.shard == 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit_digits", [*VIT, "speed.activation_compression=8bit"]),
        ("resnet_digits", ["data=synthetic", "speed.convolution=products", "precision=amp_bf16"]),
    ],
)
def test_what_chooses_by_size_is_measured_with_the_images_that_there_are(name: str, settings: list[str]) -> None:
    config = config_of(*settings, name=name)
    small = Search(config, clusters.cluster("h100x16"), 10)
    whole = MemoryPlan.imagined(small.config, small.device, 16, 10).peak(1)
    assert small.outcome(Layout(16, precision=small.precision)).memory == pytest.approx(whole, rel=0.05)


def test_an_optimizer_that_compiles_itself_has_a_plan() -> None:
    config = config_of(*VIT, "optim=adamw8bit", "optim.lr=0.01")
    assert Search(config, clusters.cluster("h100x16"), 10).outcome(Layout(16)).update > 0


def test_layouts_use_all_ranks_and_divide_the_batch(search: Search) -> None:
    found = list(search.layouts())
    assert {each.replicate * each.shard * each.tensor * each.pipeline for each in found} == {16}
    assert {each.shard for each in found if each.tensor * each.expert * each.pipeline == 1} == {1, 8, 16}
    assert {each.tensor for each in found} == {1, 2, 4}
    # Four blocks.
    assert {(each.pipeline, each.schedule) for each in found if each.pipeline > 1} == {
        (2, "1f1b"), (4, "1f1b"), (2, "interleaved_1f1b"), (2, "zbv"),
    }  # fmt: skip
    assert {each.expert for each in found} == {1}
    assert {each.accumulation for each in found if each.shard == 16} == {1, 2, 4}


def test_ways_of_recomputing_and_precisions_are_tried(search: Search) -> None:
    found = list(Search(search.config, clusters.cluster("h100x2"), 10, ("auto", "bf16_params")).layouts())
    ways = {(each.precision, each.recompute) for each in found if each.replicate == 2}
    assert ways == set(itertools.product(("amp_bf16", "bf16_params"), ("off", "selective", "full")))
    assert {each.recompute for each in found if each.tensor > 1} == {"off", "full"}
    off, selective, full = (search.outcome(Layout(16, recompute=way)) for way in ("off", "selective", "full"))
    assert off.compute < selective.compute < full.compute
    assert off.memory > selective.memory > full.memory


def test_a_schedule_of_pipelines_rules_out_no_other_layout() -> None:
    """Each pipeline has its own."""
    searches = (config_of(*VIT), config_of(*VIT, "parallel.pipeline_schedule=zbv"))
    found = [list(Search(config, clusters.cluster("h100x2"), 10).layouts()) for config in searches]
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "ranks"), [("rtx3090", 1), ("rtx4090", 16), ("h100", 1), ("a100", 3584)])
def test_a_cluster_is_a_name_and_a_number(name: str, ranks: int) -> None:
    found = clusters.cluster(name if ranks == 1 else f"{name}x{ranks}", 40e9)
    assert found.ranks == ranks
    assert found.accelerator == replace(accelerator(name), memory=40e9)


def test_ranks_of_a_cpu_share_its_memory(tmp_path: Path) -> None:
    links = "per_node: 8, inside: 1.0, network: 1.0, latency: [0, 0], jitter: 0, cores: 2, images_per_core: 1"
    file = tmp_path / "here.yaml"
    file.write_text(
        "accelerators: {here: {memory: 16.0e+9, flops: {'2': 1.0, '4': 1.0}, bandwidth: 1.0, device: cpu}}\n"
        f"clusters: {{here: {{accelerator: here, {links}}}}}\n"
    )
    found = [clusters.cluster(f"{file}:herex{ranks}").accelerator.memory for ranks in (1, 2, 8, 16)]
    assert found == [16e9, 8e9, 2e9, 2e9]
    assert clusters.cluster(f"{file}:herex2", 1e9).accelerator.memory == 1e9
    # A file's only cluster needs no name.
    assert [clusters.cluster(f"{file}{end}").ranks for end in ("", ":x2")] == [1, 2]


def test_float32_without_tf32_is_slower(search: Search) -> None:
    with_it, without = (search.outcome(Layout(16, precision=name)) for name in ("tf32", "fp32"))
    assert without.compute > 2 * with_it.compute
    assert without.peak_flops == 16 * 66.9e12


def on_cpus(search: Search, config: RunConfig | None = None, **cluster: Any) -> Search:
    """The same, or another configuration, on CPUs as fast as its GPUs."""
    device = replace(search.cluster.accelerator, device="cpu")
    return Search(config or search.config, search.cluster.model_copy(update={"accelerator": device, **cluster}), 10)


def test_ranks_of_a_cpu_share_its_cores(search: Search) -> None:
    own, shared = (on_cpus(search, cores=cores).outcome(Layout(1, 16, precision="fp32")) for cores in (8, 4))
    for part in ("compute", "update", "exchange"):
        assert getattr(shared, part) == pytest.approx(2 * getattr(own, part))


def test_what_ranks_exchange_of_weights_is_copied_too(search: Search) -> None:
    found = on_cpus(search, inside=math.inf, network=math.inf, latency=(0.0, 0.0), cores=8)
    device = found.cluster.accelerator
    for layout in (Layout(1, 16, precision="fp32"), Layout(16, precision="fp32")):
        copied = 2 * sum(found.exchanged_bytes(layout).values()) / (device.bandwidth * device.efficiency["pass"])
        assert found.outcome(layout).exchange == pytest.approx(copied, rel=0.2)
    # FSDP also copies what a rank shares with no other, gradients twice.
    alone = Layout(tensor=2, precision="fp32")
    kept = found._weights(alone)
    copied = 2 * (kept["all_gather"] + 2 * kept["reduce_scatter"]) / (device.bandwidth * device.efficiency["pass"])
    assert found.outcome(alone).exchange == pytest.approx(copied, rel=0.1)


@pytest.mark.slow
def test_experts_are_divided_beside_all_else() -> None:
    """What the configuration already has of a layout does not matter."""
    config = config_of(*VIT, "parallel=fsdp", "parallel.expert_degree=4", name="vit_moe_digits")
    search = Search(config, clusters.cluster("h100x16"), 10)
    assert {(each.expert > 1, each.tensor > 1, each.pipeline > 1) for each in search.layouts()} == set(
        itertools.product((False, True), repeat=3)
    )
    divided, whole = (Layout(1, 8, tensor=2, expert=expert) for expert in (2, 1))
    assert search.outcome(divided).exchange > search.outcome(whole).exchange
    assert search.outcome(divided).state < 1.01 * search.outcome(whole).state
    assert search.exchanged_bytes(divided)["all_reduce"] == search.exchanged_bytes(whole)["all_reduce"] > 0


def test_gradients_and_weights_are_exchanged_once_for_each_way_they_travel(search: Search) -> None:
    (sizes,) = search.one.sizes
    weights = sizes.trained
    assert search.exchanged_bytes(Layout(16)) == {"all_reduce": 4.0 * weights}
    assert str(Layout(2, 8)) == "replicate 2 x shard 8"
    assert str(Layout(2, pipeline=4)) == "pipeline 4 x replicate 2 (1f1b)"
    found = search.exchanged_bytes(Layout(2, 8))
    assert found["reduce_scatter"] == 4.0 * weights
    assert found["all_reduce"] == 4.0 * weights / 8
    assert 2.0 * weights < found["all_gather"] < 4.0 * weights
    narrow = Search(search.config.with_values(parallel={"compression": "bf16"}), search.cluster, 10)
    assert narrow.exchanged_bytes(Layout(16)) == {"all_reduce": 2.0 * weights}


def test_the_fastest_that_fits_comes_first_and_all_can_be_typed(search: Search) -> None:
    found = search.outcomes()
    assert found == sorted(found, key=lambda each: (not each.fits, each.step))
    assert found[0].loses_by(found[0]) == ""
    # One layout of each set of keys.
    by_keys = {tuple(each.partition("=")[0] for each in outcome.layout.overrides): outcome.layout for outcome in found}
    for each in by_keys.values():
        config = config_of(*VIT, *each.overrides)
        assert config.parallel.tensor_degree == each.tensor


@pytest.mark.slow
def test_published_speeds_are_predicted() -> None:
    for run in script("plan").PUBLISHED:
        for ranks, (predicted, seconds) in run.measured().items():
            assert predicted(accelerator(run.device)) == pytest.approx(seconds, rel=0.15), (run.name, ranks)


def test_intervals_are_those_of_the_comparison() -> None:
    page = Path(__file__).parents[3] / "docs" / "results" / "plan.md"
    low, high = interval("seconds")
    assert f"took {low:.2f} to {high:.2f} times the predicted seconds" in page.read_text()
    # Processes' memory, too: the last column is planned over measured.
    low, high = interval("memory")
    table = page.with_name("memory_plan.md").read_text().partition("plan / process")[2]
    ratios = [float(each) for each in re.findall(r"\| ([\d.]+) \|$", table, re.MULTILINE)]
    assert len(ratios) > 3
    assert all(low <= 1.0 / each <= high for each in ratios)


def test_a_report_says_how_sure_it_is_of_hours_and_cost(search: Search, tmp_path: Path) -> None:
    """On a CPU by what was measured on CPUs; and what the memory is for."""
    for device, what in (("cuda", "seconds"), ("cpu", "cpu_seconds")):
        accelerator = replace(search.cluster.accelerator, device=device)
        cluster = search.cluster.model_copy(update={"accelerator": accelerator})
        Report("", [search.outcome(Layout(1, 16))], 1000, cluster, price=2.0).write(tmp_path / "plan.json")
        (found,) = json.loads((tmp_path / "plan.json").read_text())
        for name in ("hours", "cost"):
            assert found[f"{name}_interval"] == pytest.approx([found[name] * each for each in interval(what)])
        assert sum(found["memory_parts"].values()) == pytest.approx(found["memory_bytes"])
    slow = replace(search.outcome(Layout(1, 16)), images=64, step=64 / 1.4)
    low, high = interval("cpu_seconds")
    (row,) = Report("", [slow], 100_000, cluster).rows(1)
    assert row["images/s (90%)"] == f"1.4 ({1.4 / high:.3g}-{1.4 / low:.3g})"
    hours = 1e5 * slow.step / 3600
    assert row["hours (90%)"] == f"1,270 ({hours * low:,.0f}-{hours * high:,.0f})"


def test_the_hosts_cores_limit_the_speed(search: Search) -> None:
    files = config_of("data=folder", "data.root=/nowhere", *VIT[1:])
    slow = search.cluster.model_copy(update={"images_per_core": 0.5, "cores": 12})
    found = Search(files, slow, 10).outcome(Layout(16))
    # Two nodes.
    assert found.images_per_second == found.loader == pytest.approx(12.0)
    faster = Search(files, search.cluster, 10).outcome(Layout(16))
    assert faster.step == search.outcome(Layout(16)).step
    # All wait as long: the one with most time left is the first.
    layouts = Search(files, slow, 10).outcomes()
    assert len({each.step for each in layouts if each.fits}) == 1
    assert layouts[0].busy == min(each.busy for each in layouts if each.fits)
    assert {each.loses_by(layouts[0]) for each in layouts if each.fits} == {""}
    # Small arrays take no time.
    assert Search(config_of("data=digits", *VIT[1:]), slow, 10).outcome(Layout(16)).loader is None


@pytest.mark.parametrize(("cores", "busy"), [(4, 1.0), (32, 0.25)])
def test_ranks_of_a_cpu_prepare_their_images_with_the_cores_that_compute(
    search: Search, cores: int, busy: float
) -> None:
    """All of a node, however few its ranks are."""
    few = {"images_per_core": 0.01, "cores": cores, "per_node": 12, "ranks": 8}
    files = config_of("data=folder", "data.root=/nowhere", *VIT[1:])
    found, alone = (on_cpus(search, each, **few).outcome(Layout(8, precision="fp32")) for each in (files, None))
    assert found.loader == pytest.approx(0.01 * cores)
    assert found.step == pytest.approx(busy * alone.step + 64 / found.loader)


def test_images_that_grow_take_their_mean_time() -> None:
    """And the memory of the largest."""
    small, large, grows = (
        Search(
            config_of("data=synthetic", "schedule.epochs=8", "data.image_size=64", *more, name="resnet_digits"),
            clusters.cluster("h100x1"),
            10,
        ).outcome(Layout(precision="amp_bf16"))
        for more in (["data.image_size=32"], [], ["data.image_size_schedule=[[0,32],[6,64]]"])
    )
    assert grows.memory == large.memory
    assert grows.compute == pytest.approx(0.75 * small.compute + 0.25 * large.compute, rel=0.1)
    assert grows.flops == pytest.approx(0.75 * small.flops + 0.25 * large.flops, rel=0.05)


def test_a_network_that_has_to_run_is_a_mistake() -> None:
    class Waits(nn.Linear):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            features = images_BCHW.mean(dim=(2, 3))
            return super().forward(-features if self.training and features.sum().item() < 0 else features)

    config = config_of(*VIT[::2], "model=given", f"model.module={give(Waits(3, 10))}")
    with pytest.raises(UserError, match=r"^model: plan cannot measure this network without running it \("):
        list(Search(config, clusters.cluster("h100"), 10).layouts())


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        (Layout(1, 16), "gathered"),
        (Layout(16), "gradients"),
        (Layout(8, tensor=1, pipeline=2, accumulation=2), "activations"),
        (Layout(1, 8, pipeline=2, accumulation=2), "gathered"),
    ],
)
def test_a_peak_has_its_parts(search: Search, layout: Layout, part: str) -> None:
    peak = search.outcome(layout).peak
    assert min(vars(peak).values()) >= 0.0
    assert getattr(peak, part) > 0.0
    (sizes,) = search.one.sizes
    assert (peak.gathered > 0) == (layout.shard > 1)
    if layout.pipeline == 1:
        # AdamW's two copies; `auto` is amp_bf16 on a GPU.
        assert peak.optimizer == pytest.approx(2 * 4.0 * sizes.trained / layout.shard, rel=0.5)
        assert peak.weights == pytest.approx(4.0 * sizes.parameters / layout.shard, rel=0.01)


def test_replicas_of_shards_exchange_behind_the_last_microbatch_alone(search: Search) -> None:
    slow = Search(search.config, search.cluster.model_copy(update={"network": 1e8}), 10)
    layout = Layout(2, 8, accumulation=4)
    whole = slow.cluster.reduce(slow.exchanged_bytes(layout)["all_reduce"], 2, apart=8)
    exposed = [slow.exchange_seconds(layout, 1, 0.0, share * whole) / whole for share in (0.0, 0.5)]
    assert 1.0 < exposed[0] < 1.2
    assert exposed[0] - exposed[1] < 0.5


def test_nothing_beats_the_frontier_in_both(search: Search) -> None:
    report = Report("", search.outcomes(), 1, search.cluster)
    found = report.frontier()
    assert len(found) > 2
    for each in report.outcomes:
        assert any(other.memory <= each.memory and other.images_per_second >= each.images_per_second for other in found)
    for one, other in itertools.pairwise(found):
        assert one.images_per_second > other.images_per_second
        assert one.memory > other.memory


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, verb: type[Verb] = PlanVerb) -> int:
    name = [] if "--config-name" in arguments else ["--config-name", "vit_digits"]
    monkeypatch.setattr("sys.argv", ["plan", *name, *arguments])
    with pytest.raises(SystemExit) as stopped:
        command_line(verb)
    return int(stopped.value.code or 0)


@pytest.mark.slow
def test_the_command_shows_writes_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*VIT, "cluster=h100x8", "price=2", "output=out", "top=3"], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "cost" in shown
    assert "in 90% of the cases" in shown
    found: list[dict[str, Any]] = json.loads((tmp_path / "out/plan.json").read_text())
    assert found[0]["loses_by"] == ""
    assert len(found) > 3
    low, high = found[0]["images_per_second_interval"]
    assert low < found[0]["images_per_second"] < high
    assert (tmp_path / "out/plan.png").stat().st_size > 10_000
    # `auto` epochs: those of so many images, in whole batches.
    assert run([*VIT, "schedule.epochs=auto", "images=6463", "output=out"], monkeypatch) == 0
    assert "1,000 steps of 64 images (6,463 an epoch)" in capsys.readouterr().out


def test_what_it_writes_is_the_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Alone: with the keys that were typed and the folder of the experiment, which has another layout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [vit_digits, _self_]\nparallel: {name: fsdp, tensor_degree: 2}\n"
    )
    typed = ["data=synthetic", "optim.lr=0.5", "parallel.name=fsdp", "model.depth=1", "data.global_batch_size=24"]
    mine = ["--config-dir", ".", "--config-name", "mine"]
    assert run([*mine, *typed, "cluster=h100x1", "write=chosen"], monkeypatch) == 0

    seen: list[RunConfig] = []

    class Train(Verb):
        def __call__(self, config: RunConfig) -> int:
            seen.append(config)
            return 0

    monkeypatch.chdir("/")
    assert run((tmp_path / "chosen").read_text().split(), monkeypatch, verb=Train) == 0
    assert (seen[0].data.global_batch_size, seen[0].model.depth, seen[0].optim.lr) == (24, 1, 0.5)
    assert (seen[0].config_name, seen[0].optim.accumulation_steps, seen[0].parallel.tensor_degree) == ("mine", 1, 1)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cluster=h100x8", "write=file/chosen"], "error: write: file/chosen cannot be written ("),
        (["cluster=b200x8"], "error: cluster: must be one of "),
        (
            ["cluster=two.yaml"],
            "error: cluster: must be one of two.yaml:a, two.yaml:b, with a number: h100x64; got two",
        ),
        (["cluster=h100x12"], "error: cluster: h100x12: nodes have 8 each"),
        (["cluster=~/here.yaml:cpux2"], "error: cluster: HERE/here.yaml cannot be read (No such file or directory); "),
        (
            ["cluster=wrong.yaml:cpux2"],
            "error: accelerators.here.memory: must be greater than 0; got 0 (wrong.yaml)\n"
            "error: clusters.here.jitter: missing; ",
        ),
        (["cluster=half.yaml:herex2"], "error: cluster: half.yaml: accelerators.here.flops: must have those of 2"),
        (["cluster=h100x64", "data.global_batch_size=12"], "error: data.global_batch_size: 12 cannot be divided"),
        (
            ["cluster=h100x64", "data.global_batch_size=4", "augment=deit"],
            "error: data.global_batch_size: 4 cannot be divided among 64 ranks with two images each, which mixing",
        ),
        (["data.global_batch_size=auto"], "error: data.global_batch_size: auto depends on the data; give a number"),
        (
            ["precisions=[fp32,fp16]", "speed.param_offload=cpu"],
            "error: speed.param_offload: cpu conflicts with precision.name=fp16: it keeps its own float32 weights",
        ),
        (
            ["cluster=h100x2", "runtime.device_memory=1MB"],
            "error: cluster: no layout of vit_digits fits into 92% of 1 MB",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "wrong.yaml").write_text(
        "accelerators: {here: {memory: 0, flops: {'2': 1.0e+12, '4': 1.0e+12}, bandwidth: 1.0e+9}}\n"
        "clusters: {here: {accelerator: here, per_node: 2, inside: 1.0, network: 1.0, latency: [0, 0], cores: 2}}\n"
    )
    links = "per_node: 2, inside: 1.0, network: 1.0, latency: [0, 0], jitter: 0.0, cores: 2, images_per_core: 9"
    (tmp_path / "two.yaml").write_text(
        f"accelerators: {{}}\nclusters: {{a: {{accelerator: x, {links}}}, b: {{accelerator: x, {links}}}}}\n"
    )
    (tmp_path / "half.yaml").write_text(
        "accelerators: {here: {memory: 1.0e+9, flops: {'4': 1.0e+12}, bandwidth: 1.0e+9}}\n"
        f"clusters: {{here: {{accelerator: here, {links}}}}}\n"
    )
    assert run([*VIT, *arguments], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(line.replace("HERE", str(tmp_path)))
