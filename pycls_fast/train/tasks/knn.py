"""Weighted k-nearest-neighbour classification: how well features separate the classes without training."""

from __future__ import annotations

from typing import Literal

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, UserError, one_of
from pycls_fast.train.features import collect_features, knn_votes, voted_places
from pycls_fast.train.folder import output_file, write_json
from pycls_fast.train.health import enough_to_score
from pycls_fast.train.tasks.score import set_up


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
        if train.label_sets is not None:
            raise UserError("data.label_separator: knn is for images that have one label each")
        network, origin = setup.load(train, for_training=True)
        with enough_to_score(setup.config, world), setup.display:
            scorer = setup.scorer(network)
            found = {name: collect_features(scorer, network, sources[name], name) for name in ("train", split)}
        memory_MD, labels_M, features_ND, labels_N = (x.to(world.device) for x in (*found["train"], *found[split]))
        classes, k = build.num_classes(setup.config, train), min(k, len(labels_M))
        votes = knn_votes(features_ND, memory_MD, labels_M, classes=classes, k=k, temperature=temperature)
        place_N = voted_places(votes, labels_N)
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
