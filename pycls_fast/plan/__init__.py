"""What a run will need and take, before it runs.

Read `memory_plan.py` first: the peak of a configuration's step, and the microbatch that fits into a device. `peak.py`
has the formulas, `activations.py` the measurement on fake tensors, `auto.py` the settings that are `auto`, `race.py`
what is faster on this CPU.

`search.py` compares the layouts of a cluster (`layout.py`): `operators.py` counts kernels, `cluster.py` says how long
they and exchanges take; `report.py` shows it, `calibrate.py` measures the machine at hand.
"""
