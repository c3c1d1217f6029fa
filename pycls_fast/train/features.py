"""Features, which are the inputs of a network's last linear layer, and what their nearest neighbours say.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4; k and the
temperature as in Caron et al., Emerging Properties in Self-Supervised Vision Transformers (DINO), 2021, `eval_knn.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.train.evaluate import Scorer, places

# Images whose votes are counted at a time.
_CHUNK = 1024


@contextmanager
def head_inputs(network: Network) -> Iterator[list[Tensor]]:
    """A list that receives the last layer's input of each forward pass in the context, float32 (B, D), on the CPU."""
    seen: list[Tensor] = []
    handle = network.last_layer().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def collect_features(scorer: Scorer, network: Network, source: Images, split: str) -> tuple[Tensor, Tensor]:
    """The head's input for every readable image, float32 (N, D) on the CPU, and the labels, in the source's order; the
    same on all ranks, which call this. A `UserError` if no image can be read, too many are damaged, or the head gets
    several vectors of one."""
    world = scorer.world
    features: list[Tensor] = []
    labels: list[Tensor] = []
    indices: list[Tensor] = []
    with head_inputs(network) as seen:
        for batch, _ in scorer.logits(source, f"features of {split}"):
            features.append(seen[-1])
            labels.append(batch.labels_B.cpu())
            indices.append(batch.indices_B.cpu())
            seen.clear()
    # Gathered in host memory, which is larger.
    mine = tuple(map(torch.cat, (features, labels, indices))) if features and world.counts else None
    found = [part for part in world.gather(mine) if part is not None]
    scorer.damaged.need_images(split, len(found))
    features_ND, labels_N, indices_N = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    if len(found) > 1:
        # Each rank has a part of every batch; the folds of a fit would not be those of one process.
        order_N = indices_N.argsort()
        features_ND, labels_N = features_ND[order_N], labels_N[order_N]
    if not features_ND.isfinite().all():
        raise UserError("weights: features of some images are not finite; take other weights, or head=small")
    if features_ND.ndim != 2:
        raise UserError(
            f"model: the last layer, {network.head_name}, gets {tuple(features_ND.shape[1:])} numbers of an image, not "
            "one vector, so there are no features; train with head=small"
        )
    return features_ND, labels_N


def knn_votes(
    features_ND: Tensor, memory_MD: Tensor, labels_M: Tensor, *, classes: int, k: int, temperature: float
) -> Iterator[Tensor]:
    """Yields the logarithm of each class's votes, (B, K), for 1,024 images at a time: those of all may not fit.

    They have the features' format, and are minus infinity for a class without a neighbour. The `k` labelled images (at
    most M) with the highest cosine similarity `s` vote with `exp(s / temperature)`.
    """
    memory_DM = F.normalize(memory_MD, dim=1).T
    for part_BD in F.normalize(features_ND, dim=1).split(_CHUNK):
        nearest_Bk, index_Bk = (part_BD @ memory_DM).topk(k, dim=1)
        scores_Bk, labels_Bk = nearest_Bk / temperature, labels_M[index_Bk]
        # Relative to the class's nearest neighbour: exp(s / temperature) overflows float32 below temperature 0.0113.
        peak_BK = part_BD.new_full((len(part_BD), classes), -torch.inf)
        peak_BK.scatter_reduce_(1, labels_Bk, scores_Bk, "amax")
        rest_Bk = (scores_Bk - peak_BK.gather(1, labels_Bk)).exp()
        yield peak_BK + torch.zeros_like(peak_BK).scatter_add_(1, labels_Bk, rest_Bk).log()


def voted_places(votes: Iterable[Tensor], labels_N: Tensor) -> Tensor:
    """The `places` of all images by their `knn_votes`, (N,)."""
    return torch.cat([places(part_BK, part_B) for part_BK, part_B in zip(votes, labels_N.split(_CHUNK), strict=True)])
