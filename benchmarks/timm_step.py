"""The training step of timm's model in a plain PyTorch loop on one GPU, measured like ours by `tools/time_net.py`.

    python benchmarks/timm_step.py --model vit_large_patch16_224 --batch 384 --compile default --out large.json

bfloat16 autocast (or `--weights bfloat16`), fused AdamW or SGD, cross-entropy, one batch of random images on the
device. `--attention cudnn` forces cuDNN's kernel, so that the effect of the kernel choice can be told apart.
`benchmarks/ladder_gpu.py` runs this.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pycls_fast.ledger.measure.clocks import DeviceMemory, MatmulPeak, timed
from pycls_fast.ledger.measure.timed import part_record
from pycls_fast.ledger.measure.workloads import Turn
from pycls_fast.models import complexity
from pycls_fast.parallel import World
from pycls_fast.train.environment import device_name, environment, versions
from pycls_fast.train.output_file import write_json

CLASSES = 1000


def model(options: argparse.Namespace) -> torch.nn.Module:
    """timm's model with 1,000 classes (`vit_huge_patch14_224` has no head by default)."""
    import timm

    sizes: dict[str, Any] = {"img_size": options.image_size} if "vit" in options.model else {}
    if options.patch_size:
        sizes["patch_size"] = options.patch_size
    made: torch.nn.Module = timm.create_model(options.model, num_classes=CLASSES, **sizes)
    return made


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns a record with the keys of `time_net.py`."""
    device = torch.device(options.device)
    world = World(rank=0, size=1, device=device)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    peak, memory = MatmulPeak(torch.bfloat16, world, options.matmul_size), DeviceMemory(device)
    peak.measure()
    torch.manual_seed(0)
    counted = complexity(lambda: model(options), image_size=options.image_size)
    with memory.during("train"):
        network = model(options).train().to(device)
        images_BCHW = torch.randn(options.batch, 3, options.image_size, options.image_size, device=device)
        if options.channels_last:
            network = network.to(memory_format=torch.channels_last)
            images_BCHW = images_BCHW.to(memory_format=torch.channels_last)
        if options.weights == "bfloat16":
            network, images_BCHW = network.bfloat16(), images_BCHW.bfloat16()
        labels_B = torch.randint(0, CLASSES, (options.batch,), device=device)
        if options.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
        else:
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
        forward = network if options.compile == "off" else torch.compile(network, mode=options.compile)
        backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if options.attention == "cudnn" else nullcontext()

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=options.weights == "float32"):
                logits_BK = forward(images_BCHW)
            F.cross_entropy(logits_BK.float(), labels_B).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        turns = []
        with backend:
            timed(step, options.warmup_steps, device)
            for _ in range(options.repeats):
                peak.measure()
                seconds = timed(step, options.steps, device)
                turns.append(Turn(tuple(seconds), sum(seconds)))
    return {
        "kind": "timm step",
        "model": options.model,
        "time": time.time(),
        "command": "python " + " ".join(sys.argv),
        "device": device_name(device),
        "versions": versions(),
        "environment": environment(device, 1),
        "parameters": counted.parameters,
        "forward_flops_per_image": counted.forward_flops,
        "global_batch_size": options.batch,
        "matmul": peak.record(),
        "train": part_record(
            "train",
            turns,
            images_per_step=options.batch,
            forward_flops_per_image=counted.forward_flops,
            matmul_flops_per_second=peak.flops_per_second,
            memory_peak_bytes=memory.peaks.get("train"),
        ),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--patch-size", type=int)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", choices=["default", "cudnn"], default="default")
    parser.add_argument("--compile", default="off", help="off, or a mode of torch.compile")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--matmul-size", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    write_json(chosen.out, measure(chosen))
