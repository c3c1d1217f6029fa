"""The buckets in which replicas exchange gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pycls_fast.parallel.ddp import _bucket_megabytes


@pytest.mark.parametrize(
    # ResNet-50, ViT-B, ViT-L, ViT-H.
    ("millions", "megabytes"),
    [(25, None), (86, None), (304, 72), (632, 100)],
)
def test_large_models_have_large_buckets_and_every_model_several(millions: int, megabytes: int | None) -> None:
    with torch.device("meta"):
        network = nn.Linear(1000, 1000 * millions, bias=False)
    assert _bucket_megabytes(network) == megabytes
    network.requires_grad_(False)
    assert _bucket_megabytes(network) is None
