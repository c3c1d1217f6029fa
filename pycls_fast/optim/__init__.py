"""Parameter groups, schedules, optimizers and the average of the weights."""

from pycls_fast.optim.ema import Ema
from pycls_fast.optim.groups import parameter_groups
from pycls_fast.optim.optimizers import adamw, set_lr, sgd
from pycls_fast.optim.schedule import Schedule

__all__ = ["Ema", "Schedule", "adamw", "parameter_groups", "set_lr", "sgd"]
