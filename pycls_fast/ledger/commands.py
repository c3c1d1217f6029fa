"""The command-line arguments that measure an arm, appended to the experiment's."""

from __future__ import annotations

from pathlib import Path

from pycls_fast.config.quoting import as_typed, text_override
from pycls_fast.config.schema import Parallel
from pycls_fast.ledger.plan import Arm

# Settings for several processes, which an arm may set and a single process refuses.
_SEVERAL = (
    "compression", "static_graph", "reshard_after_forward", "shard_degree", "replicate_degree", "prefetch_units",
    "powersgd_rank", "powersgd_start_step",
)  # fmt: skip
_ONE_PROCESS = (
    "parallel=single",
    "parallel.name=single",
    *(f"parallel.{key}={as_typed(Parallel.model_fields[key].default)}" for key in _SEVERAL),
)


def timing(arm: Arm, file: Path, *, steps: int, warmup_steps: int) -> list[str]:
    """One turn of `time_net` on the training step. It refuses `weights`, which do not affect time."""
    return [
        *arm.overrides, "weights=null", "mode=model", f"steps={steps}", f"warmup_steps={warmup_steps}", "repeats=1",
        text_override("output", str(file)),
    ]  # fmt: skip


def rounding(arm: Arm, file: Path, *, steps: int) -> list[str]:
    """Rounding errors against float64, in one process."""
    return [*arm.overrides, *_ONE_PROCESS, "mode=numerics", f"steps={steps}", text_override("output", str(file))]


def gradients(arm: Arm, file: Path) -> list[str]:
    """Gradient counts, in one process and in float32, so that nothing has rounded them."""
    return [*arm.overrides, *_ONE_PROCESS, "precision=fp32", "mode=gradients", text_override("output", str(file))]


def training(arm: Arm, run_dir: Path, *, seed: int) -> list[str]:
    """One run of `train_net`."""
    return [*arm.overrides, f"seed={seed}", text_override("run_dir", str(run_dir)), "runtime.progress=plain"]
