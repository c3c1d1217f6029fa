"""Memory held between forward and backward pass, with each way of reducing it; writes
docs/results/activation_memory.md.

    python benchmarks/activation_memory.py

Bytes are counted, not estimated (`pycls_fast.plan.live_memory`): everything alive at the end of the forward pass
except parameters, buffers and the batch. Takes half an hour on a shared core.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast.models import ResNet, VisionTransformer
from pycls_fast.network import Network
from pycls_fast.parallel import save_activation_memory
from pycls_fast.parallel.memory import PackedStorage
from pycls_fast.plan.live_memory import LiveMemory
from pycls_fast.train.environment import provenance_lines

PAGE = Path(__file__).parents[1] / "docs" / "results" / "activation_memory.md"

WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "recompute=full": {"recompute": "full"},
    "recompute=full, recompute_every=2": {"recompute": "full", "recompute_every": 2},
    "recompute=selective": {"recompute": "selective"},
    "activation_compression=8bit": {"activation_compression": "8bit"},
    "activation_offload=cpu": {"activation_offload": "cpu"},
    "recompute=full, activation_offload=cpu": {"recompute": "full", "activation_offload": "cpu"},
}


@dataclass
class Kept:
    """Bytes for one way to save memory."""

    held: int
    on_host: int
    peak: int


def build(model: str, attention: str) -> Network:
    """One model; `tiny` is for trying out this file."""
    torch.manual_seed(0)
    if model.startswith("resnet"):
        return ResNet(depth=int(model.removeprefix("resnet")), num_classes=1000)  # type: ignore[arg-type]
    width, depth, heads = {"vit_b16": (768, 12, 12), "vit_s16": (384, 12, 6), "tiny": (192, 2, 3)}[model]
    return VisionTransformer(
        image_size=224,
        patch_size=16,
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=4 * width,
        num_classes=1000,
        drop_path=0.1,
        attention=attention,  # type: ignore[arg-type]
    )


def measure(model: str, attention: str, batch: int, amp: bool, way: dict[str, Any]) -> Kept:
    """Run one forward and backward pass."""
    network = build(model, attention)
    save_activation_memory(network, network.units(), **way)
    images_BCHW, labels_B = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    known: list[Tensor] = [*network.parameters(), *network.buffers(), images_BCHW, labels_B]
    gc.collect()
    torch.manual_seed(1)
    with host_copies() as host, LiveMemory(known) as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits_BK = network(images_BCHW)
        held, on_host = memory.live - logits_BK.untyped_storage().nbytes(), sum(host)
        F.cross_entropy(logits_BK.float(), labels_B).backward()
    return Kept(held - on_host, on_host, memory.peak)


@contextmanager
def host_copies() -> Iterator[list[int]]:
    """Sizes of tensors moved to the host: on a CPU they stay alive like the rest and would be counted."""
    sizes: list[int] = []
    original = PackedStorage.__init__

    def counting(self: PackedStorage, flat: Tensor, *, in_8_bits: bool, on_host: bool) -> None:
        original(self, flat, in_8_bits=in_8_bits, on_host=on_host)
        if on_host:
            sizes.extend(part.untyped_storage().nbytes() for part in self.parts)

    PackedStorage.__init__ = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        PackedStorage.__init__ = original  # type: ignore[method-assign]


def table(model: str, attention: str, batch: int, amp: bool) -> Iterator[str]:
    """The results as lines of Markdown."""
    kind = "bf16 autocast" if amp else "float32"
    yield f"## {model}, batch {batch}, {kind}" + (f", attention={attention}" if "resnet" not in model else "")
    yield ""
    yield "| way | held between forward and backward, MB | share of off | on the host, MB | peak of the step, MB |"
    yield "|---|---|---|---|---|"
    base = None
    for name, way in WAYS.items():
        kept = measure(model, attention, batch, amp, way)
        base = base or kept.held
        print(model, attention, kind, name, kept, f"{kept.held / base:.3f}", flush=True)
        yield (
            f"| {name} | {kept.held / 1e6:,.0f} | {100 * kept.held / base:.0f}% | {kept.on_host / 1e6:,.0f} | "
            f"{kept.peak / 1e6:,.0f} |"
        )
    yield ""


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["vit_b16", "resnet50"])
    parser.add_argument("--attention", nargs="+", default=["sdpa"], choices=["reference", "sdpa"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    lines = [
        "# Memory held between forward and backward pass",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        "Counts every storage alive at the end of the forward pass except parameters, buffers, the batch and the "
        "logits;",
        "under autocast this includes the cast weights. The peak of the step also includes the gradients of all "
        "parameters",
        "and, on this CPU, what is moved to the host.",
        "",
    ]
    for model in options.models:
        for attention in options.attention if "resnet" not in model else ["none"]:
            for amp in (False, True):
                lines += table(model, attention, options.batch, amp)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
