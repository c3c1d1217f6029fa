"""What only a CUDA device can show: the step never waits for it, and it computes what the CPU computes."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from pycls_fast import build, speed
from pycls_fast.config import load_config
from pycls_fast.data.prepare import to_device
from pycls_fast.data.sources.eval_sets import EvalSet
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.launch import start_world
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.precision import LEVELS
from pycls_fast.strategies import Parallel
from pycls_fast.train import train
from pycls_fast.train.assemble import make_step
from pycls_fast.train.display import Display
from pycls_fast.train.evaluate import evaluate
from pycls_fast.train.graphs import WARM_UP
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.start import start_run
from tests.integration.runs import TINY, records, run_process
from tests.integration.test_resume import arguments, assert_same_run, start_and_interrupt
from tests.processes import Started

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Without what is there to ask the host: speed.metrics=step, speed.param_offload=cpu and recorded steps' first three.
SWITCHES = (
    "",
    "speed=reference speed.metrics=interval",
    "speed=meta2022 parallel=single precision=amp_fp16 speed.optimizer=fused speed.metrics=interval",
    "speed.normalize_on=cpu speed.input_copy=blocking",
    "speed.normalize_on=cpu speed.erase_on=cpu speed.mix_on=cpu",
    "speed.layout=batch_second speed.qkv=fused",
    "speed.attention=reference speed.sequence_padding=8",
    "speed.sequence_padding=64",
    "speed.drop_path_compute=skip",
    "speed.recompute=full",
    "speed.recompute=selective",
    "speed.recompute=budget speed.compile=blocks",
    "speed.activation_offload=cpu",
    "speed.activation_compression=8bit",
    "speed.compile=blocks speed.cross_entropy=fused",
    "speed.optimizer=foreach speed.ema=loop speed.clip=loop",
    "speed.cuda_graphs=on",
    "speed.cuda_graphs=on speed.compile=blocks",
)

# All that can run on a GPU.
IDENTICAL = ["speed.recompute=full", "speed.recompute=selective"] + [
    f"speed.{switch.name}={value}"
    for switch in speed.SWITCHES.values()
    if switch.numerics == "identical"
    for value in switch.values[1:]
    if switch.device.get(value) != "cpu"
]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # torchao 0.18 asks for autocast's format by its old name.
    "ignore:torch.get_autocast_gpu_dtype:DeprecationWarning",
)
@pytest.mark.parametrize(
    ("config_name", "precision", "chosen"),
    [
        *((name, precision, "") for name in ("vit_digits", "resnet_digits") for precision in LEVELS),
        *(("vit_digits", "amp_bf16", chosen) for chosen in SWITCHES[1:]),
        ("resnet_digits", "amp_bf16", "speed.cuda_graphs=on"),
        ("vit_digits", "fp16_master", "speed.cuda_graphs=on"),
    ],
)
def test_step_never_waits_for_the_device(
    tmp_path: Path, digits: Path, config_name: str, precision: str, chosen: str
) -> None:
    """torch raises at every synchronising call between the first copy and the end of the step."""
    if precision == "fp8":
        if config_name == "resnet_digits" or torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("no float8 here")
        pytest.importorskip("torchao")
    parts = 1 if "cuda_graphs" in chosen else 2
    overrides = [
        *([] if "precision=" in chosen else [f"precision={precision}"]),
        *chosen.split(),
        f"data.root={digits}",
        f"run_dir={tmp_path}",
        "runtime.device=cuda",
        "optim.ema_decay=0.9",
        "optim.clip_norm=1.0",
        f"optim.accumulation_steps={parts}",
        "augment.mixup_alpha=0.4",
        "augment.cutmix_alpha=1.0",
        "augment.erase_probability=0.5",
        "augment.erase_value=noise",
        "model.drop_path=0.1",
    ]
    config = load_config(config_name, overrides)
    with (
        start_world("cuda", Parallel(name="single")) as world,
        start_run(config, world, Display(speaks=False, mode="plain")) as run,
    ):
        loader = build.train_loader(config, run.sources["train"], world, run.switches, start_step=0, steps=9)
        batches = to_device(loader, world.device, mode=run.switches.input_copy)
        metrics = TrainMetrics(world.device)
        if "cross_entropy=fused" in chosen:
            # Unmixed batches have a loss of their own to compile; of small images CutMix may take an empty box.
            replace(run.step, mixer=None)(0, list(islice(batches, parts)), metrics)
        # The first steps create optimizer state, choose kernels and compile; the fourth may be recorded.
        free = WARM_UP + 1 if "cuda_graphs" in chosen else 2
        for step in range(8):
            microbatches = list(islice(batches, parts))
            torch.cuda.set_sync_debug_mode("error" if step >= free else "default")
            try:
                run.step(step, microbatches, metrics)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert metrics.read(world)["loss"] > 0
        loss = evaluate(run.scorer(lambda: None), EvalSet(run.sources["val"]), "evaluating val").loss
        assert loss is not None
        assert loss > 0


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16"])
def test_follows_the_cpu(tmp_path: Path, digits: Path, precision: str) -> None:
    common = [*TINY, f"data.root={digits}", "schedule.max_steps=10", "optim.clip_norm=1.0"]
    assert train(load_config("vit_digits", [*common, f"run_dir={tmp_path / 'cpu'}", "runtime.device=cpu"])) == 0
    on_cuda = [*common, f"run_dir={tmp_path / 'cuda'}", "runtime.device=cuda", f"precision={precision}"]
    assert train(load_config("vit_digits", on_cuda)) == 0
    tolerance = 1e-4 if precision == "fp32" else 0.02
    losses = [[record["loss"] for record in records(tmp_path / name, "train")] for name in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert records(tmp_path / "cuda", "train")[-1]["memory_peak_bytes"] > 0


def deterministic_run(run_dir: Path, digits: Path, *overrides: str) -> None:
    """20 steps in a process of its own."""
    chosen = ("runtime.device=cuda", "runtime.deterministic=true", "schedule.max_steps=20", *overrides)
    run_process(arguments(run_dir, digits, *chosen), cwd=run_dir.parent)


@pytest.fixture(scope="module")
def slow_twin(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """The run with every switch at its slow, plain value."""
    run_dir = tmp_path_factory.mktemp("slow") / "run"
    deterministic_run(run_dir, digits, "speed=reference")
    return run_dir


@pytest.mark.parametrize("chosen", IDENTICAL)
def test_identical_switches_train_to_the_same_bits(tmp_path: Path, digits: Path, slow_twin: Path, chosen: str) -> None:
    deterministic_run(tmp_path / "run", digits, "speed=reference", chosen)
    assert_same_run(tmp_path / "run", slow_twin)


def test_deterministic_runs_go_on_with_the_same_bits(tmp_path: Path, digits: Path, started: Started) -> None:
    """In processes of their own."""
    chosen = ("runtime.device=cuda", "runtime.deterministic=true")
    whole, killed = (arguments(tmp_path / name, digits, *chosen) for name in ("whole", "killed"))
    run_process(whole, cwd=tmp_path)
    start_and_interrupt(started, killed, tmp_path / "killed", 8, signal.SIGKILL)
    assert "resumed from" in run_process(killed, cwd=tmp_path).stdout
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def losses_of(tmp_path: Path, digits: Path, name: str, *overrides: str) -> list[float]:
    run_dir = tmp_path / name
    common = [*TINY, f"data.root={digits}", f"run_dir={run_dir}", "runtime.device=cuda", "schedule.max_steps=20"]
    assert train(load_config("vit_digits", [*common, *overrides])) == 0
    return [record["loss"] for record in records(run_dir, "train")]


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp_fp16", "fp16_master", "bf16_params"])
def test_a_recorded_run_is_the_run(tmp_path: Path, digits: Path, precision: str) -> None:
    """Evaluation and checkpoints come between replays; without drop-path, whose samples differ."""
    recipe = (f"precision={precision}", "model.drop_path=0", "optim.ema_decay=0.9", "augment.mixup_alpha=0.2")
    plain = losses_of(tmp_path, digits, "plain", *recipe)
    graphed = losses_of(tmp_path, digits, "graphed", *recipe, "speed.cuda_graphs=on")
    assert graphed == pytest.approx(plain, abs=1e-4 if precision == "fp32" else 0.02)


def test_replays_drop_other_samples_each_time_and_the_same_in_the_next_run() -> None:
    """One batch again and again, with weights that stay: only drop-path tells the steps apart."""
    device = torch.device("cuda", torch.cuda.current_device())
    world = World(rank=0, size=1, device=device)
    config = load_config("vit_digits", [*TINY, "model.drop_path=0.5", "optim.lr=1e-12", "speed.cuda_graphs=on"])
    runs = []
    for _ in range(2):
        switches = build.switches(config, device)
        network = build.model(config, 10, switches)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        network = place_model(network, world, memory_format=switches.memory_format).train()
        step = make_step(config, network, world, switches, steps_per_epoch=10)
        batch = synthetic_batch(16, 8, 10, erase_probability=0.0, seed=1, device=device)
        metrics, losses = TrainMetrics(device), []
        for number in range(WARM_UP + 8):
            step(number, [batch], metrics)
            losses.append(metrics.read(world)["loss"])
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert len({round(loss, 6) for loss in runs[0][WARM_UP:]}) == 8


@pytest.mark.parametrize("first", ["normalize_on", "erase_on", "mix_on"])
def test_what_the_workers_prepare_trains_alike(tmp_path: Path, digits: Path, first: str) -> None:
    stages = ["normalize_on", "erase_on", "mix_on"]
    recipe = ("augment.erase_probability=0.3", "augment.mixup_alpha=0.2")
    on_host = [f"speed.{name}=cpu" for name in stages[: stages.index(first) + 1]]
    plain = losses_of(tmp_path, digits, "device", *recipe)
    assert losses_of(tmp_path, digits, "host", *recipe, *on_host) == pytest.approx(plain, abs=1e-4)
