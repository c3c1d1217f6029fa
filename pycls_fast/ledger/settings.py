"""What a ledger measures for each arm."""

from __future__ import annotations

from dataclasses import dataclass

from pycls_fast.config.ladder import Mode


@dataclass(frozen=True)
class LadderSettings:
    """What is measured for each arm.

    Attributes:
        mode: how the rungs of the ladder become arms.
        seeds: training runs per arm; 0 for none.
        first_seed: seed of the first one.
        rounds: timings per arm, in turns.
        steps, warmup_steps: steps per timing, at least.
        seconds: the shortest timing; its warm-up lasts half of it or more.
        numerics_steps: training steps between the two measurements of rounding; None for neither.
        jobs: concurrent training runs, each with GPUs of its own on CUDA. Timings always run one at a time.
        ranks: processes per arm, unless the ladder sets them.
        margin: loss of top-1 in points that does not matter.
        gradients: count the first arm's gradients in float32 against float16's limits.
    """

    mode: Mode = "cumulative"
    seeds: int = 3
    first_seed: int = 0
    rounds: int = 3
    steps: int = 10
    warmup_steps: int = 5
    seconds: float = 2.0
    numerics_steps: int | None = 20
    jobs: int = 1
    ranks: int = 1
    margin: float = 0.2
    gradients: bool = True
