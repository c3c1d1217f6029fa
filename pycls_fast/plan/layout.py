"""A layout: how ranks share a step, with the settings that give it to a run."""

from __future__ import annotations

from dataclasses import dataclass

from pycls_fast.config.keys import as_typed
from pycls_fast.strategies import HALVING, ScheduleName

_DIMENSIONS = ("pipeline", "replicate", "shard", "tensor", "expert")
# Resets the settings that a layout decides.
UNDIVIDED = {
    "name": "auto", "shard_degree": None, "replicate_degree": None,
    "tensor_degree": 1, "expert_degree": 1, "pipeline_degree": 1, "pipeline_schedule": "1f1b",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How ranks share a step: pipeline x replicate x shard x tensor of them, in this order from far to near; of the
    shards, `expert` neighbours divide the experts."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    schedule: ScheduleName = "1f1b"
    accumulation: int = 1
    recompute: str = "off"
    precision: str = "amp_bf16"

    @property
    def data(self) -> int:
        """Ranks with different images."""
        return self.replicate * self.shard

    @property
    def sums(self) -> int:
        """How often FSDP reduces gradients in a step: after each microbatch, in a pipeline only after the last."""
        return self.accumulation if self.pipeline == 1 else 1

    @property
    def values(self) -> dict[str, dict[str, object]]:
        """The settings of the run, including those that reset what the configuration may say."""
        parallel: dict[str, object] = dict(UNDIVIDED)
        if self.shard > 1 or self.tensor > 1:
            parallel["name"] = "fsdp"
            if self.replicate > 1:
                parallel |= {"name": "hsdp", "shard_degree": self.shard, "replicate_degree": self.replicate}
        else:
            # A configuration that shards may keep weights.
            parallel["reshard_after_forward"] = True
        for name in ("tensor", "expert", "pipeline"):
            parallel[f"{name}_degree"] = getattr(self, name)
        if self.pipeline > 1:
            parallel["pipeline_schedule"] = self.schedule
            if self.shard * self.tensor > 1 and self.schedule in HALVING:
                parallel["reshard_after_forward"] = False
        return {
            "parallel": parallel,
            "optim": {"accumulation_steps": self.accumulation},
            "speed": {"recompute": self.recompute},
            "precision": {"name": self.precision},
        }

    @property
    def overrides(self) -> list[str]:
        """`values` as overrides of a command line."""
        return [
            f"{group if key == 'name' else f'{group}.{key}'}={as_typed(value)}"
            for group, values in self.values.items()
            for key, value in values.items()
        ]

    @property
    def way(self) -> str:
        """What is divided, without the degrees."""
        return " x ".join(name for name in _DIMENSIONS if getattr(self, name) > 1) or "one rank"

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in _DIMENSIONS}
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
        return text if self.pipeline == 1 else f"{text} ({self.schedule})"
