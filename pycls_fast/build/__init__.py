"""From configuration to objects: values become keyword arguments, names become functions.

models, data, optim and parallel never see a configuration.
"""

from pycls_fast.build.batches import check_mixing, microbatch_size, steps_per_epoch, total_steps
from pycls_fast.build.cpu_cores import cores, cores_per_rank
from pycls_fast.build.data import (
    eval_batches,
    eval_loader,
    for_scoring,
    mixer,
    num_workers,
    prepare,
    prepare_on_host,
    preprocessing,
    train_loader,
    with_preprocessing,
)
from pycls_fast.build.device import (
    autocast,
    compute_dtype,
    device_kind,
    level,
    set_backend,
    strategy,
    world,
)
from pycls_fast.build.memory import MemoryPlan, device_memory, gigabytes
from pycls_fast.build.network import (
    apply_precision,
    counted_model,
    draw_on_device,
    freeze,
    is_sharded,
    model,
    num_classes,
    save_activation_memory,
    wrap,
)
from pycls_fast.build.optimization import (
    ema,
    loss,
    loss_scaler,
    optimizer,
    parameter_groups,
    schedule,
)
from pycls_fast.build.race import Race, compile_if_it_pays, cuda_precision, race, shared_race
from pycls_fast.build.sizes import resolve_auto
from pycls_fast.build.sources import (
    class_counts,
    eval_set,
    imagenet_wnids,
    names_id,
    order_name,
    sources,
)
from pycls_fast.build.switch_values import compile_for_gpu, has_compiler, has_decoder, switches

__all__ = [
    "MemoryPlan",
    "Race",
    "apply_precision",
    "autocast",
    "check_mixing",
    "class_counts",
    "compile_for_gpu",
    "compile_if_it_pays",
    "compute_dtype",
    "cores",
    "cores_per_rank",
    "counted_model",
    "cuda_precision",
    "device_kind",
    "device_memory",
    "draw_on_device",
    "ema",
    "eval_batches",
    "eval_loader",
    "eval_set",
    "for_scoring",
    "freeze",
    "gigabytes",
    "has_compiler",
    "has_decoder",
    "imagenet_wnids",
    "is_sharded",
    "level",
    "loss",
    "loss_scaler",
    "microbatch_size",
    "mixer",
    "model",
    "names_id",
    "num_classes",
    "num_workers",
    "optimizer",
    "order_name",
    "parameter_groups",
    "prepare",
    "prepare_on_host",
    "preprocessing",
    "race",
    "resolve_auto",
    "save_activation_memory",
    "schedule",
    "set_backend",
    "shared_race",
    "sources",
    "steps_per_epoch",
    "strategy",
    "switches",
    "total_steps",
    "train_loader",
    "with_preprocessing",
    "world",
    "wrap",
]
