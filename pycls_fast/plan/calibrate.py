"""`pycls-fast plan calibrate`: the constants of the machine at hand, as an entry of `clusters.yaml`."""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pycls_fast.build.device import cores, device_kind, has_decoder
from pycls_fast.data.choices import Augment
from pycls_fast.data.decoders import DECODERS
from pycls_fast.data.transforms import TrainTransform
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.tensor import divide
from pycls_fast.plan.cluster import Accelerator, Kernels, TimedWork, fitted
from pycls_fast.plan.memory_plan import group
from pycls_fast.plan.operators import EXCHANGES, CountWork
from pycls_fast.speed import Device

# Bytes of the exchanges that are timed, and the number of timings of each.
_SIZES, _REPEATS = (2**12, 2**24), 7
# Width and images of the block that two ranks divide, and the passes that are timed together: passes for which a rank
# comes very late must count, too.
_BLOCK, _PASSES = (384, 18), 10


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median time of a function, after a first run that does not count."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(_REPEATS))


# Images of the layers that are timed: in a CPU's caches and beyond; enough for a GPU to compute for longer than its
# host takes to launch the kernels, which would be timed otherwise.
_IMAGES: dict[Device, tuple[int, int]] = {"cpu": (2, 8), "cuda": (128, 512)}


def _examples(images: int) -> Iterator[tuple[nn.Module, Tensor]]:
    """Layers and inputs that time each kind of kernel, with many channels and few."""
    for width in (384, 768):
        yield nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)), torch.randn(images, 196, width)
        yield nn.Sequential(nn.LayerNorm(width), nn.GELU()), torch.randn(images, 196, width)
        yield _Attention(), torch.randn(images, 6, 196, width // 6)
    yield nn.Conv2d(3, 64, 7, stride=2, padding=3), torch.randn(images, 3, 112, 112)
    for channels, side in ((64, 56), (128, 28), (512, 7)):
        features = torch.randn(images, channels, side, side)
        yield nn.Conv2d(channels, channels, 3, padding=1), features
        for groups in (8, 32):
            yield nn.Conv2d(channels, channels, 3, padding=1, groups=groups), features
        for taps in (3, 9):
            yield nn.Conv2d(channels, channels, taps, padding=taps // 2, groups=channels), features
        yield nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()), features


class _Attention(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(features, features, features)


def measured(device: torch.device) -> Accelerator:
    """This machine's device: a CPU with the threads that there are, or a GPU in float32 and bfloat16."""
    try:
        is_cpu = device.type == "cpu"
        side, many = (1024, 2**24) if is_cpu else (8192, 2**28)
        memory, units = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1
        if not is_cpu:
            properties = torch.cuda.get_device_properties(device)
            memory, units = properties.total_memory, properties.multi_processor_count

        def rate(dtype: torch.dtype) -> float:
            square = torch.randn(side, side, device=device).to(dtype)
            return 2.0 * side**3 / seconds(partial(torch.matmul, square, square), device)

        float32 = None
        if not is_cpu:
            float32 = rate(torch.float32)
            torch.set_float32_matmul_precision("high")
        source, target = torch.zeros(many, device=device), torch.zeros(many, device=device)
        bandwidth = 2.0 * source.nbytes / seconds(lambda: target.copy_(source), device)
        kinds = ("product", "convolution", "grouped", "direct", "depthwise", "taps", "pass", "attention")
        start = Accelerator(
            memory=float(memory),
            flops={4: rate(torch.float32), 2: rate(torch.bfloat16)},
            float32=float32,
            bandwidth=bandwidth,
            units=units,
            efficiency=dict.fromkeys(kinds, 0.7),
            kernel=5e-6,
            launch=0.0 if is_cpu else 6e-6,
            dispatch=dispatch(),
            fused=0.54,
            device=device_kind(device),
        )
        examples = (example for images in _IMAGES[start.device] for example in _examples(images))
        return fitted(start, [_timed(layer, features, device) for layer, features in examples])
    finally:
        torch.set_float32_matmul_precision("highest")


def _timed(layer: nn.Module, features: Tensor, device: torch.device) -> TimedWork:
    layer, features = layer.to(device), features.to(device)
    if device.type != "cpu" and features.dim() == 4 and not isinstance(layer, _Attention):
        # As with speed=fast: a GPU's grouped convolutions are several times slower in it (LOG.md).
        layer, features = layer.to(memory_format=torch.channels_last), features.to(memory_format=torch.channels_last)
    features.requires_grad_()
    gradient = torch.ones_like(layer(features))

    def run() -> None:
        layer(features).backward(gradient)

    run()
    with CountWork() as found:
        run()
    return TimedWork(partial(Accelerator.seconds, kernels=Kernels.of(found.found)), seconds(run, device))


def _block_passes(width: int, images: int, mesh: DeviceMesh | None = None) -> Callable[[], None]:
    """A function that runs a ViT's block of 16 tokens, or this rank's part of it, forwards and backwards on the CPU."""
    network = VisionTransformer(
        image_size=32, patch_size=8, width=width, depth=1, heads=2, mlp_width=2 * width, num_classes=2
    )
    ((_, block),) = network.units()
    if mesh is not None:
        divide(network, [block], mesh)
    features = torch.randn(images, 16, width, requires_grad=True)

    def run() -> None:
        for _ in range(_PASSES):
            block(features).sum().backward()

    return run


def dispatch() -> float:
    """Additional seconds of the host for each kernel of a small block, if ranks divide the block."""
    device = torch.device("cpu")
    whole = seconds(_block_passes(64, 1), device)
    with group({"tensor": 2}, None) as mesh:
        run = _block_passes(64, 1, mesh["tensor"])
        divided = seconds(run, device)
        with CountWork() as found:
            run()
    return max(divided - whole, 0.0) / len(found.found)


def images_per_core() -> float:
    """How many JPEGs of 500 x 375 pixels and 110 kB, like ImageNet's, a core decodes, crops and resizes in a second."""
    noise_HWC = np.random.default_rng(0).integers(0, 256, (125, 166, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise_HWC).resize((500, 375)).save(file, "jpeg", quality=90)
    decoder = DECODERS[next(name for name in ("region", "simplejpeg", "pillow") if has_decoder(name))]
    transform, images = TrainTransform(Augment(), image_size=224), 20

    def run() -> None:
        for seed in range(images):
            transform(decoder(file.getvalue()), seed)

    return images / seconds(run, torch.device("cpu"))


def _exchange(rank: int, file: str, backend: str, found: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2)
    for size in _SIZES:
        whole, part = torch.ones(size // 4, device=device), torch.ones(size // 8, device=device)
        runs: dict[str, Callable[[], Any]] = {
            "reduce": partial(dist.all_reduce, whole),
            "gather": partial(dist.all_gather_into_tensor, whole, part),
            "scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        found[size] = {name: seconds(run, device) for name, run in runs.items()}
    if backend == "gloo":
        run = _block_passes(*_BLOCK, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))["tensor"])
        found["block"] = seconds(run, device)
        with CountWork() as work:
            run()
        found["exchanged"] = [each.bytes for each in work.found if each.kind in EXCHANGES]
    dist.destroy_process_group()


def links() -> dict[str, Any]:
    """The fields of a `Cluster` for exchanges between two GPUs of this machine; with fewer, between two processes."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with mp.Manager() as manager, TemporaryDirectory() as folder:
        found = manager.dict()
        mp.spawn(_exchange, args=(f"{folder}/rendezvous", backend, found), nprocs=2)
        timed = dict(found)
    small, large = (timed[size] for size in _SIZES)
    more = {name: max(large[name] - small[name], 1e-9) for name in small}
    # An all-reduce of two ranks sends its size once and takes two hops; each half of it alone may take longer.
    inside, hop = (_SIZES[1] - _SIZES[0]) / more["reduce"], small["reduce"] / 2.0
    gathers = more["reduce"] / (more["gather"] + more["scatter"])
    if backend == "gloo":
        # On a CPU, ranks that have just computed meet late: on two cores after 3 ms, without computation after 0.3 ms.
        with group({"tensor": 2}, None) as mesh:
            alone = seconds(_block_passes(*_BLOCK, mesh["tensor"]), torch.device("cpu"))
        late, exchanged = timed["block"] - alone, timed["exchanged"]
        hop = max((late - sum(exchanged) / 2 / inside / gathers) / len(exchanged), 0.0)
    return {"inside": inside, "network": inside, "latency": [hop, hop], "gathers": gathers}


def calibrate(file: Path) -> str:
    """Measure this machine, a CPU with one thread, and write it; returns what was written."""
    device, threads = torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made, exchanges, images = measured(device), links(), images_per_core()
    finally:
        torch.set_num_threads(threads)
    ranks = cores() if device.type == "cpu" else torch.cuda.device_count()
    # More ranks of a CPU share its cores.
    per_node = 4 * ranks if device.type == "cpu" else ranks
    cluster = {"accelerator": "here", "per_node": per_node, "jitter": 0.0, "cores": cores()}
    cluster |= exchanges | {"images_per_core": images}
    # Through JSON, which turns names into text, as the reader expects.
    entry = json.loads(json.dumps({"accelerators": {"here": asdict(made)}, "clusters": {"here": cluster}}))
    text = yaml.safe_dump(entry, sort_keys=False)
    file.write_text(text, encoding="utf-8")
    return f"{text}\nwritten: {file}; plan with cluster={file}:x{ranks}"
