"""How a model runs: ranks, activation memory, compilation, and the one function that wraps it for them."""

from pycls_fast.parallel.activation_memory import save_activation_memory
from pycls_fast.parallel.allocator import keep_freed_memory
from pycls_fast.parallel.autocast import keep_in_float32
from pycls_fast.parallel.compiled import compile_model, uncompiled
from pycls_fast.parallel.fairscale_fsdp import plain_name
from pycls_fast.parallel.flat import FlatShards
from pycls_fast.parallel.float8 import use_float8
from pycls_fast.parallel.rendezvous import first_of_launch
from pycls_fast.parallel.world import ALONE, Agreement, World, floating_buffers, lost_ranks, start_world
from pycls_fast.parallel.wrap import place_model, wrap_model
from pycls_fast.parallel.wrapped import StrategySettings, Wrapped

__all__ = [
    "ALONE",
    "Agreement",
    "FlatShards",
    "StrategySettings",
    "World",
    "Wrapped",
    "compile_model",
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
