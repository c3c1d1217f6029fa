"""From configuration to objects: values become keyword arguments, names become functions.

models, data, optim and parallel never see a configuration. Read `network.py` first; `data.py` has the loaders,
`device.py` what depends on the machine.
"""
# ruff: noqa: F401

from pycls_fast.build.data import (
    check_mixing,
    eval_batches,
    for_scoring,
    microbatch_size,
    mixer,
    num_workers,
    prepare,
    prepare_on_host,
    preprocessing,
    sources,
    steps_between_evaluations,
    steps_per_epoch,
    total_steps,
    train_loader,
    with_preprocessing,
)
from pycls_fast.build.device import (
    alone,
    autocast,
    compile_for_gpu,
    compiles,
    compute_dtype,
    cores,
    cores_per_rank,
    has_compiler,
    has_decoder,
    level,
    set_backend,
    switches,
    world,
)
from pycls_fast.build.network import (
    apply_precision,
    counted_model,
    ema,
    freeze,
    label_sets,
    loss,
    loss_scaler,
    low_rank,
    model,
    num_classes,
    optimizer,
    place,
    schedule,
    split_into_stages,
    trained_model,
    wrap,
)
