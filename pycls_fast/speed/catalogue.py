"""All switches, in the order in which the documentation lists them."""

from __future__ import annotations

from pycls_fast.speed.cards.images import IMAGES
from pycls_fast.speed.cards.memory import MEMORY
from pycls_fast.speed.cards.network import NETWORK
from pycls_fast.speed.cards.optimizer import OPTIMIZER
from pycls_fast.speed.cards.step import STEP
from pycls_fast.speed.switch import Switch

CATALOGUE: tuple[Switch, ...] = NETWORK + OPTIMIZER + IMAGES + STEP + MEMORY
