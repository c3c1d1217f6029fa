"""Drop-path that skips dropped samples against drop-path that multiplies them by zero; writes
docs/results/drop_path_cpu.md.

    python benchmarks/drop_path_cpu.py

Forward and backward passes of a small ViT in turns, so that a drift of the machine's speed affects both halves of a
pair. Takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pycls_fast.ledger import paired_ratio
from pycls_fast.models import DropPath, VisionTransformer
from pycls_fast.train.environment import provenance_lines

PAGE = Path(__file__).parents[1] / "docs" / "results" / "drop_path_cpu.md"
SIZES: dict[str, Any] = {"image_size": 224, "patch_size": 16, "width": 192, "depth": 6, "heads": 3, "mlp_width": 768}
# DeiT III (Touvron et al. 2022, table 1 and its released commands) gives every block the same rate.
RATES = (0.0, 0.1, 0.2, 0.45, 0.6)


class Pair:
    """One model for each implementation, with the same weights and the same rate in every block."""

    def __init__(self, rate: float, batch: int) -> None:
        self.models = []
        for compute in ("multiply", "skip"):
            torch.manual_seed(0)
            model = VisionTransformer(
                **SIZES,
                num_classes=1000,
                attention="sdpa",
                drop_path_compute=compute,
            )
            for module in model.modules():
                if isinstance(module, DropPath):
                    module.rate = rate
            self.models.append(model)
        self.images_BCHW, self.labels_B = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))

    def seconds(self, which: int, seed: int) -> float:
        """Seconds of one forward and backward pass."""
        model = self.models[which]
        torch.manual_seed(seed)
        started = time.perf_counter()
        F.cross_entropy(model(self.images_BCHW), self.labels_B).backward()
        elapsed = time.perf_counter() - started
        model.zero_grad()
        return elapsed

    def expected(self, rate: float) -> float:
        """The speed-up if time were proportional to the number of samples in the branches."""
        return 1 / (1 - rate)


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs = {rate: Pair(rate, options.batch) for rate in RATES}
    times: dict[float, tuple[list[float], list[float]]] = {rate: ([], []) for rate in RATES}
    for round_ in range(-1, options.rounds):
        for rate, pair in pairs.items():
            # The order alternates; the first round is a warm-up.
            order = (0, 1) if round_ % 2 else (1, 0)
            found = {which: pair.seconds(which, seed=1000 + round_) for which in order}
            if round_ >= 0:
                times[rate][0].append(1 / found[0])
                times[rate][1].append(1 / found[1])
    lines = [
        "# Drop-path that skips the computation, on a CPU",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        f"ViT of width {SIZES['width']}, depth {SIZES['depth']}, 224 pixels, patch 16, batch {options.batch}, float32, "
        "attention=sdpa; forward and backward pass;",
        f"`speed.drop_path_compute=skip` over `multiply`, {options.rounds} pairs in turns, the same rate in every "
        "block as in DeiT III",
        "(rates that rise linearly to `model.drop_path`, as in all models except `deit3_*`, save half as much). "
        "A ratio above 1 is faster.",
        "",
        "| rate | ratio, median | p10 - p90 | 95% interval of the median | 1 / (1 - rate) |",
        "|---|---|---|---|---|",
    ]
    for rate, (multiply, skip) in times.items():
        ratio = paired_ratio(multiply, skip)
        interval = f"{ratio.interval[0]:.2f} - {ratio.interval[1]:.2f}" if ratio.interval else "too few pairs"
        lines.append(
            f"| {rate:g} | {ratio.spread.p50:.2f} | {ratio.spread.p10:.2f} - {ratio.spread.p90:.2f} | {interval} | "
            f"{pairs[rate].expected(rate):.2f} |"
        )
        print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
