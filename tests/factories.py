"""What several test files build and compare: configurations of runs, random values, whole checkpoints, other names."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import keystr, tree_leaves_with_path

from pycls_fast import build
from pycls_fast.config import Purpose, RunConfig, load_config
from pycls_fast.config.compose import check, compose
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.reuse import SAVED, register
from pycls_fast.config.saved import saved_in_run
from pycls_fast.models.pretrained.names import read_names
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.train import checkpoint, saving
from pycls_fast.train.assemble import make_step
from pycls_fast.train.checkpoint import split
from pycls_fast.train.step import Step

# What a record of training has besides its step.
TRAINED = {"loss": 1.0, "lr": 0.1, "images_per_second": 10.0, "step_seconds": 0.1, "memory_peak_bytes": 10**9}


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run folder was made with, with overrides."""
    saved = saved_in_run(run_dir)
    register(saved, overrides)
    composed = dataclasses.replace(compose(SAVED, overrides, [CONFIGS]), config_name=saved.name, saved=saved.file)
    return check(composed, Purpose(scores_sets=True))


@cache
def config_of(*overrides: str, name: str = "vit_digits") -> RunConfig:
    """As `load_config`, once in a process: Hydra takes a quarter of a second."""
    return load_config(name, overrides)


def randomise(model: Any) -> Any:
    """The model in float64 with random values in every saved tensor, none at its start; activations stay of order 1."""
    torch.manual_seed(0)
    for name, tensor in model.double().state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(int(torch.randint(1, 100, ())))
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.ndim >= 2 and "pos_embed" not in name:
            tensor.normal_(std=1.5 / tensor[0].numel() ** 0.5)
        else:
            tensor.normal_(mean=float(name.endswith("weight")), std=0.4)
    return model


def nudge(network: nn.Module) -> None:
    """Add the same small numbers to all parameters of any layout: a head of zeros would hide mistakes below it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def draw(*shape: int, seed: int) -> Tensor:
    """Normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check_rounding(
    plain: list[Tensor], found: list[Tensor], exact: list[Tensor], *, factor: float = 4.0, slack: float = 0.0
) -> None:
    """Every error at most so many times that of torch's own way, and a share of the result."""
    for reference, other, right in zip(plain, found, exact, strict=True):
        own = (reference.double() - right).norm()
        assert own > 0 or slack
        assert (other.double() - right).norm() <= factor * own + slack * right.norm()


def small_vit(**changes: Any) -> VisionTransformer:
    """Sixteen patches of 8 x 8 pixels and three blocks, unless its arguments say otherwise."""
    sizes = {"image_size": 32, "patch_size": 8, "width": 24, "depth": 3, "heads": 3, "mlp_width": 40, "num_classes": 7}
    return VisionTransformer(**{**sizes, **changes})


def save_checkpoint(state: dict[str, Any], folder: Path, step: int, *, keep: int) -> Path:
    """Save a nested state of tensors and plain values in one process; other arguments as in `saving.write`."""
    found, plain = split(state)
    return saving.write(found, plain, folder, step, keep=keep, world=ALONE)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The complete state of a checkpoint's folder, on the CPU, in one process."""
    opened = checkpoint.open_checkpoint(path)
    into = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in opened.specs.items()}
    opened.read(into)
    return opened.state(into)


def class_folders(root: Path, **counts: int) -> Path:
    """Class folders with so many small images, of which no two are alike; a class has the same ones everywhere."""
    for name, count in counts.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"image {number}.png")
    return root


def photographs(root: Path, classes: Sequence[str], count: int, *, sides: tuple[int, int]) -> Path:
    """Folders `train` and `val` with so many pictures of any shape, the same in both; the classes take turns."""
    random = np.random.default_rng(0)
    for number in range(count):
        width, height = (int(side) for side in random.integers(*sides, 2))
        spots = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        for part in ("train", "val"):
            folder = root / part / classes[number % len(classes)]
            folder.mkdir(parents=True, exist_ok=True)
            spots.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return root


def step_of(config: RunConfig, world: World = ALONE, *, classes: int = 10) -> Step:
    """A run's step, with initial weights."""
    switches = build.switches(config, world.device)
    network = build.place(config, build.trained_model(config, classes, switches, world), world, switches)
    return make_step(config, network, world, switches, steps_per_epoch=4)


@contextmanager
def imagined(ranks: int) -> Iterator[None]:
    """The first of so many ranks, of which the others do not exist: their messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_same_bits(found: Any, expected: Any) -> None:
    """Nested containers of tensors and other values do not differ."""
    ours, theirs = ({keystr(path): leaf for path, leaf in tree_leaves_with_path(each)} for each in (found, expected))
    assert ours.keys() == theirs.keys()
    for place, value in theirs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(ours[place], value, rtol=0, atol=0, msg=partial("{}: {}".format, place))
        else:
            assert ours[place] == value, place


State = Mapping[str, Tensor]
Convert = Callable[[State], dict[str, Tensor]]


def in_our_names(state: State) -> dict[str, Tensor]:
    """Another project's state in our names, in which every name must be known."""
    layout, found, rest = read_names(state)
    assert layout not in ("pycls_fast", "unknown")
    assert rest == []
    return found


def make_optimizer(name: str, groups: list[dict[str, Any]], *, implementation: str = "loop", **keys: Any) -> Any:
    """An optimizer over these groups, by its name and the keys of `optim`."""
    from pycls_fast.optim.choices import Optimizer

    return Optimizer.choices()[name](**keys).build(groups, implementation)


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that has torch compile: slow, and only where there is a compiler."""
    has_compiler = build.has_compiler("cpu")
    quiet = pytest.mark.filterwarnings("ignore")(test)
    return pytest.mark.slow(pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")(quiet))


def script(name: str) -> Any:
    """A script of `benchmarks/`, no package (another project's may be installed); it may import those beside it."""
    folder = Path(__file__).parents[1] / "benchmarks"
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        spec.loader.exec_module(module)
    return module
