"""All switches, in the order in which the documentation lists them."""

from __future__ import annotations

from pycls_fast.speed.images import IMAGES
from pycls_fast.speed.memory import MEMORY
from pycls_fast.speed.network import NETWORK
from pycls_fast.speed.optimizer import OPTIMIZER
from pycls_fast.speed.step import STEP
from pycls_fast.speed.switch import Switch

CATALOGUE: tuple[Switch, ...] = NETWORK + OPTIMIZER + IMAGES + STEP + MEMORY
