"""A training step reads nothing back from the device: on an accelerator every read would stop the host in its lead.

Counted on the CPU, where the same operators mean the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel import ALONE, place_model
from pycls_fast.speed import SWITCHES
from pycls_fast.train.assemble import make_step
from pycls_fast.train.metrics import TrainMetrics

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


class HostReads(TorchDispatchMode):
    """Names of what the host waits for, but for the step counters of optimizers, which torch keeps on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.found: list[str] = []
        self._methods = Methods(self.found)
        state = optimizer.state.values() if optimizer is not None else []
        self._counters = {id(values["step"]) for values in state if "step" in values}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func.overloadpacket in MASKED and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or (func.overloadpacket in OPERATORS and id(args[0]) not in self._counters):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)


def reads(name: str, *overrides: str) -> list[str]:
    """Of the second step of training; the first makes the optimizer's state."""
    config = load_config(
        name,
        ["data.image_size=16", "data.global_batch_size=8", "model.drop_path=0.3", "optim.clip_norm=1.0",
         "optim.ema_decay=0.9", "augment.mixup_alpha=0.2", "augment.cutmix_alpha=1.0", "augment.erase_probability=0.5",
         "schedule.warmup_epochs=0", *overrides],
    )  # fmt: skip
    chosen = build.switches(config, CPU)
    network = place_model(build.model(config, 10, chosen), ALONE, memory_format=chosen.memory_format).train()
    step = make_step(config, network, ALONE, chosen, steps_per_epoch=4)
    metrics = TrainMetrics(CPU, read=chosen.metrics)
    parts = config.optim.microbatches
    batches = [synthetic_batch(8 // parts, 16, 10, erase_probability=0.5, seed=n, device=CPU) for n in range(parts)]
    step(0, batches, metrics)
    with HostReads(step.optimizer) as counted:
        step(1, batches, metrics)
    return counted.found


VIT = ("vit_digits", "model.patch_size=4", "model.width=16", "model.depth=2", "model.mlp_width=24", "model.heads=2")
RESNET = ("resnet_digits", "model.depth=18")


@pytest.mark.parametrize("preset", ["reference", "fast"])
@pytest.mark.parametrize(
    "arguments",
    [VIT, (*VIT, "optim.accumulation_steps=2"), (*VIT, "precision=amp_bf16"), RESNET],
    ids=["vit", "vit-microbatches", "vit-bf16", "resnet"],
)
def test_a_step_reads_nothing(arguments: tuple[str, ...], preset: str) -> None:
    name, *overrides = arguments
    assert reads(name, *overrides, f"speed.preset={preset}", "speed.metrics=interval") == []


# In their order: a later one on the CPU asks for those before it.
HOST_STAGES = ["normalize_on", "erase_on", "mix_on"]


@pytest.mark.slow
def test_every_switch_reads_nothing_but_the_one_that_is_for_it() -> None:
    """Each value that a CPU runs without a compiler, alone."""
    counted = {}
    for switch in SWITCHES.values():
        name, *overrides = VIT if "vit" in switch.models else RESNET
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
                counted[f"{switch.name}={value}"] = reads(name, *overrides, "speed.preset=fast", *chosen)
    # The loss and the norm of the gradients, once each.
    assert counted.pop("metrics=step") == ["aten._local_scalar_dense.default"] * 2
    assert counted == {key: [] for key in counted}
    assert len(counted) > 25


def test_a_log_interval_reads_once_and_is_seen() -> None:
    metrics = TrainMetrics(CPU)
    metrics.add_loss(torch.tensor(1.0))
    with HostReads() as counted:
        metrics.read(ALONE)
    assert counted.found == ["tolist"]
    for read in (lambda x: x.item(), bool, lambda x: int(x.sum()), lambda x: x[x > 0]):
        with HostReads() as counted:
            read(torch.ones(1))
        assert len(counted.found) == 1
