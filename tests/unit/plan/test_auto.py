"""What is left to the number of images, and to a race: precision, threads, whether to compile."""

from __future__ import annotations

import importlib
import itertools
import time
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.plan.race import Race, compile_if_it_pays, race
from pycls_fast.speed import Speed
from pycls_fast.train.resolving import with_precision
from tests.factories import config_of


def world(size: int = 1) -> World:
    return World(rank=0, size=size, device=torch.device("cpu"))


def finetune(*overrides: str, name: str = "finetune") -> RunConfig:
    return config_of("data.root=/nowhere", *overrides, name=name)


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "every"),
    [
        (3, 2, 50, 3),
        (48, 8, 27, 2),
        (255, 32, 23, 2),
        (256, 64, 40, 2),
        (1_281_167, 64, 10, 1),
    ],
)
def test_sizes_follow_the_number_of_images(images: int, batch: int, epochs: int, every: int) -> None:
    config = resolve_auto(finetune(), images, world())
    assert config.data.global_batch_size == batch
    assert config.schedule.epochs == epochs
    assert config.runtime.eval_every_epochs == every
    assert images // batch >= 1
    # A run resumes with what it began with: the numbers are the same the second time.
    assert resolve_auto(config, images, world()) == config


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 1), (8, 1), (2, 4)])
def test_the_batch_can_be_shared_out(ranks: int, steps: int) -> None:
    config = finetune(f"optim.accumulation_steps={steps}")
    for images in (ranks * steps, 48, 1_000, 100_000):
        batch = resolve_auto(config, images, world(ranks)).data.global_batch_size
        assert batch % (ranks * steps) == 0
        assert batch <= max(images, ranks * steps)
        assert batch // (ranks * steps) >= min(2, images // (ranks * steps))


@pytest.mark.parametrize("name", ["finetune", "linear_probe"])
@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.1), (2, 0.2), (10, 1.0), (50, 2.0)])
def test_the_warm_up_follows_the_epochs(name: str, epochs: int, warmup: float) -> None:
    config = resolve_auto(finetune(name=name).with_values(schedule={"epochs": epochs}), 10_000, world())
    assert config.schedule.warmup_epochs == pytest.approx(warmup)
    rate = build.schedule(config, steps_per_epoch=100)
    # The last step's rate is far below the highest, which the warm-up reaches.
    assert rate(rate.curve_steps - 1) < 0.01 * rate.lr
    assert rate(rate.warmup_steps) == pytest.approx(rate.lr, rel=0.01)


def test_a_warm_up_longer_than_what_was_chosen() -> None:
    with pytest.raises(UserError, match=r"schedule.warmup_epochs: 30 is longer than the training of 10 epochs"):
        resolve_auto(finetune("schedule.warmup_epochs=30"), 50_000, world())
    resolve_auto(finetune("schedule.warmup_epochs=20"), 48, world())


@pytest.mark.parametrize(
    ("model", "decay"), [("vit_s16", 0.75), ("resnet18", None), ("timm model.name=convnext_atto", 0.75),
                         ("timm model.name=tf_efficientnet_lite0", None)],
)  # fmt: skip
def test_the_family_decides_on_layer_decay(model: str, decay: float | None) -> None:
    config = finetune(*f"model={model}".split())
    assert resolve_auto(config, 100, world()).optim.layer_decay == decay
    given = finetune(*f"model={model}".split(), "optim.layer_decay=null")
    assert resolve_auto(given, 100, world()).optim.layer_decay is None


@pytest.mark.parametrize(("images", "frozen"), [(19_999, "frozen"), (20_000, "train")])
def test_few_images_leave_the_statistics_alone(images: int, frozen: str) -> None:
    assert resolve_auto(finetune("model=resnet18"), images, world()).optim.batch_norm == frozen
    assert resolve_auto(finetune("optim.batch_norm=train"), images, world()).optim.batch_norm == "train"


# Its function has the same name.
module = importlib.import_module("pycls_fast.plan.race")


@pytest.fixture(autouse=True)
def no_races_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_races", {})


def timed(monkeypatch: pytest.MonkeyPatch, fp32: float, bf16: float, *, of_two_threads: float = 1.0) -> list[str]:
    asked: list[str] = []

    def seconds(layer: Any, inputs: Any, form: str, clock: Any) -> float:
        asked.append(form)
        slower = of_two_threads if torch.get_num_threads() > 1 else 1.0
        return slower * (fp32 if form == "fp32" else bf16)

    monkeypatch.setattr(module, "_pass", seconds)
    return asked


@pytest.mark.parametrize(("bf16", "chosen"), [(0.3, "amp_bf16"), (0.95, "fp32"), (1.0, "fp32"), (40.0, "fp32")])
def test_the_faster_format_wins(monkeypatch: pytest.MonkeyPatch, bf16: float, chosen: str) -> None:
    asked = timed(monkeypatch, 1.0, bf16)
    config = config_of("precision=auto")
    assert with_precision(config, ALONE).precision.name == chosen
    # A hopeless one is tried on the largest product only.
    assert asked.count("amp_bf16") == (4 if bf16 > 4 else asked.count("fp32"))
    count = len(asked)
    assert with_precision(config, ALONE).precision.name == chosen
    assert len(asked) == count
    typed = config_of("precision=bf16")
    assert with_precision(typed, ALONE).precision.name == "bf16"


def test_a_pass_takes_what_it_takes_in_the_faster_format(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fp32, bf16 in ((1.0, 2.0), (2.0, 1.0), (1.0, 9.0), (9.0, 1.0)):
        timed(monkeypatch, fp32, bf16)
        monkeypatch.setattr(module, "_races", {})
        found.append(race(config_of()).seconds_per_image)
    # Of the whole network, or where the other one is hopeless of its products, each of which takes a second here.
    assert found[0] == found[1] < found[2] == found[3]


@pytest.mark.parametrize(("of_two", "threads"), [(0.6, 2), (1.4, 2), (5.0, 1)])
def test_busy_cores_get_fewer_threads(monkeypatch: pytest.MonkeyPatch, of_two: float, threads: int) -> None:
    timed(monkeypatch, 1.0, 1.0, of_two_threads=of_two)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(module, "cores_per_rank", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = with_precision(config_of("runtime.threads=null"), ALONE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found.runtime.threads == threads
    assert with_precision(config_of("runtime.threads=3"), ALONE).runtime.threads == 3


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "amp_fp16"), ((8, 0), "amp_bf16"), ((9, 0), "amp_bf16")])
def test_gpus_by_their_generation(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    world = World(rank=0, size=1, device=torch.device("cuda"))
    assert with_precision(config_of("precision=auto"), world).precision.name == chosen


@pytest.mark.parametrize("name", ["vit_s16", "resnet50", "finetune model=timm model.name=tf_efficientnet_lite0"])
def test_a_race_is_run_on_the_models_own_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Few enough not to be noticed, and the largest ones first."""
    experiment, *overrides = name.split()
    passes: list[Any] = []
    monkeypatch.setattr(module, "_pass", lambda layer, inputs, form, clock: passes.append(layer) or 1e-3)
    config = config_of("data.root=/nowhere", "data.image_size=64", *overrides, name=experiment)
    found = race(config)
    assert found.ratio == pytest.approx(1.0)
    *products, whole = dict.fromkeys(passes)
    assert isinstance(whole, Network)
    assert 3 <= len(products) <= 12
    assert all(parameter.device.type == "cpu" for layer in products for parameter in layer.parameters())
    network = build.counted_model(config, 10)
    shapes = {tuple(parameter.shape) for parameter in network.parameters()}
    assert all(tuple(layer.weight.shape) in shapes for layer in products)


def test_other_work_during_a_pass_does_not_choose_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    of_network: list[str] = []

    def seconds(layer: Any, inputs: Any, form: str, clock: Any) -> float:
        if isinstance(layer, Network):
            of_network.append(form)
        # The first float32 pass that counts is beside other work, and the second one in bfloat16.
        disturbed = {3: "fp32", 6: "amp_bf16"}.get(len(of_network)) == form
        return (1.0 if form == "fp32" else 1.05) * (3.0 if disturbed else 1.0)

    monkeypatch.setattr(module, "_pass", seconds)
    assert race(config_of("precision=auto")).format == "fp32"


@pytest.mark.parametrize(("threads", "busy"), [(1, False), (2, False), (2, True), (8, True)])
def test_one_thread_races_by_its_own_time(monkeypatch: pytest.MonkeyPatch, threads: int, busy: bool) -> None:
    """Another process interrupts passes; many threads race themselves, unless the cores are busy."""

    def seconds(layer: Any, inputs: Any, form: str, clock: Any) -> float:
        interrupted = form == "fp32" and clock is time.perf_counter
        slower = 5.0 if busy and torch.get_num_threads() > 1 else 1.0
        return slower * (1.0 if form == "fp32" else 2.0) * (12.0 if interrupted else 1.0)

    monkeypatch.setattr(module, "_pass", seconds)
    found = race(config_of("precision=auto", f"runtime.threads={threads}"))
    assert (found.format, found.ratio, found.threads) == ("fp32", 0.5, None)


def test_a_few_milliseconds_are_not_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight threads was held up."""
    monkeypatch.setattr(module, "_number_of_threads", lambda products, most: 8)
    count = itertools.count()

    def seconds(layer: Any, inputs: Any, form: str, clock: Any) -> float:
        return (1e-4 if form == "fp32" else 2e-4) * (50 if next(count) < 4 else 1)

    monkeypatch.setattr(module, "_pass", seconds)
    assert race(config_of("precision=auto")).ratio == 0.5


@pytest.mark.parametrize("training", [True, False])
def test_a_real_race_ends(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    backwards: list[Any] = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *arguments: backwards.append(backward(*arguments)))
    found = race(config_of(), training=training)
    assert found.ratio > 0
    assert found.seconds_per_image > 0
    assert bool(backwards) == training


@pytest.mark.parametrize(("images", "compiled"), [(1_000, "off"), (100_000, "model")])
def test_short_runs_are_not_compiled(monkeypatch: pytest.MonkeyPatch, images: int, compiled: str) -> None:
    monkeypatch.setattr(module, "race", lambda config, training: Race("amp_bf16", 3.0, None, 0.01))
    config = config_of("precision=amp_bf16", "speed.compile=null")
    chosen = Speed(compile="model", gelu="polynomial")
    found = compile_if_it_pays(config, chosen, ALONE, images=images, flops=1e9)
    assert found.compile == compiled
    assert found.gelu == ("torch" if compiled == "off" else "polynomial")
    typed = config_of("precision=amp_bf16", "speed.compile=model")
    assert compile_if_it_pays(typed, chosen, ALONE, images=images, flops=1e9) == chosen


@pytest.mark.parametrize("typed", ["recompute=budget", "gelu=polynomial", "compile_mode=max-autotune-no-cudagraphs"])
def test_short_runs_are_compiled_for_a_switch_that_needs_it(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """It would do nothing, and be refused with speed.compile=off."""
    monkeypatch.setattr(module, "race", lambda config, training: Race("amp_bf16", 3.0, None, 0.01))
    config = config_of("precision=amp_bf16", "speed=fast", "speed.compile=null", f"speed.{typed}")
    chosen = config.speed.replace(compile="model")
    assert compile_if_it_pays(config, chosen, ALONE, images=1_000, flops=1e9) == chosen
