"""Weighted k-nearest-neighbour classification: how well features separate the classes without training.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4; k and
temperature as Caron et al., Emerging Properties in Self-Supervised Vision Transformers (DINO), 2021, `eval_knn.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, one_of
from pycls_fast.train.evaluate import places
from pycls_fast.train.features import collect_features
from pycls_fast.train.folder import output_file, write_json
from pycls_fast.train.health import enough_to_score
from pycls_fast.train.tasks.score import set_up

# Images whose votes are counted at a time.
_CHUNK = 1024


def knn_votes(
    features_ND: Tensor, memory_MD: Tensor, labels_M: Tensor, *, classes: int, k: int, temperature: float
) -> Iterator[Tensor]:
    """Yields the logarithm of each class's votes, (B, K), for 1,024 images at a time: those of all may not fit.

    They have the features' format, and are minus infinity for a class without a neighbour. The `k` labelled images with
    the highest cosine similarity `s` vote with `exp(s / temperature)`.

    Args:
        features_ND: features of the images to classify, of any norm.
        memory_MD: features of the labelled images.
        labels_M: int64.
        k: at most M.
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


def score_neighbours(
    config: RunConfig,
    *,
    k: int,
    temperature: float,
    split: str,
    output: str | None,
    preprocessing: Literal["weights", "config"] = "weights",
) -> int:
    """Classify a split by its nearest neighbours in the training split, on the head's input; print the scores. For
    the arguments see `KnnVerb`. Both splits are preprocessed as for evaluation.

    Raises:
        UserError: weights or split do not exist, images cannot be read (`data.max_damaged`), `output` cannot be
            written, or out of memory.
    """
    with set_up(config, preprocessing=preprocessing) as setup:
        world = setup.world
        file = output_file(output, world) if output is not None else None
        sources = build.sources(setup.config, world)
        one_of("split", split, [name for name in sources if name != "train"])
        train = sources["train"]
        train.refuse_several("knn")
        network, origin = setup.load(train, for_training=True)
        with enough_to_score(setup.config, world), setup.display:
            scorer = setup.scorer(network)
            found = {name: collect_features(scorer, network, sources[name], name) for name in ("train", split)}
        memory_MD, labels_M, features_ND, labels_N = (x.to(world.device) for x in (*found["train"], *found[split]))
        classes, k = build.num_classes(setup.config, train), min(k, len(labels_M))
        votes = knn_votes(features_ND, memory_MD, labels_M, classes=classes, k=k, temperature=temperature)
        place_N = torch.cat([places(*part) for part in zip(votes, labels_N.split(_CHUNK), strict=True)])
        record = {
            "split": split,
            **{f"top{n}": 100.0 * (place_N < n).double().mean().item() for n in (1, 5)},
            "count": len(place_N),
            "k": k,
            "temperature": temperature,
            "train_images": len(labels_M),
            "features": memory_MD.shape[1],
            **setup.facts(origin),
        }
        title = f"{k} nearest neighbours among {len(labels_M):,} training images, temperature {temperature:g}"
        if world.is_main:
            setup.show(title, origin, record)
        if world.is_main and file is not None:
            write_json(file, record)
        return DONE
