"""Weighted k-nearest-neighbour classification: how well features separate the classes without training.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4; k and
temperature as Caron et al., Emerging Properties in Self-Supervised Vision Transformers (DINO), 2021, `eval_knn.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, UserError
from pycls_fast.parallel import ParallelModel
from pycls_fast.train.assemble import load_network
from pycls_fast.train.environment import device_name, provenance
from pycls_fast.train.features import collect_features
from pycls_fast.train.folder import output_file, write_json
from pycls_fast.train.health import OUT_OF_MEMORY, enough_memory, enough_to_score, or_cpu
from pycls_fast.train.pretrained import Loaded
from pycls_fast.train.tasks.score import Setup, set_up

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


def places(votes_BK: Tensor, labels_B: Tensor) -> Tensor:
    """How many classes rank above each image's own, (B,): more votes, or as many and a lower index; K without votes.

    Args:
        votes_BK: from `knn_votes`.
        labels_B: int64.
    """
    right_B1 = votes_BK.gather(1, labels_B[:, None])
    classes_K = torch.arange(votes_BK.shape[1], device=votes_BK.device)
    ahead_BK = (votes_BK > right_B1) | ((votes_BK == right_B1) & (classes_K < labels_B[:, None]))
    return torch.where(right_B1[:, 0] > -torch.inf, ahead_BK.sum(dim=1), votes_BK.shape[1])


def neighbour_places(
    features_ND: Tensor,
    labels_N: Tensor,
    memory_MD: Tensor,
    labels_M: Tensor,
    *,
    classes: int,
    k: int,
    temperature: float,
) -> Tensor:
    """The `places` of all images by the votes of the labelled ones, (N,)."""
    votes = knn_votes(features_ND, memory_MD, labels_M, classes=classes, k=k, temperature=temperature)
    return torch.cat([places(part_BK, part_B) for part_BK, part_B in zip(votes, labels_N.split(_CHUNK), strict=True)])


def score_neighbours(
    config: RunConfig,
    *,
    k: int,
    temperature: float,
    split: str,
    output: str | None,
    own_preprocessing: bool = True,
) -> int:
    """Classify a split by its nearest neighbours in the training split, on the head's input; print the scores.

    Args:
        config: the model, its `weights`, the data and the preprocessing (that of evaluation, for both splits).
        split: "val", or "test" if the data has one.
        output: a JSON file for the numbers.
        own_preprocessing: use the preprocessing that weights of other projects specify, if they do.

    Raises:
        UserError: weights or split do not exist, fewer than `k` training images, images cannot be read
            (`data.max_damaged`), `output` cannot be written, or out of memory.
    """
    with set_up(config, own_preprocessing=own_preprocessing) as setup:
        world = setup.world
        file = output_file(output, world) if output is not None else None
        sources = build.sources(setup.config, world)
        if split not in sources or split == "train":
            raise UserError(f"split: one of {', '.join(name for name in sources if name != 'train')}; got {split}")
        train = sources["train"]
        if len(train) < k:
            raise UserError(f"k: {k} neighbours of {len(train)} training images; use k={len(train)} or less")
        setup = setup.with_data(len(train))
        config = setup.config
        with enough_to_score(config, world):
            network, origin = load_network(config, train, world, setup.switches, for_training=True)
            wrapped, place = ParallelModel(network, network, world.device), (world, setup.switches, setup.display)
            with setup.display:
                found = {
                    name: collect_features(config, network, wrapped, sources[name], name, *place)
                    for name in ("train", split)
                }
        memory_MD, labels_M, features_ND, labels_N = (x.to(world.device) for x in (*found["train"], *found[split]))
        with enough_memory(
            f"runtime.device: {device_name(world.device)} is {OUT_OF_MEMORY} with the features of {len(labels_M):,} "
            f"training images and their votes; use a model with fewer features{or_cpu(world.device, 'runtime.device')}"
        ):
            numbers = {"classes": build.num_classes(config, train), "k": min(k, len(labels_M))}
            place_N = neighbour_places(features_ND, labels_N, memory_MD, labels_M, temperature=temperature, **numbers)
        record: dict[str, Any] = {
            "split": split,
            **{f"top{n}": 100.0 * (place_N < n).double().mean().item() for n in (1, 5)},
            "count": len(labels_N),
            "k": k,
            "temperature": temperature,
            "train_images": len(labels_M),
            "features": memory_MD.shape[1],
            "weights": origin.kind,
            "checkpoint": str(origin.path),
            "config_name": config.config_name,
            "preprocessing": build.preprocessing(config),
        }
        if world.is_main:
            _print_result(setup, origin, record)
        if world.is_main and file is not None:
            write_json(file, {**record, **provenance(world.device, world.size)})
        return DONE


def _print_result(setup: Setup, origin: Loaded, record: Mapping[str, Any]) -> None:
    whose = "" if setup.preprocessing is None else ", as the weights say"
    setup.display.table("weights", origin.fitted.table())
    setup.display.table(
        f"{record['k']} nearest neighbours among {record['train_images']:,} training images, temperature "
        f"{record['temperature']:g}",
        [
            ("split", record["split"]),
            ("top-1", f"{record['top1']:.2f}%"),
            ("top-5", f"{record['top5']:.2f}%"),
            ("images", f"{record['count']:,}"),
            ("features", f"{record['features']}"),
            ("preprocessing", record["preprocessing"] + whose),
        ],
    )
