"""One training step: its microbatches, what the host reads and when, and the same step replayed as a graph."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycls_fast import build
from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.speed import SWITCHES, Speed
from pycls_fast.train import assemble
from pycls_fast.train.assemble import make_step
from pycls_fast.train.graphs import WARM_UP, Action
from pycls_fast.train.metrics import Clock, TrainMetrics
from tests.factories import config_of, nudge

CPU = torch.device("cpu")
aten = torch.ops.aten
# item() and what has to know values to know its result's size.
OPERATORS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten._unique2}
# With booleans as indices: how many are true is read.
MASKED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# What copies to the host without an operator when it is there already.
METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class Methods(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METHODS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """All but the step counters of optimizers, which torch keeps on the host."""

    def __init__(self, found: list[str], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.found = found
        self._counters = {id(values["step"]) for values in optimizer.state.values() if "step" in values}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func.overloadpacket in MASKED and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or (func.overloadpacket in OPERATORS and id(args[0]) not in self._counters):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(optimizer: torch.optim.Optimizer) -> Iterator[list[str]]:
    """Names of what the host waits for."""
    found: list[str] = []
    with Methods(found), Operators(found, optimizer):
        yield found


class OperatorTape(TorchDispatchMode):
    """Records operators with their arguments; replays them on the same tensors, into the same memory.

    Like a CUDA graph it repeats whatever number of the host was passed. Unlike one it computes while it records: the
    first replay, of the same step, does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.fresh = False

    def warm_up(self, action: Action) -> None:
        action()

    def record(self, action: Action) -> None:
        with self:
            action()
        self.fresh = True

    def replay(self) -> None:
        if self.fresh:
            self.fresh = False
            return
        with torch.no_grad():
            for function, arguments, named, result in self.calls:
                again = function(*arguments, **named)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        # Lists are emptied by who passed them.
        kept = tuple(list(a) if isinstance(a, list) else a for a in args)
        self.calls.append((func, kept, named, list(result) if isinstance(result, list) else result))
        return result


@dataclass
class Made:
    """A step of a small network that is on its device, and what it is made of."""

    step: Any
    network: nn.Module
    switches: Speed
    tape: OperatorTape


def made(name: str, *overrides: str, graphed: bool = False) -> Made:
    config = config_of(*overrides, name=name)
    switches = build.switches(config, CPU).replace(cuda_graphs="on" if graphed else "off")
    network = build.model(config, 10, switches)
    nudge(network)
    network = place_model(network, ALONE, memory_format=switches.memory_format).train()
    tape = OperatorTape()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "CudaRecorder", lambda device: tape)
        return Made(make_step(config, network, ALONE, switches, steps_per_epoch=2), network, switches, tape)


def batch(seed: int, images: int = 8) -> Batch:
    return synthetic_batch(images, 16, 10, erase_probability=0.5, seed=seed, device=CPU)


VIT = ("vit_digits", "model.patch_size=4", "model.width=16", "model.depth=2", "model.mlp_width=24", "model.heads=2")
RESNET = ("resnet_digits", "model.depth=18")
# All that depends on where in a run it happens.
COMMON = (
    "data.image_size=16", "data.global_batch_size=8", "model.drop_path=0.3", "optim.clip_norm=1.0",
    "optim.ema_decay=0.9", "augment.mixup_alpha=0.2", "augment.cutmix_alpha=1.0", "augment.mix_probability=0.7",
    "augment.erase_probability=0.5", "augment.erase_value=noise", "schedule.warmup_epochs=2", "schedule.epochs=9",
)  # fmt: skip


def reads(*arguments: str) -> list[str]:
    """Of the second step of training; the first makes the optimizer's state."""
    name, *overrides = arguments
    one = made(name, *COMMON, *overrides)
    metrics, parts = TrainMetrics(CPU, read=one.switches.metrics), one.step.accumulation_steps
    batches = [batch(number, 8 // parts) for number in range(parts)]
    one.step(0, batches, metrics)
    with host_reads(one.step.optimizer) as found:
        one.step(1, batches, metrics)
    return found


@pytest.mark.parametrize("preset", ["reference", "fast"])
@pytest.mark.parametrize(
    "arguments",
    [VIT, (*VIT, "optim.accumulation_steps=2"), (*VIT, "precision=amp_bf16"), RESNET],
    ids=["vit", "vit-microbatches", "vit-bf16", "resnet"],
)
def test_a_step_reads_nothing(arguments: tuple[str, ...], preset: str) -> None:
    assert reads(*arguments, f"speed.preset={preset}", "speed.metrics=interval") == []


# In their order: a later one on the CPU asks for those before it.
HOST_STAGES = ["normalize_on", "erase_on", "mix_on"]


@pytest.mark.slow
def test_every_switch_reads_nothing_but_the_one_that_is_for_it() -> None:
    """Each value that a CPU runs without a compiler, alone."""
    counted = {}
    for switch in SWITCHES.values():
        model = VIT if "vit" in switch.models else RESNET
        for value in switch.values:
            compiles = value == "budget" or switch.name in ("compile", "compile_mode")
            if switch.device.get(value) or compiles:
                continue
            if switch.name in ("optimizer_compile", "cross_entropy", "gelu"):
                continue
            chosen = [f"speed.{switch.name}={value}"]
            if value == "cpu" and switch.name in HOST_STAGES:
                chosen = [f"speed.{name}=cpu" for name in HOST_STAGES[: HOST_STAGES.index(switch.name) + 1]]
            # What drops samples on the host knows there which ones; it reads them from nowhere.
            if value != "skip":
                counted[f"{switch.name}={value}"] = reads(*model, "speed.preset=fast", *chosen)
    # The loss and the norm of the gradients, once each.
    assert counted.pop("metrics=step") == ["aten._local_scalar_dense.default"] * 2
    assert counted == {key: [] for key in counted}
    assert len(counted) > 25


MICROBATCHES = 4


def of_microbatches(*overrides: str) -> tuple[Any, nn.Module, list[Batch]]:
    sizes = ("model.width=32", "model.mlp_width=32", "model.depth=2", "data.image_size=16", "data.global_batch_size=16")
    one = made("vit_digits", *sizes, f"optim.accumulation_steps={MICROBATCHES}", *overrides)
    return one.step, one.network, [batch(number, 4) for number in range(MICROBATCHES)]


@pytest.mark.parametrize("precision", ["bf16_params", "bf16"])
def test_gradients_in_16_bits_are_added_to_those_of_the_masters_without_a_wide_copy(precision: str) -> None:
    step, network, batches = of_microbatches(f"precision={precision}")
    largest = max(parameter.numel() for parameter in network.parameters())
    copies: list[list[int]] = []
    take = step.weights.take_gradients

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.aten._to_copy.default:
                copies[-1].append(args[0].numel())
            return function(*args, **(kwargs or {}))

    def counted() -> None:
        copies.append([])
        with Copies():
            take()

    step.weights.take_gradients = counted
    step(0, batches, TrainMetrics(CPU))
    assert len(copies) == MICROBATCHES
    assert all(size < largest for sizes in copies for size in sizes)


def test_a_step_takes_all_its_microbatches_and_no_others() -> None:
    step, network, batches = of_microbatches("speed=fast")
    for count in (MICROBATCHES - 1, MICROBATCHES + 1):
        with pytest.raises(ValueError, match="zip"):
            step(0, (2 * batches)[:count], TrainMetrics(CPU))
    step(0, batches, TrainMetrics(CPU))
    # Nothing of the gradients is left for the next forward pass, where memory peaks.
    assert all(parameter.grad is None for parameter in network.parameters())


OF_KIND = {"vit": VIT, "resnet": RESNET, "moe": ("vit_moe_digits", *VIT[1:])}
STEPS = 9


def of_kind(kind: str, *overrides: str, graphed: bool) -> Made:
    name, *sizes = OF_KIND[kind]
    return made(name, *sizes, "speed.preset=fast", *COMMON, *overrides, graphed=graphed)


def trained(kind: str, *overrides: str, graphed: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    one = of_kind(kind, *overrides, graphed=graphed)
    metrics = TrainMetrics(CPU)
    numbers = []
    for position in range(STEPS):
        one.step(position, [batch(position)], metrics)
        read = metrics.read(ALONE)
        facts = read.pop("facts")
        assert bool(facts) == (kind == "moe")
        numbers.append(read | facts)
    return numbers, {**one.network.state_dict(), **{f"average of {n}": v for n, v in one.step.ema.values.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("vit", ()),
        ("vit", ("optim.ema_every_steps=2", "loss=bce", "optim=sgd", "optim.lr=0.05")),
        ("vit", ("augment.mixup_alpha=0", "augment.cutmix_alpha=0", "precision=fp16_master")),
        ("vit", ("precision=bf16_params", "model.classifier=pooled")),
        ("resnet", ("speed.ema=loop",)),
        ("moe", ()),
    ],
    ids=["vit", "vit-bce-sgd", "vit-fp16-unmixed", "vit-bf16", "resnet", "moe"],
)
def test_replayed_steps_are_the_steps(kind: str, overrides: tuple[str, ...]) -> None:
    expected, plain = trained(kind, *overrides, graphed=False)
    found, state = trained(kind, *overrides, graphed=True)
    for right, number in zip(expected, found, strict=True):
        assert number == pytest.approx(right, rel=2e-5)
    assert len({round(number["loss"], 5) for number in found}) == STEPS
    assert state.keys() == plain.keys()
    # Of all that was trained; a key's bias has no gradient but rounding, which AdamW makes steps of.
    names = [name for name in plain if not name.endswith("key.bias") and plain[name].is_floating_point()]
    difference = sum(float((state[name].double() - plain[name].double()).norm() ** 2) for name in names) ** 0.5
    size = sum(float(plain[name].double().norm() ** 2) for name in names) ** 0.5
    assert difference <= (1e-5 if "bf16" not in " ".join(overrides) else 1e-3) * size
    assert all(torch.equal(state[n], plain[n]) for n in plain if not plain[n].is_floating_point())


def test_the_host_reads_nothing_and_what_the_graph_reads_stays_where_it_is() -> None:
    one = of_kind("vit", graphed=True)
    step, metrics, places = one.step, TrainMetrics(CPU), []
    for position in range(STEPS):
        with host_reads(step.optimizer) as found:
            step(position, [batch(position)], metrics)
        # The first step makes the optimizer's state, whose counters are not known before.
        assert position == 0 or found == []
        assert step.fixed.keys() == {"images_BCHW", "labels_B", "mixed_B", "lam", "ema_share"}
        held = [*step.fixed.values(), metrics._sums, *one.network.parameters(), *step.ema.values.values()]
        held += [value for state in step.optimizer.state.values() for value in state.values()]
        held += [group["lr"] for group in step.optimizer.param_groups]
        places.append([tensor.data_ptr() for tensor in held])
        if position == WARM_UP:
            recorded = len(one.tape.calls)
    assert all(place == places[0] for place in places[1:])
    assert recorded == len(one.tape.calls) > 100
    assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(step.schedule(STEPS - 1))


def test_several_ranks_are_not_recorded() -> None:
    config = config_of()
    switches = build.switches(config, CPU).replace(cuda_graphs="on")
    two = World(rank=0, size=2, device=CPU)
    with pytest.raises(UserError, match=r"^speed\.cuda_graphs: .* not for 2; use speed\.cuda_graphs=off"):
        make_step(config, build.model(config, 10, switches), two, switches, 4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "fp16_master"])
def test_twenty_steps_read_step_by_step_give_the_same_bits(precision: str) -> None:
    found: list[tuple[list[dict[str, float]], dict[str, Tensor]]] = []
    for read in ("step", "interval"):
        # With a scale that overflows at first: skipped steps have no norm that counts.
        scale = ["precision.loss_scale_start=1e9"] if precision == "fp16_master" else []
        one = of_kind("vit", f"precision={precision}", *scale, graphed=False)
        metrics = TrainMetrics(CPU, read=read)
        numbers = []
        for position in range(20):
            one.step(position, [batch(position)], metrics)
            if position % 4 == 3:
                numbers.append(metrics.read(ALONE))
        found.append((numbers, dict(one.network.state_dict())))
    (expected, plain), (numbers, state) = found
    assert repr(numbers) == repr(expected)
    assert len({each["loss"] for each in numbers}) == 5
    assert sum(each["skipped_steps"] for each in numbers) == (
        0 if precision != "fp16_master" else pytest.approx(10, abs=9)
    )
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_the_numbers_of_a_network_are_means_over_the_steps() -> None:
    metrics = TrainMetrics(CPU)
    for value in (0.25, 1.0):
        metrics.add_facts({"dropped": torch.tensor(value)})
        metrics.add_step(torch.tensor(1.0))
    assert metrics.read(ALONE)["facts"] == {"dropped": 0.625}
    assert metrics.read(ALONE)["facts"] == {}


def test_the_rank_that_waited_longest_for_data_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, so that their own numbers hide what the step waits for."""

    class Three(World):
        def gather(self, value: Any) -> list[Any]:
            return [0.25, 2.0, value]

    monkeypatch.setattr(time, "perf_counter", lambda: 4.0)
    assert Clock(waited=0.5, images=8, steps=1).read(Three(2, 3, CPU))["data_wait_fraction"] == 0.5
