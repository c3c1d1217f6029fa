"""A step that is replayed: on the CPU from a tape of operators, which keeps numbers of the host as a graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel import ALONE, World, place_model
from pycls_fast.train.assemble import make_step
from pycls_fast.train.graphs import WARM_UP, Action, GraphedStep, Tape
from pycls_fast.train.metrics import TrainMetrics
from tests.unit.train.test_host_reads import HostReads

CPU = torch.device("cpu")
SMALL = {
    "vit": (
        "vit_digits",
        "model.patch_size=4",
        "model.width=16",
        "model.depth=2",
        "model.mlp_width=24",
        "model.heads=2",
    ),
    "resnet": ("resnet_digits", "model.depth=18"),
}
COMMON = (
    "speed.preset=fast", "data.image_size=16", "data.global_batch_size=8", "model.drop_path=0.3", "optim.clip_norm=1.0",
    "optim.ema_decay=0.9", "augment.mixup_alpha=0.2", "augment.cutmix_alpha=1.0", "augment.mix_probability=0.7",
    "augment.erase_probability=0.5", "augment.erase_value=noise", "schedule.warmup_epochs=2", "schedule.epochs=9",
)  # fmt: skip
STEPS = 9


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


def made(kind: str, *overrides: str, graphed: bool) -> tuple[Any, nn.Module, OperatorTape]:
    name, *sizes = SMALL[kind]
    config = load_config(name, [*sizes, *COMMON, *overrides])
    switches = build.switches(config, CPU)
    switches = switches.replace(cuda_graphs="on" if graphed else "off")
    network = build.model(config, 10, switches)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    network = place_model(network, ALONE, memory_format=switches.memory_format).train()
    tape = OperatorTape()
    return make_step(config, network, ALONE, switches, steps_per_epoch=2, recorder=tape), network, tape


def batch(step: int) -> Any:
    return synthetic_batch(8, 16, 10, erase_probability=0.5, seed=step, device=CPU)


def trained(kind: str, *overrides: str, graphed: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    step, network, _ = made(kind, *overrides, graphed=graphed)
    metrics = TrainMetrics(CPU)
    numbers = []
    for position in range(STEPS):
        step(position, [batch(position)], metrics)
        numbers.append(metrics.read(ALONE))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    return numbers, {**state, **{f"average of {name}": value.clone() for name, value in step.ema.values.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("vit", ()),
        ("vit", ("optim.ema_every_steps=2", "loss=bce", "optim=sgd", "optim.lr=0.05")),
        ("vit", ("augment.mixup_alpha=0", "augment.cutmix_alpha=0", "precision=fp16_master")),
        ("vit", ("precision=bf16_params", "model.classifier=pooled")),
        ("vit", ("augment.mix_mode=elem",)),
        ("resnet", ("speed.ema=loop",)),
    ],
    ids=["vit", "vit-bce-sgd", "vit-fp16-unmixed", "vit-bf16", "vit-elem", "resnet"],
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
    step, network, tape = made("vit", graphed=True)
    metrics = TrainMetrics(CPU)
    places = []
    for position in range(STEPS):
        with HostReads(step.optimizer) as counted:
            step(position, [batch(position)], metrics)
        # The first step makes the optimizer's state, whose counters are not known before.
        assert position == 0 or counted.found == []
        kept: Tape = step.tape
        assert kept.mixed_B is not None
        held = [kept.images_BCHW, kept.labels_B, kept.mixed_B, kept.lam, kept.ema_share, metrics._sums]
        held += [*network.parameters(), *step.ema.values.values()]
        held += [value for state in step.optimizer.state.values() for value in state.values()]
        held += [group["lr"] for group in step.optimizer.param_groups]
        places.append([tensor.data_ptr() for tensor in held])
        if position == WARM_UP:
            recorded = len(tape.calls)
    assert all(place == places[0] for place in places[1:])
    assert recorded == len(tape.calls) > 100
    assert float(step.optimizer.param_groups[0]["lr"]) == pytest.approx(step.schedule(STEPS - 1))


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused() -> None:
    step, _, _ = made("vit", "augment.mixup_alpha=0", "augment.cutmix_alpha=0", graphed=True)
    metrics = TrainMetrics(CPU)
    step(0, [batch(0)], metrics)
    with pytest.raises(ValueError, match="recorded with images"):
        step(1, [synthetic_batch(4, 16, 10, erase_probability=0.5, seed=1, device=CPU)], metrics)
    with pytest.raises(ValueError, match="the metrics that it was recorded with"):
        step(1, [batch(1)], TrainMetrics(CPU))
    with pytest.raises(ValueError):
        step(1, [batch(1), batch(2)], metrics)
    assert isinstance(step, GraphedStep)
    config = load_config("vit_digits", [])
    switches = build.switches(config, CPU).replace(cuda_graphs="on")
    two = World(rank=0, size=2, device=CPU)
    with pytest.raises(UserError, match=r"^speed\.cuda_graphs: .* this run has 2; use speed\.cuda_graphs=off"):
        make_step(config, build.model(config, 10, switches), two, switches, 4, recorder=OperatorTape())
