"""What optimizers learn, saved by parameter name and taken up again, bit for bit; and training that gets somewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.optimizers import load_named_state, named_state, set_lr
from tests.factories import assert_same_bits, compiles, config_of, nudge

CPU = torch.device("cpu")
EVERY = [
    (name, implementation)
    for name, facts in Chosen.choices().items()
    for implementation in facts.implementations
    if name != "adamw8bit"
]

# Rates for a network of this size on the digits.
RATES = {"sgd": 0.1, "adamw": 1e-2, "lamb": 1e-1, "lion": 5e-3, "adafactor": 1e-2, "muon": 1e-2, "adamw8bit": 1e-2}


def configured(name: str, *overrides: str) -> RunConfig:
    return config_of(
        f"optim={name}", f"optim.lr={RATES[name]}", "optim.weight_decay=0.05", "model.width=32", "model.mlp_width=32",
        "model.depth=2", "schedule.warmup_epochs=0", *overrides,
    )  # fmt: skip


class Training:
    """A network and its optimizer; step k's batch and rate depend on k alone."""

    def __init__(self, config: RunConfig) -> None:
        switches = build.switches(config, CPU)
        self.network = build.model(config, 10, switches)
        nudge(self.network)
        self.optimizer = build.optimizer(config, self.network, switches)
        self.schedule = build.schedule(config, steps_per_epoch=1)
        size = config.data.image_size
        generator = torch.Generator().manual_seed(6)
        labels = torch.arange(40) % 10
        self.patterns = torch.randn(10, 3, *size, generator=generator)
        self.images = self.patterns[labels] + 0.5 * torch.randn(40, 3, *size, generator=generator)
        self.labels = labels

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            set_lr(self.optimizer, self.schedule(step))
            chosen = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:24]
            loss = nn.functional.cross_entropy(self.network(self.images[chosen]), self.labels[chosen])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        named = named_state(self.optimizer, self.network.named_parameters())
        return {"model": self.network.state_dict(), "optimizer": named}

    def load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        load_named_state(self.optimizer, self.network.named_parameters(), state["optimizer"])


def in_full(state: dict[str, Any]) -> Any:
    """The state with the values that moments in 8 bits stand for."""

    def decoded(value: Any) -> Any:
        is_packed = isinstance(value, torch.Tensor) and type(value) is not torch.Tensor
        return value.dequantize() if is_packed else value

    return tree_map(decoded, state)


def there_and_back(config: RunConfig, again: RunConfig | None = None) -> None:
    whole, before, after = Training(config), Training(config), Training(again or config)
    whole.run(0, 6)
    before.run(0, 3)
    after.run(0, 1)
    torch.save(before.state(), file := io.BytesIO())
    file.seek(0)
    after.load(torch.load(file, weights_only=True))
    after.run(3, 6)
    assert_same_bits(in_full(after.state()), in_full(whole.state()))
    assert not torch.equal(before.network.head.weight, whole.network.head.weight)


@pytest.mark.parametrize(("name", "implementation"), EVERY)
def test_three_steps_and_three_are_six(name: str, implementation: str) -> None:
    there_and_back(configured(name, f"speed.optimizer={implementation}", "optim.layer_decay=0.8"))


@pytest.mark.slow
def test_a_resnet_under_muon_and_adafactor() -> None:
    for name in ("muon", "adafactor"):
        config = config_of(f"optim={name}", "schedule.warmup_epochs=0", name="resnet_digits")
        there_and_back(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_state_is_by_name_whatever_the_groups(name: str) -> None:
    """Other groups number the parameters in another order."""
    # The loop treats each tensor alone, so its bits don't depend on the groups either.
    split, plain = (configured(name, "speed.optimizer=loop", *more) for more in (["optim.layer_decay=1.0"], []))
    there_and_back(split, plain)
    there_and_back(plain, split)


@compiles
@pytest.mark.parametrize("name", [name for name, facts in Chosen.choices().items() if facts.compilable])
def test_compiled_steps_resume_and_learn(name: str) -> None:
    torch._dynamo.reset()
    config = configured(name, "speed.optimizer_compile=on", "schedule.epochs=30")
    assert build.switches(config, CPU).optimizer_compile == "on"
    there_and_back(config)
    losses = Training(config).run(0, 30)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@compiles
def test_eight_bits_resume_and_learn() -> None:
    pytest.importorskip("torchao")
    config = configured("adamw8bit", "model.width=64")
    there_and_back(config)
    training = Training(config)
    training.run(0, 1)
    kept = training.state()["optimizer"]
    assert any(type(value) is not torch.Tensor for values in kept.values() for value in values.values())
    losses = Training(configured("adamw8bit", "schedule.epochs=30")).run(0, 30)
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
