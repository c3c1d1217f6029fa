"""Weighted k-nearest-neighbour classification: how well features separate the classes without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import DONE, one_of
from pycls_fast.parallel import ParallelModel
from pycls_fast.train.environment import provenance
from pycls_fast.train.features import collect_features, knn_votes, voted_places
from pycls_fast.train.folder import output_file, write_json
from pycls_fast.train.health import enough_memory, enough_to_score
from pycls_fast.train.pretrained import Loaded, load_network
from pycls_fast.train.tasks.score import Setup, set_up


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
        UserError: weights or split do not exist, images cannot be read (`data.max_damaged`), `output` cannot be
            written, or out of memory.
    """
    with set_up(config, own_preprocessing=own_preprocessing) as setup:
        world = setup.world
        file = output_file(output, world) if output is not None else None
        sources = build.sources(setup.config, world)
        one_of("split", split, [name for name in sources if name != "train"])
        train = sources["train"]
        k = min(k, len(train))
        setup = setup.with_data(len(train))
        config = setup.config
        origin, place_N, about = _classified(setup, sources, split, k, temperature)
        record: dict[str, Any] = {
            "split": split,
            **{f"top{n}": 100.0 * (place_N < n).double().mean().item() for n in (1, 5)},
            "count": len(place_N),
            "k": k,
            "temperature": temperature,
            **about,
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


def _classified(
    setup: Setup, sources: Mapping[str, Images], split: str, k: int, temperature: float
) -> tuple[Loaded, Tensor, dict[str, int]]:
    """Where the weights came from, the `places` of the split's images, and facts about their neighbours."""
    config, world, train = setup.config, setup.world, sources["train"]
    train.refuse_several("knn")
    with enough_to_score(config, world), setup.display:
        network, origin = load_network(config, train, world, setup.switches, for_training=True)
        scorer = setup.scorer(ParallelModel(network, network, world.device))
        found = {name: collect_features(scorer, network, sources[name], name) for name in ("train", split)}
    memory_MD, labels_M, features_ND, labels_N = (x.to(world.device) for x in (*found["train"], *found[split]))
    what = f"the features of {len(labels_M):,} training images and their votes; use a model with fewer features"
    with enough_memory("runtime.device", world.device, what, cpu="runtime.device"):
        classes, k = build.num_classes(config, train), min(k, len(labels_M))
        votes = knn_votes(features_ND, memory_MD, labels_M, classes=classes, k=k, temperature=temperature)
        place_N = voted_places(votes, labels_N)
    return origin, place_N, {"train_images": len(labels_M), "features": memory_MD.shape[1]}


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
