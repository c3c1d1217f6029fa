"""Accelerators and clusters by their names: `clusters.yaml`, or a file that `plan calibrate` wrote."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from pycls_fast.choice import Section
from pycls_fast.config.compose import validate
from pycls_fast.errors import UserError, one_of, refusing
from pycls_fast.files import user_path
from pycls_fast.plan.time import Accelerator
from pycls_fast.reading import read_yaml
from pycls_fast.values import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, Text

_FILE = Path(__file__).with_name("clusters.yaml")


@dataclass(frozen=True)
class Cluster:
    """Ranks, one for each accelerator, and the links between them.

    Attributes:
        ranks: their number.
        per_node: ranks of a node.
        inside: bytes/s of a rank's bus within a node, in an all-reduce.
        network: bytes/s of a node's network cards together.
        latency: seconds of a hop inside a node, and across nodes.
        jitter: the share of the speed lost at each doubling of the nodes.
        cores: of a node.
        images_per_core: images/s that one of them decodes and augments.
        gathers: the share of that speed that all-gathers and reduce-scatters have (gloo: about half).
    """

    accelerator: Accelerator
    ranks: int
    per_node: int
    inside: float
    network: float
    latency: tuple[float, float]
    jitter: float
    cores: int
    images_per_core: float
    gathers: float = 1.0

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.per_node)

    def gather(self, size: float, members: int, *, apart: int = 1) -> float:
        """Seconds in which members gather `size` bytes, each its share, or reduce and scatter them (a ring).

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
        # Of a node's network each of the groups that cross it at once has a part.
        per_group = self.network / min(apart, self.per_node)
        return nodes, min(self.inside, per_group) if nodes > 1 else self.inside

    def reduce(self, size: float, members: int, *, apart: int = 1) -> float:
        """Seconds of an all-reduce of `size` bytes: reduced and scattered, then gathered, in a ring or, if that is
        sooner, in NCCL's trees: chains within nodes, binary across them."""
        return 2.0 * min(self._ring(size, members, apart), self._tree(size, members, apart))

    def send(self, size: float, *, apart: int) -> float:
        """Seconds in which a rank sends `size` bytes to one so far away."""
        crosses = apart >= self.per_node
        # All ranks of a node send at once.
        bandwidth = min(self.inside, self.network / self.per_node) if crosses else self.inside
        return size / bandwidth + self.latency[crosses]

    def efficiency(self) -> float:
        """What jitter leaves of the speed."""
        return 1.0 - self.jitter * math.log2(self.nodes)


class _Links(Section):
    """A cluster of a file, of any number of ranks; see `Cluster`."""

    accelerator: Text
    per_node: PositiveInt
    inside: PositiveFloat
    network: PositiveFloat
    latency: tuple[NonNegativeFloat, NonNegativeFloat]
    jitter: Rate
    cores: PositiveInt
    images_per_core: PositiveFloat
    gathers: PositiveFloat = 1.0


class Constants(Section):
    """A file of accelerators and clusters, and ours of intervals."""

    accelerators: dict[str, Accelerator]
    clusters: dict[str, _Links]
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)


@cache
def constants(file: Path = _FILE) -> Constants:
    """Those of a file.

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


def cluster(text: str) -> Cluster:
    """A cluster from `NAMExRANKS`: h100x64; NAME is one of `clusters.yaml`, or of a file, FILE.yaml:NAME.

    Raises:
        UserError: there is no such cluster or file.
    """
    found = re.fullmatch(r"(?:(.+\.yaml):)?(\w+?)(?:x([1-9]\d*))?", text)
    file = _FILE if found is None or found[1] is None else user_path(found[1])
    known = constants(file).clusters
    one_of("cluster", text if found is None else found[2], known, more=", with a number: h100x64")
    assert found is not None
    ranks, settings = int(found[3] or 1), known[found[2]]
    if ranks > settings.per_node and ranks % settings.per_node:
        raise UserError(f"cluster: {text}: nodes have {settings.per_node} each; use a multiple of it")
    device = accelerator(settings.accelerator, file)
    return Cluster(**{**dict(settings), "accelerator": device, "ranks": ranks})


def interval(what: str) -> tuple[float, float]:
    """The least and the most of measured over predicted "seconds", "cpu_seconds" or "memory" in 90% of the cases."""
    return constants().intervals[what]
