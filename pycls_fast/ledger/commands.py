"""The command-line arguments that measure an arm, appended to the experiment's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycls_fast.config.quoting import as_typed, key_of, text_override
from pycls_fast.config.schema import Parallel
from pycls_fast.ledger.plan import Arm

# Settings for several processes, which an arm may set and a single process refuses or ignores.
_SEVERAL = (
    "compression", "static_graph", "reshard_after_forward", "shard_degree", "replicate_degree", "prefetch_units",
    "powersgd_rank", "powersgd_start_step", "sync_batchnorm",
)  # fmt: skip
_ONE_PROCESS = (
    "parallel=single",
    "parallel.name=single",
    *(f"parallel.{key}={as_typed(Parallel.model_fields[key].default)}" for key in _SEVERAL),
)


def timing(
    arm: Arm, file: Path, *, steps: int, warmup_steps: int, seconds: float = 0.0, mode: str = "train"
) -> list[str]:
    """One turn of `time_net` on the training step. It refuses `weights`, which do not affect time."""
    return [
        *arm.overrides, "weights=null", f"mode={mode}", f"steps={steps}", f"warmup_steps={warmup_steps}",
        f"seconds={seconds:g}", "repeats=1", text_override("output", str(file)),
    ]  # fmt: skip


def rounding(arm: Arm, file: Path, *, steps: int) -> list[str]:
    """Rounding errors against float64, in one process."""
    return [*arm.overrides, *_ONE_PROCESS, "mode=numerics", f"steps={steps}", text_override("output", str(file))]


def with_own_rounding(arms: Sequence[Arm], typed: Sequence[str] = ()) -> list[Arm]:
    """The arms whose rounding one process can measure, without those that are the same as an earlier one there.

    Args:
        arms: in order.
        typed: overrides of the experiment.
    """
    found: list[Arm] = []
    for arm in arms:
        same = [other for other in found if _in_one_process(other) == _in_one_process(arm)]
        # The same overrides twice show how reproducible a measurement is.
        repeated = any((other.overrides, other.ranks) == (arm.overrides, arm.ranks) for other in same)
        if not _compresses(arm, typed) and (repeated or not same):
            found.append(arm)
    return found


def _compresses(arm: Arm, typed: Sequence[str]) -> bool:
    """Whether its ranks round the gradients that they exchange."""
    values = {key_of(override): override.partition("=")[2] for override in (*typed, *arm.overrides)}
    return arm.ranks > 1 and values.get("parallel.compression", "none") != "none"


def _in_one_process(arm: Arm) -> tuple[object, ...]:
    """The checkout of an arm, and the overrides that `_ONE_PROCESS` leaves it."""
    reset = {key_of(override) for override in _ONE_PROCESS}
    return arm.tree, *(override for override in arm.overrides if key_of(override) not in reset)


def gradients(arm: Arm, file: Path) -> list[str]:
    """Gradient counts, in one process and in float32, so that nothing has rounded them."""
    return [*arm.overrides, *_ONE_PROCESS, "precision=fp32", "mode=gradients", text_override("output", str(file))]


def training(arm: Arm, run_dir: Path, *, seed: int) -> list[str]:
    """One run of `train_net`."""
    return [*arm.overrides, f"seed={seed}", text_override("run_dir", str(run_dir)), "runtime.progress=plain"]
