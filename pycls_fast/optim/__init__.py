"""Parameter groups, schedules, optimizers, loss scaling and the exponential moving average of the weights."""

from pycls_fast.optim.ema import Ema
from pycls_fast.optim.freeze import freeze, keep_statistics
from pycls_fast.optim.groups import BATCH_NORM, NORMS, Decay, Group, Kinds, by_name, parameter_groups
from pycls_fast.optim.masters import CastOutput, MasterWeights, cast_around, cast_buffers
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
from pycls_fast.optim.scaling import loss_scaler
from pycls_fast.optim.schedule import LrSchedule
from pycls_fast.optim.shards import assign, local, local_slices
from pycls_fast.optim.weights import LocalShards, ModelWeights, OwnedWeights

__all__ = [
    "BATCH_NORM",
    "NORMS",
    "CastOutput",
    "Decay",
    "Ema",
    "Group",
    "HostOptimizer",
    "Kinds",
    "LocalShards",
    "LrSchedule",
    "MasterWeights",
    "ModelWeights",
    "OwnedWeights",
    "adafactor",
    "adamw",
    "adamw8bit",
    "assign",
    "by_name",
    "cast_around",
    "cast_buffers",
    "compile_step",
    "freeze",
    "keep_statistics",
    "lamb",
    "lion",
    "load_named_state",
    "local",
    "local_slices",
    "loss_scaler",
    "make_capturable",
    "muon",
    "named_state",
    "parameter_groups",
    "set_lr",
    "sgd",
]
