"""What a run will need, before it runs.

Read `memory_plan.py` first: the peak of a configuration's step, and the microbatch that fits into a device. `memory.py`
has the formulas, `activations.py` the measurement on fake tensors, `auto.py` the settings that are `auto`.
"""

from pycls_fast.plan.activations import Activations, measure
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.plan.cluster import Cluster, accelerator, cluster, interval
from pycls_fast.plan.live_memory import LiveMemory
from pycls_fast.plan.memory import Copies, Sizes, State, divisors, largest, peak, state, update_transient
from pycls_fast.plan.memory_plan import MemoryPlan, device_memory, gigabytes

__all__ = [
    "Activations",
    "Cluster",
    "Copies",
    "LiveMemory",
    "MemoryPlan",
    "Sizes",
    "State",
    "accelerator",
    "cluster",
    "device_memory",
    "divisors",
    "gigabytes",
    "interval",
    "largest",
    "measure",
    "peak",
    "resolve_auto",
    "state",
    "update_transient",
]
