"""How much of a ledger's work is done in this start, and about how long the rest takes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counts finished measurements and training runs, those of earlier starts too, and the time of this start's.

    Attributes:
        done: both together.
        trained: training runs only.
    """

    done: int = 0
    trained: int = 0
    _measuring_seconds: list[float] = field(default_factory=list)
    _training_seconds: list[float] = field(default_factory=list)

    def note_done(self, *, training: bool) -> None:
        """Count a measurement or training run that is finished."""
        self.done += 1
        self.trained += training

    def note_time(self, seconds: float, *, training: bool) -> None:
        """Remember how long one took."""
        (self._training_seconds if training else self._measuring_seconds).append(seconds)

    def left(self, total: int, trainings: int, jobs: int) -> str:
        """The remaining time in words.

        Args:
            total: number of measurements and training runs in the plan.
            trainings: training runs in the plan.
            jobs: training runs at a time.
        """
        runs = max(trainings - self.trained, 0)
        others = max(total - self.done - runs, 0)
        # How long a training takes is not known before one has ended.
        unknown = runs > 0 and not self._training_seconds
        if unknown and not others:
            return "the training comes next"
        seconds = others * _mean(self._measuring_seconds) + runs * _mean(self._training_seconds) / jobs
        return f"about {_minutes(seconds)} left{' before the training' if unknown else ''}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
