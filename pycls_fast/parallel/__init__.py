"""How a model runs: ranks, activation memory, compilation; `wrap.py` has the one function that wraps it for them."""
