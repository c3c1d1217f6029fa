"""Parameter groups, schedules, optimizers and the average of the weights."""

from pycls_fast.optim.ema import Ema
from pycls_fast.optim.groups import Group, layers, parameter_groups
from pycls_fast.optim.masters import MasterWeights
from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.optim.optimizers import (
    adafactor,
    adamw,
    adamw8bit,
    compile_step,
    lamb,
    lion,
    load_named_state,
    make_capturable,
    muon,
    named_state,
    set_lr,
    sgd,
)
from pycls_fast.optim.scaling import ConstantScaler, loss_scaler
from pycls_fast.optim.schedule import Schedule

__all__ = [
    "ConstantScaler",
    "Ema",
    "Group",
    "HostOptimizer",
    "MasterWeights",
    "Schedule",
    "adafactor",
    "adamw",
    "adamw8bit",
    "compile_step",
    "lamb",
    "layers",
    "lion",
    "load_named_state",
    "loss_scaler",
    "make_capturable",
    "muon",
    "named_state",
    "parameter_groups",
    "set_lr",
    "sgd",
]
