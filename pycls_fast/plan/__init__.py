"""What a run will need, before it runs: the peak memory of a training step (`memory.py`; read it first)."""

from pycls_fast.plan.activations import Activations, measure
from pycls_fast.plan.live_memory import LiveMemory
from pycls_fast.plan.memory import Copies, Sizes, State, divisors, largest, peak, state, update_transient

__all__ = [
    "Activations",
    "Copies",
    "LiveMemory",
    "Sizes",
    "State",
    "divisors",
    "largest",
    "measure",
    "peak",
    "state",
    "update_transient",
]
