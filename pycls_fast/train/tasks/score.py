"""Score saved weights on a split, without training, by their own head or by nearest neighbours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from pycls_fast import build, published
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images, match_classes
from pycls_fast.data.sources.eval_sets import EvalSet, imagenet_wnids, open_eval_set
from pycls_fast.errors import DONE, UserError, one_of
from pycls_fast.files import user_path
from pycls_fast.models import pretrained
from pycls_fast.models.export_formats import ExportedNetwork
from pycls_fast.network import Network
from pycls_fast.parallel.parallel_model import ParallelModel
from pycls_fast.parallel.world import World
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.speed import Speed
from pycls_fast.train.by_class import class_scores, roc_auc, set_scores
from pycls_fast.train.confidence_intervals import intervals, wilson
from pycls_fast.train.display import Display, says_nothing
from pycls_fast.train.environment import provenance
from pycls_fast.train.evaluate import DamagedImages, Evaluation, FlipAveraged, Scorer, evaluate, predictions_csv
from pycls_fast.train.features import collect_features, knn_votes, voted_places
from pycls_fast.train.folder import output_file, write_json, write_text
from pycls_fast.train.load_weights import load_network
from pycls_fast.train.out_of_memory import enough_to_score
from pycls_fast.train.pictures import write_report
from pycls_fast.train.resolving import pin_weights, resolve_normalization, timm_name, with_precision
from pycls_fast.train.saved_weights import SEVERAL_SPLITS, Weights, open_weights

# Classes that are printed.
_CLASSES = 20
# The rows of a table of scores: their names and forms, by the keys of a record.
ROWS = {
    "split": ("split", "{}"),
    "map": ("mAP", "{:.2f}%"),
    "top1": ("top-1", "{:.2f}%"),
    "top5": ("top-5", "{:.2f}%"),
    "class_top1": ("balanced accuracy", "{:.2f}%"),
    "recall": ("recall, mean of the classes", "{:.2f}%"),
    "f1": ("F1, mean of the classes", "{:.2f}%"),
    "auc": ("ROC AUC, mean of the classes", "{:.4f}"),
    "calibration_error": ("calibration error", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "count": ("images", "{:,}"),
    "rule": ("right is", "{}"),
    "features": ("features", "{:,}"),
    "preprocessing": ("preprocessing", "{}"),
    "published": ("published", "{0[top1]:.2f}% on ImageNet-1k's validation images at {0[size]} px ({0[source]})"),
    "difference": ("ours", "{:+.2f}"),
}


@dataclass
class Setup:
    """A process that is ready to score.

    Attributes:
        config: the user's, with the commit of `weights`, and with the weights' own preprocessing if that is used.
        weights, fitted: where they come from, and what `load` has done to make them fit.
        preprocessing: the weights' own, if it is used.
    """

    config: RunConfig
    weights: Weights
    preprocessing: pretrained.Description | None
    world: World
    switches: Speed
    display: Display
    damaged: DamagedImages
    fitted: pretrained.Fitted = field(init=False)

    def load(self, data: Images, *, for_training: bool = False) -> Network:
        """The network with the weights for these images; only `for_training` may the head be new. From here on every
        value of `config` is a number."""
        # Nothing is trained, so nothing has to fit.
        config = self.config.with_values(optim={"accumulation_steps": self.config.optim.microbatches})
        config = resolve_normalization(config, self.world, note=self.display.note)
        self.config = build.for_scoring(resolve_auto(config, len(data), self.world))
        if self.weights.run is not None:
            self.fitted = pretrained.Fitted(str(self.weights.path), pretrained.OURS, self.weights.kind)
            return ExportedNetwork(self.weights.run, self.config.data.mean, self.config.data.std)
        network, self.weights, self.fitted = load_network(
            self.config, data, self.world, self.switches, for_training=for_training
        )
        return network

    def scorer(self, network: nn.Module) -> Scorer:
        wrapped = ParallelModel(network, network, self.world.device)
        return Scorer(self.config, wrapped, self.world, self.switches, self.display, self.damaged)

    def evaluate(self, network: nn.Module, scored: EvalSet, split: str, *, tta: str = "none") -> Evaluation:
        """The scores of a network from `load` on a set that is called `split`; `tta` as of `TestVerb`. A `UserError` if
        no image can be scored."""
        config = self.config
        with enough_to_score(config, self.world), self.display:
            sigmoid = scored.source.label_sets is not None or config.loss.criterion().sigmoid
            called = FlipAveraged(network, sigmoid=sigmoid) if tta == "flip" else network
            result = evaluate(self.scorer(called), scored, f"evaluating {split}", keep_scores=not config.data.eval_set)
        self.damaged.need_images(split, result.count)
        return result

    def facts(self) -> dict[str, Any]:
        """Where a record's numbers come from, for the record."""
        return {
            "weights": self.weights.kind,
            "checkpoint": str(self.weights.path),
            "step": self.weights.step,
            "config_name": self.config.config_name,
            "preprocessing": build.preprocessing(self.config),
            **provenance(self.world.device, self.world.size),
        }

    def print_record(self, title: str, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Print where the weights came from and a table of the record; returns the rows of the table."""
        whose = "" if self.preprocessing is None else f", preprocessed as for {self.preprocessing.weights}"
        self.display.note(f"{self.weights}{whose}")
        if self.fitted.adapted or self.fitted.left_out:
            self.display.table("weights", self.fitted.table())
        rows, known = [], record.get("intervals", {})
        for key, (name, text) in ROWS.items():
            if not says_nothing(record, key):
                ends = f" ({' to '.join(map(text.format, known[key]))})" if key in known else ""
                rows.append((name, text.format(record[key]) + ends))
        if known:
            rows.append(("in brackets", "95% intervals, for other images like these"))
        self.display.table(title, rows)
        return rows


@contextmanager
def set_up(
    config: RunConfig,
    *,
    preprocessing: Literal["weights", "config"] = "config",
    typed: Collection[str] = (),
    programs: bool = False,
) -> Iterator[Setup]:
    """Join the ranks, find the weights and apply the settings of the process.

    Args:
        preprocessing: "weights": published weights have their own, but for the keys that are `typed`.
        programs: the weights may be a file of `EXPORTED`, whose scores are all that it gives.
    """
    with build.world(config) as world:
        config = with_precision(pin_weights(config, world), world, training=False)
        assert config.weights is not None
        weights = open_weights(config.weights, world, programs=programs)
        # Those of a run have the preprocessing in their configuration.
        name = timm_name(config) if weights.config is None else None
        about = weights.description(model=name) if preprocessing == "weights" else None
        if about is not None:
            config = build.with_preprocessing(config, about, kept=typed)
            if config != build.with_preprocessing(config, about):
                # Their published number is for another one.
                about = None
        switches = build.switches(config, world.device)
        build.set_backend(config, world.device, switches)
        display = Display(speaks=world.is_main, mode=config.runtime.progress)
        damaged = DamagedImages(config.data.max_damaged, world, display)
        yield Setup(config, weights, about, world, switches, display, damaged)


def scored_split(setup: Setup, split: str) -> EvalSet:
    """The split ("all" for data that has only one), or the set that `data.eval_set` names; notes a random split that is
    not the weights' own."""
    config, data, world, weights = setup.config, setup.config.data, setup.world, setup.weights
    if data.eval_set is not None:
        one_of("split", split, ["val"], more=f" with data.eval_set={data.eval_set}")
        assert data.eval_root is not None
        return open_eval_set(
            data.eval_set,
            user_path(data.eval_root),
            classes=_classes(setup),
            wnids=None if data.wnids is None else user_path(data.wnids),
            val=build.sources(config, world)["val"] if data.eval_set == "real" else None,
        )
    sources = build.sources(config, world, whole=split == "all")
    known = [*sources, *(["all"] if any(source.drawn for source in sources.values()) else [])]
    one_of("split", split, known, more=" (test/ is val if there is no val/)" if split == "test" else "")
    note = _other_split(setup, sources, split)
    if note is not None:
        setup.display.note(note)
    source = sources[split]
    if weights.classes is not None:
        source = match_classes(source, weights.classes, where="data.root", of=str(weights.path))
    return EvalSet(source, None if source.label_sets is None else "best one of several labels")


def _classes(setup: Setup) -> tuple[str, ...]:
    """Class names of the outputs, by which evaluation sets are matched."""
    if setup.weights.classes is not None:
        return setup.weights.classes
    # Other projects' files do not name classes; 1,000 outputs are taken to be ImageNet-1k's, in its order.
    if setup.config.model.num_classes in (None, 1000):
        return imagenet_wnids()
    raise UserError(f"weights: {setup.weights.path} does not name its classes, which data.eval_set needs")


def _other_split(setup: Setup, sources: dict[str, Images], split: str) -> str | None:
    """A note if a random split is not the one that the weights were trained on; None if it is."""
    found, is_own = setup.weights.path, setup.weights.trained_on(setup.config.data.root)
    if split == "all" and is_own:
        return f"data.root: {found} was trained on most of these images"
    names = setup.weights.train_names
    if not sources[split].drawn or (names is not None and names == sources["train"].names_id()):
        return None
    if not is_own and names != SEVERAL_SPLITS:
        total = sum(len(source) for source in sources.values())
        return (
            f"data.root: split at random, so {len(sources[split]):,} of its {total:,} images are scored; split=all "
            "scores all"
        )
    if names is None:
        return None
    return (
        f"data.root: the random split is not the one that {found} was trained on (other images, or other values of "
        "data.val_fraction, data.split_seed or data.fold): the weights may have been trained on images scored here"
    )


def score(
    config: RunConfig,
    split: str,
    output: str | None,
    *,
    predictions: str | None = None,
    report: str | None = None,
    tta: str = "none",
    preprocessing: Literal["weights", "config"] = "weights",
    typed: Collection[str] = (),
) -> int:
    """Evaluate `config.weights` on a split of the configured data, or on `data.eval_set`, and print the scores. For the
    arguments see `TestVerb`."""
    with set_up(config, preprocessing=preprocessing, typed=typed, programs=True) as setup:
        world = setup.world
        file = output_file(output, world) if output is not None else None
        table = output_file(predictions, world, key="predictions") if predictions is not None else None
        index = output_file(f"{report}/index.html", world, key="report") if report is not None else None
        scored = scored_split(setup, split)
        source, split = scored.source, setup.config.data.eval_set or split
        network = setup.load(source)
        result = setup.evaluate(network, scored, split, tta=tta)
        if world.is_main:
            by_class = {} if setup.config.data.eval_set else _by_class(source, result)
            record = {
                "split": split,
                **result.record(),
                "rule": scored.rule,
                **by_class,
                "intervals": intervals(result, source, by_class),
                "damaged": [list(item) for item in setup.damaged.reported.items()],
                "tta": tta,
                **_published(setup, split, result.top1),
                **setup.facts(),
            }
            facts = setup.print_record(source.describe(), record)
            _show_worst(setup.display, by_class.get("classes", ()))
            if file is not None:
                write_json(file, record)
            if table is not None:
                write_text(table, predictions_csv(result.predictions, source), key="predictions")
            if index is not None:
                classes = (by_class or _by_class(source, result))["classes"]
                how = setup.config.data.conversion
                title = f"{str(setup.weights.path).removeprefix(f'{Path.cwd()}/')}: {split}"
                write_report(index, result, source, title, facts, classes=classes, convert=how)
        return DONE


def _published(setup: Setup, split: str, top1: float) -> dict[str, Any]:
    """The published number of these weights and our difference from it, for the record.

    Empty if none is known, or if they were scored in another way: published numbers are for the original validation
    images. A file comes without preprocessing; its experiment's is the published one.
    """
    path = setup.weights.path
    # A file that does not say whose it is gets its model's preprocessing, but not the number of timm's weights.
    about = None if setup.preprocessing is None else setup.weights.description()
    experiment = published.EXPERIMENTS.get(setup.config.config_name)
    name = None if about is None else about.weights
    if about is None and experiment is not None and isinstance(path, Path) and experiment.weights == path.name:
        name = path.name
    known = published.WEIGHTS.get(name) if name is not None and split == "val" else None
    if known is None:
        return {}
    return {"published": {"weights": name, **asdict(known)}, "difference": top1 - known.top1}


def _by_class(source: Images, result: Evaluation) -> dict[str, Any]:
    """`class_scores` with the area under the ROC curve, of each class and their mean; or `set_scores`."""
    if source.label_sets is not None:
        return set_scores(result, source)
    found = class_scores(result.predictions, source.classes)
    areas = [] if result.scores_NK is None else roc_auc(result.predictions.labels_N, result.scores_NK)
    for row, area in zip(found["classes"], areas, strict=False):
        row["auc"] = area
    known = [area for area in areas if area is not None]
    return found | {"auc": sum(known) / len(known) if known else None}


def _show_worst(display: Display, classes: Sequence[Mapping[str, Any]]) -> None:
    seen = sorted((row for row in classes if row["f1"] is not None), key=lambda row: row["f1"])
    shown = []
    for row in seen[:_CLASSES]:
        precision = "none" if row["precision"] is None else f"{row['precision']:.1f}%"
        numbers = f"F1 {row['f1']:.1f}%, recall {row['top1']:.1f}%, precision {precision}, {row['images']:,} images"
        shown.append((row["class"], numbers))
    if shown:
        display.table("classes" if len(seen) <= _CLASSES else f"the {_CLASSES} classes of the lowest F1", shown)


def score_neighbours(
    config: RunConfig,
    *,
    k: int,
    temperature: float,
    split: str,
    output: str | None,
    preprocessing: Literal["weights", "config"] = "weights",
    typed: Collection[str] = (),
) -> int:
    """Classify a split by its nearest neighbours in the training split, on the head's input, both preprocessed as for
    evaluation; print the scores. For the arguments see `KnnVerb`."""
    with set_up(config, preprocessing=preprocessing, typed=typed) as setup:
        world = setup.world
        file = output_file(output, world) if output is not None else None
        sources = build.sources(setup.config, world)
        one_of("split", split, [name for name in sources if name != "train"])
        train = sources["train"]
        if train.label_sets is not None:
            raise UserError("data.label_separator: knn is for images that have one label each")
        network = setup.load(train, for_training=True)
        with enough_to_score(setup.config, world), setup.display:
            scorer = setup.scorer(network)
            found = {name: collect_features(scorer, network, sources[name], name) for name in ("train", split)}
        memory_MD, labels_M, features_ND, labels_N = (x.to(world.device) for x in (*found["train"], *found[split]))
        classes, k = build.num_classes(setup.config, train), min(k, len(labels_M))
        votes = knn_votes(features_ND, memory_MD, labels_M, classes=classes, k=k, temperature=temperature)
        place_N = voted_places(votes, labels_N)
        shares = {f"top{n}": 100.0 * (place_N < n).double().mean().item() for n in (1, 5)}
        record = {
            "split": split,
            **shares,
            "intervals": {name: wilson(share, len(place_N)) for name, share in shares.items()},
            "count": len(place_N),
            "k": k,
            "temperature": temperature,
            "train_images": len(labels_M),
            "features": memory_MD.shape[1],
            **setup.facts(),
        }
        title = f"{k} nearest neighbours among {len(labels_M):,} training images, temperature {temperature:g}"
        if world.is_main:
            setup.print_record(title, record)
            if file is not None:
                write_json(file, record)
        return DONE
