"""Weight initialisers that torch.nn.init does not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Standard deviation of a unit normal truncated at +-2; dividing by it gives the variance that was asked for.
_CUT_NORMAL_STD = 0.87962566103423978


@torch.no_grad()
def lecun_normal_(weight: Tensor) -> Tensor:
    """Fill in place from a normal, truncated at two of its standard deviations, with variance 1 / fan_in.

    The default of Flax's Dense and Conv layers (`jax.nn.initializers.lecun_normal`). LeCun et al., Efficient BackProp,
    1998, section 4.6, gives the variance; the truncation is JAX's.

    Args:
        weight: (out, in, ...), any number of kernel dimensions; fan_in is the size of one output's slice.
    """
    fan_in = weight[0].numel()
    # Inverse transform sampling, in place: torch.nn.init.trunc_normal_ uses rejection in newer versions, which makes
    # the values depend on the torch version and the host wait for the device.
    mass = math.erf(2.0 / math.sqrt(2.0))
    weight.uniform_(-mass, mass).erfinv_()
    weight.mul_(math.sqrt(2.0) / (_CUT_NORMAL_STD * math.sqrt(fan_in)))
    bound = 2.0 / (_CUT_NORMAL_STD * math.sqrt(fan_in))
    return weight.clamp_(-bound, bound)
