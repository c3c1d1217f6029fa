"""How long kernels take on a device.

A product takes the longer of its arithmetic, by the share of its tiles that is used, and of its bytes; everything else
takes its bytes. The constants are in `clusters.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pycls_fast.plan.work import Work
from pycls_fast.values import NonNegativeFloat, PositiveFloat, PositiveInt

_Numbers = NDArray[np.float64]

# Rows and columns of a product that a multiprocessor computes at a time; the depth that costs as much as its start; the
# least depth of a part if few tiles are split along it. As in cuBLAS's large kernels; not fitted.
_TILE, _START, _LEAST_DEPTH = 128, 64, 256
PRODUCTS = ("product", "convolution", "grouped", "attention")
_NUMBERS = ("bytes", "count", "m", "n", "k")


@dataclass(frozen=True)
class Kernels:
    """Kernels as columns: what `Work` says of each, and how often it runs."""

    kinds: NDArray[np.str_]
    numbers: _Numbers
    itemsize: NDArray[np.int64]
    times: _Numbers

    @classmethod
    def of(cls, works: Sequence[Work], times: Sequence[float] | None = None) -> Kernels:
        """The kernels of a list."""
        numbers = np.array([[getattr(work, name) for name in _NUMBERS] for work in works], dtype=np.float64)
        return cls(
            np.array([work.kind for work in works], dtype=str),
            numbers.reshape(-1, len(_NUMBERS)).T,
            np.array([work.itemsize for work in works], dtype=np.int64),
            np.ones(len(works)) if times is None else np.array(times, dtype=np.float64),
        )

    def between(self, other: Kernels, share: float) -> Kernels:
        """The same kernels for another number of images: each number is affine in it; 0 is these, 1 the other ones."""
        return replace(self, numbers=self.numbers + share * (other.numbers - self.numbers))

    @property
    def flops(self) -> float:
        """Floating-point operations of all products, 2 for a multiply-add."""
        _, count, m, n, k = self.numbers
        return float((2.0 * count * m * n * k * self.times).sum())


@dataclass(frozen=True)
class Accelerator:
    """A device.

    Attributes:
        memory: bytes.
        device: "cuda" or "cpu".
        flops: FLOP/s of dense products, by bytes of an element.
        bandwidth: bytes/s, read and written.
        units: multiprocessors; 1: tiles do not matter (a CPU).
        efficiency: the share of `flops` that each kind of product reaches with full tiles, of `bandwidth` that "pass"
            and "depthwise" reach, and of float32's `flops` that depthwise convolutions reach with their "taps".
        kernel: seconds that every kernel takes besides.
        launch: seconds of the host for each kernel; eager code takes at least their sum, on a CPU so much more.
        dispatch: the same in layers that ranks divide: of DTensors.
        fused: the share of a pass's bytes that compiled code moves.
    """

    memory: PositiveFloat
    flops: Mapping[int, PositiveFloat]
    bandwidth: PositiveFloat
    units: PositiveInt = 1
    efficiency: Mapping[str, PositiveFloat] = field(default_factory=dict)
    kernel: NonNegativeFloat = 0.0
    launch: NonNegativeFloat = 0.0
    dispatch: NonNegativeFloat = 0.0
    fused: PositiveFloat = 1.0
    device: Literal["cuda", "cpu"] = "cuda"

    def seconds(self, kernels: Kernels, *, compiled: bool = False, divided: bool = False) -> float:
        """How long kernels take one after the other.

        Args:
            compiled: passes are fused, and the host is never late.
            divided: they are of layers that ranks divide.
        """
        kinds, (moved, count, m, n, k) = kernels.kinds, kernels.numbers
        is_product, is_depthwise = np.isin(kinds, PRODUCTS), kinds == "depthwise"
        share = np.array([self.efficiency.get(kind, 1.0) for kind in kinds])
        through = np.where(is_depthwise, share, self.efficiency.get("pass", 1.0))
        moved = moved * np.where((kinds == "pass") & compiled, self.fused, 1.0)
        least = moved / (self.bandwidth * through)
        rate = np.array([self.flops[min(max(int(size), 2), 4)] for size in kernels.itemsize])
        with np.errstate(invalid="ignore", divide="ignore"):
            rate *= share * np.where(kinds == "grouped", 1.0, self._used(count, m, n, k))
            # Depthwise convolutions do not run on the units for products.
            rate = np.where(is_depthwise, self.flops[4] * self.efficiency.get("taps", 1.0), rate)
            arithmetic = np.where(is_product | is_depthwise, 2.0 * count * m * n * k / rate, 0.0)
        each = np.fmax(arithmetic, least) + self.kernel
        own, host = float((each * kernels.times).sum()), self.launch + self.dispatch * divided
        launched = 0.0 if compiled else float(host * kernels.times.sum())
        return own + launched if self.device == "cpu" else max(own, launched)

    def _used(self, count: _Numbers, m: _Numbers, n: _Numbers, k: _Numbers) -> _Numbers:
        """The share of the multiprocessors' arithmetic that a product's tiles use."""
        if self.units == 1:
            return np.ones_like(m)
        rows, columns = np.ceil(m / _TILE), np.ceil(n / _TILE)
        tiles = rows * columns * count
        tiles = tiles * np.maximum(1.0, np.minimum(self.units / tiles, k / _LEAST_DEPTH))
        waves = tiles / (np.ceil(tiles / self.units) * self.units)
        used: _Numbers = m * n / (rows * columns * _TILE * _TILE) * waves * k / (k + _START)
        return used


# A measurement: what says its seconds by the accelerator, and the seconds that it took.
Measured = tuple[Callable[[Accelerator], float], float]


def fitted(accelerator: Accelerator, rows: Sequence[Measured]) -> Accelerator:
    """The accelerator whose efficiencies and seconds for a kernel explain measurements best.

    Args:
        accelerator: where the search begins; what its `efficiency` does not name is not fitted.

    Returns:
        the same with other constants; logarithms of the ratios have a robust loss, and the start has some weight.
    """
    from scipy.optimize import least_squares

    names = list(accelerator.efficiency)
    least = {"grouped": 0.002, "depthwise": 0.01}

    def made(logs: _Numbers) -> Accelerator:
        *shares, kernel = np.exp(logs)
        return replace(accelerator, efficiency=dict(zip(names, map(float, shares), strict=True)), kernel=float(kernel))

    def misses(logs: _Numbers) -> _Numbers:
        stays = 0.15 * np.sqrt(len(rows) / 20) * (logs - start)
        return np.concatenate([np.log1p(errors(made(logs), rows)), stays])

    start = np.log([*accelerator.efficiency.values(), max(accelerator.kernel, 1e-7)])
    low = np.log([*(least.get(name, 0.05) for name in names), 1e-7])
    high = np.log([*(1.3 for _ in names), 1e-4])
    found = least_squares(misses, np.clip(start, low, high), loss="soft_l1", f_scale=0.1, bounds=(low, high))
    return made(found.x)


def errors(accelerator: Accelerator, rows: Iterable[Measured]) -> _Numbers:
    """Predicted over measured seconds, minus 1."""
    return np.array([predicted(accelerator) / measured - 1.0 for predicted, measured in rows])
