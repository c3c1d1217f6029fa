"""What the catalogue says that an optimizer can do, it does: on shards, on flattened weights, sent to another rank.

LAMB is not given a head of zeros, which its trust ratio would leave as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.train.tasks.lr_range import lr_range_test
from tests.factories import config_of, make_optimizer

SHAPES = [(7,), (3, 5), (4, 3, 2, 2)]
STEPS = 5
CHOICES = Chosen.choices().items()
EVERY = [(name, which, facts) for name, facts in CHOICES for which in facts.implementations]
SHARDED = [(name, which) for name, which, facts in EVERY if facts.shardable and not facts.elementwise]
FLAT = [(name, which) for name, which, facts in EVERY if facts.elementwise]
# What a send between ranks takes: plain tensors, and Python's numbers.
SENT = (Tensor, bool, int, float, type(None))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def made(name: str, implementation: str, weights: list[nn.Parameter]) -> Optimizer:
    groups = [{"params": weights, "weight_decay": 0.1, "lr_scale": 0.5}]
    return make_optimizer(name, groups, lr=0.01, implementation=implementation)


def learned(optimizer: Optimizer, weights: list[nn.Parameter], gradients: list[list[Tensor]]) -> list[Tensor]:
    """The weights after a step with each of these gradients; the rate rises."""
    for step, each in enumerate(gradients):
        set_lr(optimizer, 0.01 * (step + 1))
        for weight, gradient in zip(weights, each, strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


def plainly(name: str, implementation: str) -> list[Tensor]:
    weights = [nn.Parameter(value) for value in values(0)]
    return learned(made(name, implementation, weights), weights, [values(1 + step) for step in range(STEPS)])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "implementation"), SHARDED)
def test_what_is_shardable_updates_dtensors(name: str, implementation: str) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def sharded(each: list[Tensor]) -> list[Tensor]:
        return [distribute_tensor(value, mesh, [Shard(0)]) for value in each]

    weights = [nn.Parameter(value) for value in sharded(values(0))]
    optimizer = made(name, implementation, weights)
    ours = learned(optimizer, weights, [sharded(values(1 + step)) for step in range(STEPS)])
    for one, start, expected in zip(ours, values(0), plainly(name, implementation), strict=True):
        assert isinstance(one, DTensor)
        assert not torch.equal(start, expected)
        torch.testing.assert_close(one.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), FLAT)
def test_what_is_flat_computes_the_same_on_flattened_weights(name: str, implementation: str) -> None:
    def flattened(each: list[Tensor]) -> list[Tensor]:
        return [torch.cat([value.flatten() for value in each])]

    weights = [nn.Parameter(value) for value in flattened(values(0))]
    optimizer = made(name, implementation, weights)
    (ours,) = learned(optimizer, weights, [flattened(values(1 + step)) for step in range(STEPS)])
    (expected,) = flattened(plainly(name, implementation))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, facts in CHOICES if facts.sends_state])
def test_state_that_can_be_sent_is_of_plain_tensors(name: str) -> None:
    config = config_of(f"optim={name}")
    switches = build.switches(config, torch.device("cpu"))
    network = build.model(config, 10, switches)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build.optimizer(config, network, switches)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert kept
    assert {type(value) for value in kept} <= set(SENT), name


@pytest.mark.parametrize(
    ("name", "which"), [(name, which) for name, which, facts in EVERY if facts.implementations[1:]]
)
def test_an_implementation_is_the_one_that_runs(name: str, which: str) -> None:
    (group,) = made(name, which, [nn.Parameter(torch.zeros(2))]).param_groups
    assert [key for key in ("foreach", "fused") if group.get(key)] == [which] * (which != "loop")


TINY = ["data.image_size=8", "model.width=32", "model.depth=1", "model.mlp_width=64"]


def sweep(config: RunConfig) -> int:
    return lr_range_test(config, steps=3, lr_min=1e-4, lr_max=1e-2, output=config.run_dir)


LAMB = "optim=lamb", r"^optim\.name: lamb hardly changes head, which begins with zeros"
FROZEN = "optim.trainable=[norm]", r"^optim\.trainable: does not name head, .* would stay as it begins"


@pytest.mark.parametrize(("use", "key", "line"), [(train, *LAMB), (sweep, *LAMB), (train, *FROZEN)])
def test_a_head_that_weights_do_not_fill_is_refused(
    tmp_path: Path, use: Callable[[RunConfig], int], key: str, line: str
) -> None:
    small = [*TINY, "data=synthetic", "data.image_size=8", "data.num_workers=0", "data.synthetic_classes=3"]
    small += ["data.synthetic_train_images=64", "data.global_batch_size=64", "model.init=jax", "runtime.progress=plain"]
    seven = build.model(config_of(*small), 7, Speed())
    torch.save(seven.state_dict(), tmp_path / "seven.pt")
    own = [f"weights={tmp_path / 'seven.pt'}", key, f"run_dir={tmp_path / 'run'}"]
    config = config_of(*small, *own)
    with pytest.raises(UserError, match=line):
        use(config)
