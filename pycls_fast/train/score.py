"""Score saved weights on a split, without training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pycls_fast import build, published
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import EvalSet
from pycls_fast.errors import DONE, UserError
from pycls_fast.files import user_path
from pycls_fast.models import foreign
from pycls_fast.parallel import ParallelModel, World
from pycls_fast.train.building import load_network
from pycls_fast.train.by_class import class_scores
from pycls_fast.train.damage import report_damage
from pycls_fast.train.enough import enough_to_score
from pycls_fast.train.environment import provenance
from pycls_fast.train.evaluation import Evaluation, evaluate, with_progress
from pycls_fast.train.output_file import is_special_file, output_file, write_json, write_text
from pycls_fast.train.predictions_table import predictions_csv
from pycls_fast.train.scored_split import scored_split
from pycls_fast.train.scoring import Setup, set_up
from pycls_fast.train.weights import Loaded


def score(
    config: RunConfig,
    split: str,
    output: str | None,
    *,
    predictions: str | None = None,
    own_preprocessing: bool = True,
) -> int:
    """Evaluate `config.weights` on a split of the configured data, or on `data.eval_set`, and print the scores.

    Args:
        config: the model, the data and the preprocessing; `weights` names a run folder or another source.
        split: see `scored_split`.
        output: a JSON file for the numbers.
        predictions: a CSV file for each image's prediction; see `predictions_csv`.
        own_preprocessing: use the preprocessing that weights of other projects specify, if they do.

    Raises:
        UserError: weights or split do not exist or do not fit, images cannot be read (`data.max_damaged`), a file
            cannot be written, or out of memory.
    """
    with set_up(config, own_preprocessing=own_preprocessing) as setup:
        world, display = setup.world, setup.display
        file = output_file(output, world) if output is not None else None
        table = _table_file(predictions, world) if predictions is not None else None
        scored = scored_split(setup.config, split, setup.weights, world, display)
        source, split = scored.source, setup.config.data.eval_set or split
        setup = setup.with_data(len(source))
        config, switches = setup.config, setup.switches
        with enough_to_score(config, world):
            network, origin = load_network(config, source, world, switches, for_training=False)
            with display:
                display.begin_evaluation(split, len(source))
                batches = build.eval_batches(config, source, world, switches)
                result = evaluate(
                    ParallelModel(network, network, world.device),
                    with_progress(batches, f"evaluating {split}", world, display),
                    build.prepare(config, world.device, switches),
                    build.autocast(config, world.device),
                    world,
                    build.criterion(config),
                    eval_set=scored,
                )
        report_damage(dict(result.damaged), config.data.max_damaged, world, display, outcome="not counted")
        if result.count == 0:
            key = "split" if config.data.eval_set is None else "data.eval_root"
            raise UserError(f"{key}: {split} has no image that can be scored")
        if world.is_main:
            comparison = _print_result(setup, split, scored, origin, result)
            if file is not None:
                write_json(file, {**_record(setup, split, scored, origin, result), **comparison})
            if table is not None:
                write_text(table, predictions_csv(result.predictions, source), key="predictions")
        return DONE


def _table_file(predictions: str, world: World) -> Path:
    """The path for the table, checked as by `output_file`."""
    file = user_path(predictions)
    if file.suffix.lower() != ".csv" and not file.is_dir() and not is_special_file(file):
        raise UserError(f"predictions: the table is a CSV file; call it {file.stem.removesuffix('.csv')}.csv")
    return output_file(predictions, world, key="predictions")


def _published_name(config: RunConfig, path: Path | str, about: foreign.Preprocessing | None, split: str) -> str | None:
    """The weights' name in `published.WEIGHTS`; None if they were scored in another way than the number there.

    Args:
        config: what they were scored with.
        path: the file, or the name of weights that were downloaded.
        about: the weights' own preprocessing, if it was used.
        split: what was scored; published numbers are for the original validation images.
    """
    if split != "val":
        return None
    if about is not None:
        return about.weights
    # A file comes without preprocessing; its experiment's is the published one.
    known = published.EXPERIMENTS.get(config.config_name)
    return known.weights if known is not None and isinstance(path, Path) and known.weights == path.name else None


def _published_comparison(name: str | None, top1: float) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """The published number and our difference from it, as rows and as a record; empty if none is known."""
    known = None if name is None else published.WEIGHTS.get(name)
    if known is None:
        return [], {}
    where = f"ImageNet-1k's 50,000 validation images at {known.size} px ({known.source})"
    rows = [("published", f"{known.top1:.2f}% on {where}"), ("ours", f"{top1 - known.top1:+.2f}")]
    return rows, {"published": {"weights": name, **asdict(known)}}


def _print_result(setup: Setup, split: str, scored: EvalSet, origin: Loaded, result: Evaluation) -> dict[str, Any]:
    """Print the result; returns the published number as a record, if there is one for this."""
    display, taken = setup.display, setup.preprocessing
    rows, comparison = _published_comparison(_published_name(setup.config, origin.path, taken, split), result.top1)
    whose = "" if taken is None else ", as the weights say"
    step = "" if origin.step is None else f", step {origin.step}"
    display.note(f"{origin.path} ({origin.kind} weights{step})")
    if origin.fitted.adapted or origin.fitted.left_out:
        display.table("weights", origin.fitted.table())
    display.table(
        scored.source.describe(),
        [
            ("split", split),
            ("top-1", f"{result.top1:.2f}%"),
            ("top-5", f"{result.top5:.2f}%"),
            ("loss", "none" if result.loss is None else f"{result.loss:.4f}"),
            ("images", f"{result.count:,}"),
            ("right is", scored.rule),
            ("preprocessing", build.preprocessing(setup.config) + whose),
            *rows,
        ],
    )
    return comparison


def _record(setup: Setup, split: str, scored: EvalSet, origin: Loaded, result: Evaluation) -> dict[str, Any]:
    """The values of the JSON file."""
    config, world = setup.config, setup.world
    return {
        "split": split,
        "weights": origin.kind,
        **result.record(),
        "preprocessing": build.preprocessing(config),
        "rule": scored.rule,
        **({} if config.data.eval_set else class_scores(result.predictions, scored.source.classes)),
        "checkpoint": str(origin.path),
        "step": origin.step,
        "config_name": config.config_name,
        "damaged": [list(item) for item in result.damaged],
        **provenance(world.device, world.size),
    }
