"""Ranks, and the one function that wraps a model for them."""

from pycls_fast.parallel.allocator import keep_freed_memory
from pycls_fast.parallel.autocast import keep_in_float32
from pycls_fast.parallel.compiled import compile_model, uncompiled
from pycls_fast.parallel.float8 import use_float8
from pycls_fast.parallel.memory import save_activation_memory
from pycls_fast.parallel.world import Agreement, World, floating_buffers, start_world
from pycls_fast.parallel.wrap import prepare_model, wrap_model

__all__ = [
    "Agreement",
    "World",
    "compile_model",
    "floating_buffers",
    "keep_freed_memory",
    "keep_in_float32",
    "prepare_model",
    "save_activation_memory",
    "start_world",
    "uncompiled",
    "use_float8",
    "wrap_model",
]
