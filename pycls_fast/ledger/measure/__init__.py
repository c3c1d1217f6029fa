"""Measurements, each in a process of its own: timing.py times variants (variant.py) by the parts in workloads.py,
stages.py the input pipeline; numerics.py measures rounding and counts gradients; device.py has clocks and memory."""
