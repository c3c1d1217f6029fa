"""Ranks, and the one function that wraps a model for them."""

from pycls_fast.parallel.world import Agreement, World, floating_buffers, start_world
from pycls_fast.parallel.wrap import prepare_model, wrap_model

__all__ = ["Agreement", "World", "floating_buffers", "prepare_model", "start_world", "wrap_model"]
