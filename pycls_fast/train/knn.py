"""What features tell apart without training: weighted k-nearest-neighbour classification.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018, section 3.4; k and
temperature as Caron et al., Emerging Properties in Self-Supervised Vision Transformers (DINO), 2021, `eval_knn.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pycls_fast import build
from pycls_fast.config.command_line import DONE
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import Source, to_device
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.parallel import World
from pycls_fast.train.building import load_network
from pycls_fast.train.display import Display
from pycls_fast.train.environment import device_name, provenance
from pycls_fast.train.memory import OUT_OF_MEMORY, enough_memory, enough_to_score
from pycls_fast.train.normalization import resolve_normalization
from pycls_fast.train.output_file import output_file, write_json

_CHUNK = 1024


def knn_votes(
    features_ND: Tensor, memory_MD: Tensor, labels_M: Tensor, *, classes: int, k: int, temperature: float
) -> Tensor:
    """The logarithm of each class's votes, (N, K), in the features' format; minus infinity without a neighbour.

    The `k` images of the memory that are nearest by cosine similarity `s` vote with `exp(s / temperature)`.

    Args:
        features_ND: of the images to classify, of any length.
        memory_MD: of the labelled images.
        labels_M: int64.
        classes: K.
        k: at most M.
        temperature: above 0.
    """
    memory_DM = F.normalize(memory_MD, dim=1).T
    votes: list[Tensor] = []
    for part_BD in F.normalize(features_ND, dim=1).split(_CHUNK):
        nearest_Bk, index_Bk = (part_BD @ memory_DM).topk(k, dim=1)
        scores_Bk, labels_Bk = nearest_Bk / temperature, labels_M[index_Bk]
        # Relative to the class's nearest: below a temperature of 0.0113 exp(s / temperature) is no float32 any more.
        peak_BK = part_BD.new_full((len(part_BD), classes), -torch.inf)
        peak_BK.scatter_reduce_(1, labels_Bk, scores_Bk, "amax")
        rest_Bk = (scores_Bk - peak_BK.gather(1, labels_Bk)).exp()
        votes.append(peak_BK + torch.zeros_like(peak_BK).scatter_add_(1, labels_Bk, rest_Bk).log())
    return torch.cat(votes) if votes else features_ND.new_zeros(0, classes)


def places(votes_NK: Tensor, labels_N: Tensor) -> Tensor:
    """How many classes are ahead of each image's own, (N,): more votes, or as many and a lower index; K without any.

    Args:
        votes_NK: from `knn_votes`.
        labels_N: int64.
    """
    right_N1 = votes_NK.gather(1, labels_N[:, None])
    classes_K = torch.arange(votes_NK.shape[1], device=votes_NK.device)
    ahead_NK = (votes_NK > right_N1) | ((votes_NK == right_N1) & (classes_K < labels_N[:, None]))
    return torch.where(right_N1[:, 0] > -torch.inf, ahead_NK.sum(dim=1), votes_NK.shape[1])


def score_neighbours(config: RunConfig, *, k: int, temperature: float, split: str, output: str | None) -> int:
    """Classify a split by its neighbours in the training split, on the features in front of the head; print the scores.

    Args:
        config: the model, its `weights`, the data and the preprocessing (that of evaluation, for both splits).
        k: neighbours that vote.
        temperature: of their votes.
        split: "val", or "test" where the data has one.
        output: a JSON file for the numbers.

    Raises:
        UserError: weights, a split or as many training images as neighbours that are not there, an `output` that cannot
            be written, or more images than the memory holds.
    """
    weights = config.weights
    if weights is None:
        raise UserError("weights: not set; give a run folder, a file of weights or timm:NAME as weights=SOURCE")
    with build.world(config) as world:
        file = output_file(output, world) if output is not None else None
        build.set_backend(config, world.device)
        switches = build.switches(config, world.device)
        display = Display(speaks=world.is_main, mode=config.runtime.progress)
        sources = build.sources(config, world)
        if split not in sources or split == "train":
            raise UserError(f"split: one of {', '.join(name for name in sources if name != 'train')}; got {split}")
        train = sources["train"]
        if len(train) < k:
            raise UserError(f"k: {k} neighbours of {len(train)} training images; use k={len(train)} or less")
        config = build.for_scoring(resolve_normalization(build.resolve_auto(config, len(train), world), world))
        with enough_to_score(config, world):
            network, origin = load_network(config, weights, train, world, switches, for_training=True)
            with display:
                memory_MD, labels_M = _features(config, network, train, "train", world, switches, display)
                features_ND, labels_N = _features(config, network, sources[split], split, world, switches, display)
        with enough_memory(
            f"runtime.device: {device_name(world.device)} is {OUT_OF_MEMORY} with the features of {len(labels_M):,} "
            "training images and their votes; use runtime.device=cpu"
        ):
            votes_NK = knn_votes(
                features_ND,
                memory_MD,
                labels_M,
                classes=build.num_classes(config, train),
                k=min(k, len(labels_M)),
                temperature=temperature,
            )
            place_N = places(votes_NK, labels_N)
        top1, top5 = (100.0 * (place_N < n).double().mean().item() for n in (1, 5))
        if not world.is_main:
            return DONE
        display.table("weights", origin.fitted.table())
        display.table(
            f"{k} nearest neighbours among {len(labels_M):,} training images, temperature {temperature:g}",
            [
                ("split", split),
                ("top-1", f"{top1:.2f}%"),
                ("top-5", f"{top5:.2f}%"),
                ("images", f"{len(labels_N):,}"),
                ("features", f"{memory_MD.shape[1]}"),
                ("preprocessing", build.preprocessing(config)),
            ],
        )
        if file is not None:
            values: dict[str, Any] = {
                "split": split,
                "top1": top1,
                "top5": top5,
                "count": len(labels_N),
                "k": k,
                "temperature": temperature,
                "train_images": len(labels_M),
                "features": memory_MD.shape[1],
                "weights": origin.kind,
                "checkpoint": str(origin.path),
                "config_name": config.config_name,
                "preprocessing": build.preprocessing(config),
                **provenance(world.device, world.size),
            }
            write_json(file, values)
        return DONE


@torch.no_grad()
def _features(
    config: RunConfig,
    network: Network,
    source: Source,
    split: str,
    world: World,
    switches: build.Switches,
    display: Display,
) -> tuple[Tensor, Tensor]:
    """What the head sees of each image that can be read, float32 (N, D) on the device, and the labels; on all ranks."""
    network.eval()
    prepare, autocast = build.prepare(config, world.device, switches), build.autocast(config, world.device)
    seen: list[Tensor] = []
    head: str = network.head_name
    handle = network.get_submodule(head).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].float().cpu())
    )
    labels: list[Tensor] = []
    display.begin_evaluation(split, len(source))
    try:
        for batch in to_device(build.eval_loader(config, source, world, switches), world.device, mode="blocking"):
            for name, reason in batch.damaged:
                display.warn(f"{name}: {reason}; not counted")
            if len(batch.labels_B):
                with autocast():
                    network(prepare(batch))
                labels.append(batch.labels_B)
            display.advance_evaluation(len(batch.labels_B) * world.size)
    finally:
        handle.remove()
    # By way of the host, which has more room.
    mine = (torch.cat(seen).cpu(), torch.cat(labels).cpu()) if seen else None
    found = [part for part in world.gather(mine) if part is not None]
    if not found:
        raise UserError(f"split: {split} has no image that can be read")
    features_ND, labels_N = (torch.cat(tensors).to(world.device) for tensors in zip(*found, strict=True))
    return features_ND, labels_N
