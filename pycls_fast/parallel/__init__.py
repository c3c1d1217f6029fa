"""How a model runs: ranks, activation memory, compilation, and the one function that wraps it for them."""

from pycls_fast.parallel.compile import compile_model, uncompiled
from pycls_fast.parallel.fairscale import plain_name
from pycls_fast.parallel.flat import FlatShards
from pycls_fast.parallel.launch import keep_freed_memory, start_world
from pycls_fast.parallel.memory import save_activation_memory
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.pipeline import Pipeline, cut
from pycls_fast.parallel.precision import keep_in_float32, use_float8
from pycls_fast.parallel.rendezvous import first_of_launch, lost_ranks
from pycls_fast.parallel.world import ALONE, Agreement, World, floating_buffers
from pycls_fast.parallel.wrap import place_model, wrap_model

__all__ = [
    "ALONE",
    "Agreement",
    "FlatShards",
    "ParallelModel",
    "Pipeline",
    "StrategySettings",
    "World",
    "compile_model",
    "cut",
    "first_of_launch",
    "floating_buffers",
    "keep_freed_memory",
    "keep_in_float32",
    "lost_ranks",
    "place_model",
    "plain_name",
    "save_activation_memory",
    "start_world",
    "uncompiled",
    "use_float8",
    "wrap_model",
]
