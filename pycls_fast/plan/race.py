"""Which number format multiplies faster on this CPU, and with how many threads, at the model's own shapes.

First the largest products are timed alone, which rules out a hopeless format; then the whole network, or, if it is
large, more of its products.

No table of CPUs can say it: bfloat16 products run at 3 times the rate of float32 with AMX, at half of it on some CPUs
with AVX-512 BF16, and at a fortieth without either; and two threads on a core that another process keeps busy are
slower than one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pycls_fast.build import compile_for_gpu, cores_per_rank, counted_model, model
from pycls_fast.config.conflicts import switch_problems
from pycls_fast.config.run import RunConfig
from pycls_fast.models.complexity import complexity
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed
from pycls_fast.values import AUTO, Size

Format = Literal["fp32", "amp_bf16"]
_Clock = Callable[[], float]

# A race has as many images as the run, or as this number of operations allows: a step in float32 then takes a fraction
# of a second. With fewer images, the cast of the weights hides what the products gain: a ViT-S of 64 pixels is 1.1
# times as slow in bfloat16 with 2 images and 1.9 times as fast with 16 (AMX).
_FLOPS = 1e10
_MOST_IMAGES = 16
# Networks of more operations than this take too long as a whole.
_WHOLE_FLOPS = 4e10
_REPEATS, _SECONDS_EACH = 3, 0.03
# A format that is this many times slower after the largest products is not tried on the rest, if that takes seconds: of
# a pass of a few milliseconds, another process may make a hundred.
_HOPELESS, _HOPELESS_SECONDS = 4.0, 0.3
# Rounding has to be worth it: bfloat16 is only chosen if it is this many times as fast.
_CLEARLY_FASTER = 1.1
_MOST_PRODUCTS = 12
# The number of products that say how many threads, and whether a format is hopeless, and of rounds in which times are
# taken in turns.
_FEW, _ROUNDS = 3, 3
# The network's passes end after the first one that counts, if so many seconds are over.
_NETWORK_SECONDS = 3.0
# In place of up to so many threads one races. Its own time is lengthened by no other process; the times of two threads,
# which wait for each other, were wrong by a factor of 10 to 200 in six of 30 races beside other work (2026-12-01).
# Many threads share the memory's bandwidth, which favours the smaller format.
_RACED_BY_ONE = 4
# Fewer threads are only chosen if the cores are busy: sums are split among threads, and so are their last bits.
_THREADS_GAIN = 1.5

# ViT-S/16 and ResNet-50 in bfloat16 on a CPU (docs/results/cpu_step.md) take 20 to 100 s to compile and then save at
# least a quarter of the products' time.
_COMPILED_SAVES, _COMPILING_SECONDS = 0.25, 60.0


@dataclass(frozen=True)
class Race:
    """The faster format; float32's time divided by bfloat16's; the threads to use (None if `runtime.threads` or
    `OMP_NUM_THREADS` says); and seconds of a pass, backwards too if the race was for training, in the faster format."""

    format: Format
    ratio: float
    threads: int | None
    seconds_per_image: float


@dataclass
class _Product:
    """A layer that occurs `count` times in the network, and its operations, up to a common factor."""

    layer: nn.Module
    input_shape: tuple[int, ...]
    flops: float
    count: int = 0


def race(config: RunConfig, *, training: bool = True) -> Race:
    """Multiply in both formats for a fraction of a second; once in a process for each model and image size. Scoring
    needs no pass backwards."""
    key = (config.model.model_dump_json(), config.data.image_size, training)
    # A network that was given from Python may be another one next time.
    if key not in _races or config.model.kind == "given":
        with torch.set_grad_enabled(training):
            _races[key] = _measure(config)
    return _races[key]


_races: dict[tuple[str, Size, bool], Race] = {}


def compile_if_it_pays(config: RunConfig, chosen: Speed, world: World, *, images: float, flops: float) -> Speed:
    """The switches, without compilation if the preset chose it, it would take longer than it saves, and no switch set
    by hand needs it; for a GPU see `compile_for_gpu`.

    Args:
        images: the number that the run trains on, over all epochs.
        flops: operations of an image's forward pass.
    """
    if "compile" in config.speed.by_hand or chosen.compile == "off":
        return chosen
    if world.device.type == "cuda":
        return compile_for_gpu(config, chosen, world, images=images, flops=flops)
    if shared_race(config, world).seconds_per_image * images * _COMPILED_SAVES > _COMPILING_SECONDS:
        return chosen
    # A GELU for compiled code goes with it, as in `switches`.
    off = chosen.replace(compile="off", gelu=config.speed.gelu)
    return chosen if any(switch_problems(config, off, "cpu")) else off


def shared_race(config: RunConfig, world: World, *, training: bool = True) -> Race:
    """The main rank's result, for all ranks: they must compute in the same format."""
    found = world.from_main(race(config, training=training) if world.is_main else None)
    assert found is not None
    return found


def _measure(config: RunConfig) -> Race:
    products, images, flops = _largest_products(config)
    free = config.runtime.threads is None and "OMP_NUM_THREADS" not in os.environ
    before = torch.get_num_threads()
    threads = min(before, cores_per_rank()) if free else config.runtime.threads or before
    try:
        # Before the formats, also if the number is set: beside another process, times with too many say nothing.
        threads = _number_of_threads(products, threads)
        racing = 1 if threads <= _RACED_BY_ONE else threads
        torch.set_num_threads(racing)
        clock = time.thread_time if racing == 1 else time.perf_counter
        fp32 = bf16 = rest = 0.0
        is_whole = flops <= _WHOLE_FLOPS
        for number, product in enumerate(products):
            if _is_hopeless(fp32, bf16):
                rest += _seconds(product, "fp32" if fp32 < bf16 else "amp_bf16", clock)
            elif number < _FEW or not is_whole:
                fp32 += _seconds(product, "fp32", clock)
                bf16 += _seconds(product, "amp_bf16", clock)
        seconds = min(fp32, bf16) + rest
        if is_whole and not _is_hopeless(fp32, bf16):
            fp32, bf16 = _time_network(config, images, clock)
            seconds = min(fp32, bf16)
    finally:
        torch.set_num_threads(before)
    chosen: Format = "amp_bf16" if fp32 > bf16 * _CLEARLY_FASTER else "fp32"
    return Race(chosen, fp32 / bf16, threads if free else None, seconds / images * racing / threads)


def _is_hopeless(fp32: float, bf16: float) -> bool:
    """Whether the slower of the two formats need not be tried further."""
    return max(fp32, bf16) > max(_HOPELESS * min(fp32, bf16), _HOPELESS_SECONDS)


def _number_of_threads(products: Sequence[_Product], most: int) -> int:
    """All cores, or half of them or one if that is much faster in each of a few rounds."""
    candidates = sorted({most, most // 2, 1} - {0}, reverse=True)
    least = dict.fromkeys(candidates, float("inf"))
    for _ in range(_ROUNDS if len(candidates) > 1 else 0):
        for threads in candidates:
            torch.set_num_threads(threads)
            seconds = sum(_seconds(product, "fp32", time.perf_counter) for product in products[:_FEW])
            least[threads] = min(least[threads], seconds)
    fastest = min(candidates, key=least.__getitem__)
    return fastest if least[fastest] * _THREADS_GAIN < least[most] else most


def _largest_products(config: RunConfig) -> tuple[list[_Product], int, float]:
    """Linear layers and convolutions of different shapes, the largest first; the number of images in their inputs; and
    the operations of the whole network's forward pass of these."""
    image_size = config.data.image_size
    network = counted_model(config, config.model.num_classes or 10)
    flops = complexity(network, image_size=image_size).forward_flops
    batch = config.data.global_batch_size
    most = _MOST_IMAGES if batch == AUTO else min(max(batch, 2), _MOST_IMAGES)
    images = int(min(max(_FLOPS // flops, 2), most))
    found: dict[Any, _Product] = {}

    def note(layer: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        shape, weight = tuple(inputs[0].shape), layer.weight
        key = (shape, tuple(weight.shape), getattr(layer, "stride", None), getattr(layer, "groups", None))
        product = found.setdefault(key, _Product(layer, shape, weight.numel() * out.numel() / len(weight)))
        product.count += 1

    for layer in network.modules():
        if type(layer) in (nn.Linear, nn.Conv2d):
            layer.register_forward_hook(note)
    network.eval().requires_grad_(False)
    with torch.no_grad():
        network(torch.empty(images, 3, *image_size, device="meta"))
    products = sorted(found.values(), key=lambda each: -each.count * each.flops)[:_MOST_PRODUCTS]
    for product in products:
        product.layer = _filled(product.layer)
    return products, images, flops * images


def _filled(layer: nn.Module) -> nn.Module:
    # Hooks would be copied with it.
    layer._forward_hooks.clear()
    copy = layer.to_empty(device="cpu").requires_grad_(True)
    for parameter in copy.parameters():
        nn.init.normal_(parameter, std=0.02)
    return copy


def _time_network(config: RunConfig, images: int, clock: _Clock) -> tuple[float, float]:
    """Seconds of the whole network in both formats.

    EfficientNet-Lite0's products are 1.4 times as fast in bfloat16 on an AVX-512 BF16 machine, its depthwise
    convolutions and batch norms so much slower that a step takes twice as long.
    """
    with torch.random.fork_rng(devices=[]):
        network = model(config, config.model.num_classes or 10, Speed()).to(memory_format=torch.channels_last)
    network.train(torch.is_grad_enabled())
    inputs, fp32, bf16 = _inputs((images, 3, *config.data.image_size)), float("inf"), float("inf")
    began = time.perf_counter()
    for position in range(1 + _ROUNDS):
        # In turns, because other work on these cores slows down one pass or another; the first ones prepare kernels.
        seconds = _pass(network, inputs, "fp32", clock), _pass(network, inputs, "amp_bf16", clock)
        if position > 0:
            fp32, bf16 = min(fp32, seconds[0]), min(bf16, seconds[1])
            if _is_hopeless(fp32, bf16) or time.perf_counter() - began > _NETWORK_SECONDS:
                break
    return fp32, bf16


def _seconds(product: _Product, form: Format, clock: _Clock) -> float:
    """The fastest of a few passes, of which the first also prepares the kernels, times the layers of this shape."""
    inputs, best, start = _inputs(product.input_shape), float("inf"), time.perf_counter()
    for position in range(1 + _REPEATS):
        best = min(best, _pass(product.layer, inputs, form, clock))
        if position > 0 and time.perf_counter() - start > _SECONDS_EACH:
            break
    return product.count * best


def _inputs(shape: tuple[int, ...]) -> Tensor:
    inputs = torch.randn(shape)
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs.requires_grad_(True)


def _pass(layer: nn.Module, inputs: Tensor, form: Format, clock: _Clock) -> float:
    """Seconds of a pass forwards and, with gradients, backwards."""
    began = clock()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "amp_bf16"):
        out = layer(inputs)
    if torch.is_grad_enabled():
        out.backward(out.detach())
    return clock() - began
