"""How long kernels take on a device, and exchanges on a cluster. Both are described in `clusters.yaml`, or in a file
that `plan calibrate` wrote.

A product takes the time of its arithmetic, which depends on how full its tiles are, or of its memory traffic, whichever
is longer; on a CPU it takes both. Everything else takes the time of its memory traffic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pycls_fast.choice import Section
from pycls_fast.config.compose import validate
from pycls_fast.errors import UserError, one_of, refusing
from pycls_fast.files import user_path
from pycls_fast.plan.operators import Work
from pycls_fast.reading import read_yaml
from pycls_fast.values import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, Text

_Numbers = NDArray[np.float64]

# Rows and columns of a product's tile, which a multiprocessor computes at a time; the depth that takes as long as
# starting a tile; the least depth of a part if few tiles are split along it. As in cuBLAS's large kernels; not fitted.
_TILE, _START, _LEAST_DEPTH = 128, 64, 256
PRODUCTS = ("product", "convolution", "grouped", "direct", "attention")
_NUMBERS = ("bytes", "count", "m", "n", "k")


@dataclass(frozen=True)
class Kernels:
    """Kernels as columns: what `Work` says of each."""

    kinds: NDArray[np.str_]
    numbers: _Numbers
    itemsize: NDArray[np.int64]

    @classmethod
    def of(cls, works: Sequence[Work]) -> Kernels:
        """The kernels of a list."""
        numbers = np.array([[getattr(work, name) for name in _NUMBERS] for work in works], dtype=np.float64)
        return cls(
            np.array([work.kind for work in works], dtype=str),
            numbers.reshape(-1, len(_NUMBERS)).T,
            np.array([work.itemsize for work in works], dtype=np.int64),
        )

    def between(self, other: Kernels, share: float) -> Kernels:
        """The same kernels for another number of images: each number is affine in it; 0 is these, 1 the other ones."""
        return replace(self, numbers=self.numbers + share * (other.numbers - self.numbers))

    @property
    def flops(self) -> float:
        """Floating-point operations of all products, 2 for a multiply-add."""
        _, count, m, n, k = self.numbers
        return float((2.0 * count * m * n * k).sum())


@dataclass(frozen=True)
class Accelerator:
    """A device.

    Attributes:
        memory: bytes.
        device: "cuda" or "cpu".
        flops: FLOP/s of dense products, by the bytes of an element; for 4 bytes in TF32, on GPUs that have it.
        float32: FLOP/s of float32 without TF32, if that is different.
        bandwidth: bytes/s, read and written.
        units: multiprocessors; 1: tiles do not matter (a CPU).
        efficiency: the share of `flops` that each kind of product reaches with full tiles, of `bandwidth` that "pass"
            and "depthwise" reach, and of `float32` that the arithmetic of depthwise convolutions reaches ("taps"),
            which no product falls below, however narrow.
        kernel: seconds added to every kernel.
        launch: seconds of the host for each kernel: eager code takes at least their sum, on a CPU that much more.
        dispatch: additional seconds of the host for each kernel in layers that ranks divide, for DTensors.
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
    float32: PositiveFloat | None = None

    @property
    def without_tf32(self) -> Accelerator:
        """The same with `precision=fp32`."""
        return replace(self, flops={**self.flops, 4: self.float32 or self.flops[4]})

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
            rate *= share * np.where(kinds == "direct", 1.0, self._used(count, m, n, k))
            # Depthwise convolutions do not use the units for products; products that would leave these empty need not.
            taps = (self.float32 or self.flops[4]) * self.efficiency.get("taps", 1.0)
            rate = np.where(is_depthwise, taps, np.maximum(rate, taps))
            arithmetic = np.where(is_product | is_depthwise, 2.0 * count * m * n * k / rate, 0.0)
        # A CPU's core waits for what it loads; a GPU computes other tiles meanwhile.
        each = (arithmetic + least if self.device == "cpu" else np.fmax(arithmetic, least)) + self.kernel
        own, host = float(each.sum()), self.launch + self.dispatch * divided
        launched = 0.0 if compiled else host * len(kinds)
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


class TimedWork(NamedTuple):
    """A measurement, and what predicts it for an accelerator."""

    predict: Callable[[Accelerator], float]
    seconds: float


def fitted(accelerator: Accelerator, rows: Sequence[TimedWork]) -> Accelerator:
    """The accelerator whose efficiencies and seconds for a kernel explain measurements best.

    Args:
        accelerator: where the search begins; what its `efficiency` does not name is not fitted.

    Returns:
        the same with other constants. The loss is robust, of the logarithms of the ratios; the start has some weight.
    """
    from scipy.optimize import least_squares

    names = list(accelerator.efficiency)
    least = {"grouped": 0.01, "depthwise": 0.01, "taps": 0.01}

    def made(logs: _Numbers) -> Accelerator:
        *shares, kernel = np.exp(logs)
        return replace(accelerator, efficiency=dict(zip(names, map(float, shares), strict=True)), kernel=float(kernel))

    def misses(logs: _Numbers) -> _Numbers:
        stays = 0.15 * np.sqrt(len(rows) / 20) * (logs - start)
        return np.concatenate([np.log1p(errors(made(logs), rows)), stays])

    start = np.log([*accelerator.efficiency.values(), accelerator.kernel])
    low = np.log([*(least.get(name, 0.05) for name in names), 1e-7])
    high = np.log([*(1.3 for _ in names), 1e-4])
    found = least_squares(misses, np.clip(start, low, high), loss="soft_l1", f_scale=0.1, bounds=(low, high))
    return made(found.x)


def errors(accelerator: Accelerator, rows: Iterable[TimedWork]) -> _Numbers:
    """Predicted over measured seconds, minus 1."""
    return np.array([row.predict(accelerator) / row.seconds - 1.0 for row in rows])


_FILE = Path(__file__).with_name("clusters.yaml")


class Links(Section):
    """The nodes of a cluster and the links between its ranks, of which each accelerator has one, as in a file."""

    per_node: PositiveInt
    """Ranks of a node."""
    inside: PositiveFloat
    """Bytes/s of a rank's bus within a node, in an all-reduce."""
    network: PositiveFloat
    """Bytes/s of a node's network cards together."""
    latency: tuple[NonNegativeFloat, NonNegativeFloat]
    """Seconds of a hop inside a node, and across nodes."""
    jitter: Rate
    """The share of the speed lost at each doubling of the nodes."""
    cores: PositiveInt
    """CPU cores of a node."""
    images_per_core: PositiveFloat
    """Images/s that a core decodes and augments."""
    gathers: PositiveFloat = 1.0
    """The speed of all-gathers and reduce-scatters as a share of all-reduce's (gloo: about half)."""


class Cluster(Links):
    """A number of ranks with their links."""

    accelerator: Accelerator
    ranks: PositiveInt

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.per_node)

    def gather(self, size: float, members: int, *, apart: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes in all, in a ring.

        Args:
            members: ranks of the group.
            apart: the distance of neighbours: 1 for consecutive ranks.
        """
        return self._ring(size / self.gathers, members, apart)

    def _ring(self, size: float, members: int, apart: int) -> float:
        nodes, bandwidth = self._crossing(members, apart)
        hops = (members - nodes) * self.latency[0] + (nodes - 1) * self.latency[1]
        return (members - 1) / members * size / bandwidth + hops

    def _tree(self, size: float, members: int, apart: int) -> float:
        nodes, bandwidth = self._crossing(members, apart)
        hops = (members / nodes - 1) * self.latency[0] + math.ceil(math.log2(nodes)) * self.latency[1]
        return size / bandwidth + hops

    def _crossing(self, members: int, apart: int) -> tuple[int, float]:
        """The nodes of a group, and the bytes/s of its slowest link."""
        nodes = min(max(math.ceil(members * apart / self.per_node), 1), members)
        # The groups that cross a node's network at once share it.
        per_group = self.network / min(apart, self.per_node)
        return nodes, min(self.inside, per_group) if nodes > 1 else self.inside

    def reduce(self, size: float, members: int, *, apart: int = 1) -> float:
        """Seconds of an all-reduce of `size` bytes, in a ring or, if that is faster, in NCCL's trees: chains within
        nodes, binary across them."""
        return 2.0 * min(self._ring(size, members, apart), self._tree(size, members, apart))

    def send(self, size: float, *, apart: int) -> float:
        """Seconds in which a rank sends `size` bytes to the rank at distance `apart`."""
        crosses = apart >= self.per_node
        # All ranks of a node send at once.
        bandwidth = min(self.inside, self.network / self.per_node) if crosses else self.inside
        return size / bandwidth + self.latency[crosses]

    @property
    def efficiency(self) -> float:
        """What jitter leaves of the speed."""
        return float((1.0 - self.jitter) ** math.log2(self.nodes))


class _Named(Links):
    accelerator: Text


class Constants(Section):
    """A file of accelerators and clusters, and ours of intervals."""

    accelerators: dict[str, Accelerator]
    clusters: dict[str, _Named]
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)


@cache
def constants(file: Path = _FILE) -> Constants:
    """The constants in a file.

    Raises:
        UserError: it cannot be read, or one line per mistake in it.
    """
    with refusing(f"cluster: {file} cannot be read", OSError, ValueError, use="`pycls-fast plan calibrate` writes one"):
        values = read_yaml(file)
    return validate(Constants, values, lambda key: str(file))


def accelerator(name: str, file: Path = _FILE) -> Accelerator:
    """An accelerator of a file.

    Raises:
        UserError: there is none of this name, or it has not all of its `flops`.
    """
    known = constants(file).accelerators
    one_of(f"cluster: {file}: accelerator", name, known)
    if not {2, 4} <= known[name].flops.keys():
        raise UserError(f"cluster: {file}: accelerators.{name}.flops: must have those of 2 and of 4 bytes")
    return known[name]


def cluster(text: str, memory: float | None = None) -> Cluster:
    """A cluster from `NAMExRANKS`: h100x64; NAME is one of `clusters.yaml`, or of a file, FILE.yaml:NAME. Without
    xRANKS it is one rank, and FILE.yaml or FILE.yaml:x4 is of the file's only cluster.

    Args:
        memory: bytes of each rank; None: what the file says, which a CPU's ranks share.

    Raises:
        UserError: there is no such cluster or file.
    """
    path, ending, name = text.rpartition(".yaml")
    file = user_path(path + ending) if ending else _FILE
    known, name = constants(file).clusters, name.removeprefix(":")
    found = re.fullmatch(r"(.*)x([1-9]\d*)", name)
    # The name rtx3090 looks as if it ended in a number of ranks.
    kind, ranks = (name, 1) if name in known or found is None else (found[1], int(found[2]))
    if not kind and len(known) == 1:
        (kind,) = known
    of_file = f"{path}{ending}:" if ending else ""
    one_of("cluster", of_file + kind, [of_file + each for each in known], more=", with a number: h100x64")
    settings = known[kind]
    if ranks > settings.per_node and ranks % settings.per_node:
        raise UserError(f"cluster: {text}: nodes have {settings.per_node} each; use a multiple of it")
    device = accelerator(settings.accelerator, file)
    sharing = min(ranks, settings.per_node) if device.device == "cpu" else 1
    device = replace(device, memory=memory or device.memory / sharing)
    return Cluster(**{**dict(settings), "accelerator": device, "ranks": ranks})


def interval(what: str) -> tuple[float, float]:
    """The ratios of measured to predicted "seconds", "cpu_seconds" or "memory" between which 90% of the cases lie."""
    return constants().intervals[what]
