"""Settings that every test shares."""

from __future__ import annotations

import torch

# Two tests or ranks side by side must not fight for the same cores.
torch.set_num_threads(1)
