"""The edge: configuration values become plain keyword arguments, names become functions. Configuration stops here."""

from pycls_fast.build.data import eval_loader, microbatch_size, mixer, num_workers, prepare, preprocessing, train_loader
from pycls_fast.build.device import Switches, autocast, compute_dtype, level, set_backend, switches, world
from pycls_fast.build.network import lower, model, num_classes, save_activation_memory
from pycls_fast.build.optimization import ema, loss, loss_scaler, optimizer, peak_lr, schedule
from pycls_fast.build.sources import eval_set, sources

__all__ = [
    "Switches",
    "autocast",
    "compute_dtype",
    "ema",
    "eval_loader",
    "eval_set",
    "level",
    "loss",
    "loss_scaler",
    "lower",
    "microbatch_size",
    "mixer",
    "model",
    "num_classes",
    "num_workers",
    "optimizer",
    "peak_lr",
    "prepare",
    "preprocessing",
    "save_activation_memory",
    "schedule",
    "set_backend",
    "sources",
    "switches",
    "train_loader",
    "world",
]
