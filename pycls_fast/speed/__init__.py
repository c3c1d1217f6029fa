"""The catalogue of performance switches: every optimization is a named choice beside a plain reference.

`numerics` says how closely a fast value must match its reference:

- `identical`: the same bits, step after step;
- `rounding`: the same mathematics in a different order of operations;
- `training`: it changes what is learned, so its accuracy must be measured.
"""

from pycls_fast.speed.catalogue import CATALOGUE
from pycls_fast.speed.presets import HAS_GLIBC, META2022, resolve
from pycls_fast.speed.switch import MODEL_KINDS, Device, Numerics, Switch, SwitchName

__all__ = [
    "CATALOGUE",
    "HAS_GLIBC",
    "META2022",
    "MODEL_KINDS",
    "Device",
    "Numerics",
    "Switch",
    "SwitchName",
    "resolve",
]
