"""Several microbatches add up in the gradients' own memory: no second copy of them exists between microbatches."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.data.batch import Batch
from pycls_fast.parallel import ALONE, place_model
from pycls_fast.train.assemble import make_step
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.step import Step

CPU = torch.device("cpu")
MICROBATCHES = 4


def made(experiment: str, *overrides: str) -> tuple[Step, nn.Module, list[Batch]]:
    config = load_config(
        experiment,
        [f"optim.accumulation_steps={MICROBATCHES}", "data.global_batch_size=16", "data.image_size=16",
         "augment.mixup_alpha=0", "augment.cutmix_alpha=0", *overrides],
    )  # fmt: skip
    switches = build.switches(config, CPU)
    network = build.model(config, 10, switches)
    # A head of zeros would make the gradients of all other layers zero.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    network = place_model(network, ALONE, memory_format=switches.memory_format)
    step = make_step(config, network, ALONE, switches, 10)
    generator = torch.Generator().manual_seed(1)
    batches = [
        Batch(
            images_BHWC=torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8, generator=generator),
            labels_B=torch.randint(0, 10, (4,), generator=generator),
            indices_B=torch.arange(4),
            erase_B4=None,
            damaged=(),
        )
        for _ in range(MICROBATCHES)
    ]
    return step, network, batches


SMALL = ("model.width=32", "model.mlp_width=32", "model.depth=2")


@pytest.mark.slow
def test_no_other_memory_of_the_gradients_size_is_left_between_microbatches() -> None:
    """Counted: storages alive after each backward pass, beyond weights, gradients and the batch."""
    # Other tests' tensors may be of kinds that cannot even be asked for their memory.
    gc.collect()
    others = {id(t) for t in gc.get_objects() if issubclass(type(t), Tensor)}
    step, network, batches = made("vit_digits", "speed=reference", *SMALL)
    sizes: list[int] = []
    loss = step.loss

    def ours() -> Iterator[Tensor]:
        return (t for t in gc.get_objects() if issubclass(type(t), Tensor) and id(t) not in others)

    def counting(*arguments: object) -> Tensor:
        gc.collect()
        alive = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in ours()
            if t.grad_fn is None and t.is_leaf and t.is_floating_point()
        }
        held = {g.untyped_storage().data_ptr() for p in network.parameters() for g in (p, p.grad) if g is not None}
        sizes.append(sum(size for pointer, size in alive.items() if pointer not in held))
        return loss(*arguments)  # type: ignore[arg-type]

    object.__setattr__(step, "loss", counting)
    step(0, batches, TrainMetrics(CPU))
    gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    assert len(sizes) == MICROBATCHES
    assert max(sizes[1:]) - sizes[0] < gradients / 4


@pytest.mark.parametrize("precision", ["bf16_params", "bf16"])
def test_gradients_in_16_bits_are_added_to_those_of_the_masters_without_a_wide_copy(precision: str) -> None:
    step, network, batches = made("vit_digits", f"precision={precision}", *SMALL)
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


def test_gradients_are_gone_after_the_step() -> None:
    """Nothing of them is left for the next forward pass, where memory peaks."""
    step, network, batches = made("vit_digits", "speed=fast", *SMALL)
    step(0, batches, TrainMetrics(CPU))
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("count", [MICROBATCHES - 1, MICROBATCHES + 1])
def test_a_step_takes_all_its_microbatches_and_no_others(count: int) -> None:
    step, _, batches = made("vit_digits", "speed=reference", *SMALL)
    with pytest.raises(ValueError, match="zip"):
        step(0, (2 * batches)[:count], TrainMetrics(CPU))
