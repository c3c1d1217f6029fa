"""Networks as pure mathematics: they know nothing of ranks, casts, meshes or compilation.

Each is a `pycls_fast.network.Network`, the only interface for code that shards, compiles or loads them.
"""
