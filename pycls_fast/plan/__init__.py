"""What a run will need and take, before it runs.

Read `memory_plan.py` first: the peak of a configuration's step, and the microbatch that fits into a device. `memory.py`
has the formulas, `activations.py` the measurement on fake tensors, `auto.py` the settings that are `auto`, `race.py`
what is faster on this CPU.

`search.py` compares the layouts of a cluster: `work.py` counts kernels, `time.py` says how long they take, `cluster.py`
what ranks exchange takes; `report.py` shows it, `calibrate.py` measures the machine at hand.
"""

from pycls_fast.plan.activations import Activations, measure
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.plan.cluster import Cluster, accelerator, cluster, interval
from pycls_fast.plan.live_memory import LiveMemory
from pycls_fast.plan.memory import Copies, Sizes, State, divisors, peak, state, update_transient
from pycls_fast.plan.memory_plan import MemoryPlan, device_memory, gigabytes
from pycls_fast.plan.report import Report
from pycls_fast.plan.search import Layout, Outcome, Search

__all__ = [
    "Activations",
    "Cluster",
    "Copies",
    "Layout",
    "LiveMemory",
    "MemoryPlan",
    "Outcome",
    "Report",
    "Search",
    "Sizes",
    "State",
    "accelerator",
    "cluster",
    "device_memory",
    "divisors",
    "gigabytes",
    "interval",
    "measure",
    "peak",
    "resolve_auto",
    "state",
    "update_transient",
]
