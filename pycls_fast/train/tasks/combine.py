"""Weights made of others: model soups (the mean of several runs'), and temperature scaling (probabilities that say how
often the prediction is right, by one number)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from scipy import optimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, UserError
from pycls_fast.files import user_path
from pycls_fast.train.by_class import calibration_error, probability_error, set_scores
from pycls_fast.train.checkpoint import check_shapes
from pycls_fast.train.load_weights import is_same_model
from pycls_fast.train.saved_weights import SEVERAL_SPLITS, Weights, check_output, open_weights, write_weights
from pycls_fast.train.tasks.score import scored_split, set_up

# Natural logarithms of the lowest and the highest temperature.
_RANGE = (-4.0, 4.0)


def likelihood_loss(scores_NK: Tensor, targets: Tensor, temperature: float) -> float:
    """Mean negative log-likelihood by `scores_NK / temperature`, nats, of labels (N,), whose probabilities are a
    softmax, or zeros and ones (N, K), where each class has a probability of its own."""
    logits_NK = scores_NK.double() / temperature
    if targets.ndim == 1:
        return cross_entropy(logits_NK, targets).item()
    return binary_cross_entropy_with_logits(logits_NK, targets.double()).item()


def best_temperature(scores_NK: Tensor, targets: Tensor) -> float:
    """The temperature of the lowest `likelihood_loss` (Guo et al., On Calibration of Modern Neural Networks, 2017,
    section 4.2); a `UserError` if there is none: if lower is always better, because all labels have the highest score,
    or higher is."""
    found = optimize.minimize_scalar(
        lambda log: likelihood_loss(scores_NK, targets, math.exp(log)),
        bounds=_RANGE,
        method="bounded",
    )
    # Without a wrong image the loss is zero from some low temperature on; NaN compares false.
    if not found.fun > 1e-6 or abs(found.x) > 0.99 * _RANGE[1]:
        raise UserError(
            f"split: {len(scores_NK):,} images, which are half of it, have no best temperature: (nearly) all of them "
            "are right, or hardly one; score more images"
        )
    return math.exp(found.x)


def calibrate(config: RunConfig, output: str, *, split: str, overwrite: bool) -> int:
    """Write `config.weights` with the last layer divided by the temperature that suits every second image of a split,
    if the loss of the other images is lower with it.

    Whatever reads the file then gives calibrated probabilities, and the same classes. The errors before and after are
    of the other images. A `UserError` if the scores are not those of the last layer.
    """
    path = user_path(output)
    check_output(path, "safetensors", overwrite=overwrite)
    with set_up(config) as setup:
        weights = open_weights(setup.weights.path)
        weights.require_model()
        scored = scored_split(setup, split)
        network = setup.load(scored.source)
        last, sets_LK = network.last_layer(), build.label_sets(setup.config, scored.source, torch.device("cpu"))

        def scores() -> tuple[Tensor, Tensor, float | None]:
            """Scores (N, K), what they are compared with, and the calibration error of every second image."""
            found = setup.evaluate(network, scored, split)
            scores_NK, labels_N = torch.tensor(found.scores_NK), torch.from_numpy(found.predictions.labels_N)
            if sets_LK is not None:
                true_NK = sets_LK[scored.source.labels[found.predictions.indices_N]]
                return scores_NK, true_NK, probability_error(scores_NK[1::2].sigmoid().numpy(), true_NK[1::2].numpy())
            several = setup.config.loss.criterion().sigmoid
            targets = one_hot(labels_N, scores_NK.shape[1]) if several else labels_N
            return scores_NK, targets, calibration_error(found.predictions.of(slice(1, None, 2)))

        scores_NK, targets, before = scores()
        fitted = best_temperature(scores_NK[::2], targets[::2])
        loss, with_it = (likelihood_loss(scores_NK[1::2], targets[1::2], divisor) for divisor in (1.0, fitted))
        # One that was fitted to few images, or where none is needed, rather harms.
        helps = with_it < loss
        temperature, expected = (fitted, with_it) if helps else (1.0, loss)
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.div_(temperature)
        # Scored again, so that what is printed holds for the weights that are written.
        scaled_NK, _, after = scores()
        found = likelihood_loss(scaled_NK[1::2], targets[1::2], 1.0)
        if not math.isclose(found, expected, rel_tol=0.01, abs_tol=1e-4):
            raise UserError(
                f"model: does something to the scores of its last layer, {network.head_name}, so that dividing its "
                "weights by a temperature does not calibrate them"
            )
        if setup.world.is_main:
            tensors = weights.read()
            for name, _ in last.named_parameters():
                tensors[f"{network.head_name}.{name}"] /= temperature
            write_weights(path, weights, tensors)
            that = f"{fitted:.4f}, fitted to {len(scores_NK[::2]):,} images"
            kept = f"1, nothing changed: {that}, would raise the loss of the others to {with_it:.4f}"
            facts = [
                ("temperature", that if helps else kept),
                ("calibration error", f"{before:.4f}, then {after:.4f}, of {len(scores_NK[1::2]):,} others"),
                ("loss", f"{loss:.4f}, then {found:.4f}, of the same"),
                ("weights", str(path)),
            ]
            setup.display.table(scored.source.describe(), facts)
    return DONE


def mean_weights(ingredients: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of each tensor, on the CPU, summed in float64; those without floating point are the first one's.

    Statistics of batch norm are averaged, too, which fits weights that were fine-tuned from the same ones.
    """
    mean = ingredients[0].read(torch.float64)
    for each in ingredients[1:]:
        for name, tensor in each.read(torch.float64).items():
            if tensor.is_floating_point():
                mean[name] += tensor
    specs = ingredients[0].specs
    return {
        name: (total / len(ingredients)).to(specs[name].dtype) if total.is_floating_point() else total
        for name, total in mean.items()
    }


def greedy(ingredients: Sequence[Weights], top1: Callable[[Sequence[Weights]], float]) -> list[Weights]:
    """Greedy soup (Wortsman et al. 2022, recipe 1): beginning with the best one, each next best one is kept if the
    accuracy of the mean with it is at least that of the mean without it.
    """
    alone = {id(each): top1([each]) for each in ingredients}
    first, *others = sorted(ingredients, key=lambda each: -alone[id(each)])
    kept, best = [first], alone[id(first)]
    for each in others:
        reached = top1([*kept, each])
        if reached >= best:
            kept, best = [*kept, each], reached
    return kept


def soup(
    config: RunConfig, others: Sequence[str], output: str, *, method: str, split: str, which: str, overwrite: bool
) -> int:
    """Write the mean of `config.weights` and `others` (Wortsman et al., Model soups, 2022) as a file of weights. For
    the arguments see `SoupVerb`.
    """
    path = user_path(output)
    check_output(path, "safetensors", overwrite=overwrite)
    with set_up(config) as setup:
        found = [open_weights(each, kind=which) for each in (setup.weights.path, *others)]
        (first, _), facts = found[0].require_model(), set[str]()
        for each in found:
            own, classes = each.require_model()
            facts.add(str((sorted(each.specs.items()), classes, own["data"]["mean"], own["data"]["std"])))
            if len(facts) > 1 or not is_same_model(first["model"], own["model"], str(each.path), fresh_head=False):
                raise UserError(f"others: {each.path} has another model, classes or means than {found[0].path}")
        scored = scored_split(setup, split)
        has_seen = None
        for each in found[1:] if scored.source.drawn else ():
            names = {each.train_names, found[0].train_names}
            if None not in names and len(names) > 1:
                has_seen = (
                    f"{each.path} has another random split than {found[0].path}: it was trained on images of "
                    f"split={split}; use other images (data.root=FOLDER split=all)"
                )
        if has_seen is not None and method == "greedy":
            raise UserError(f"others: {has_seen} or method=uniform")
        network = setup.load(scored.source)
        # What was adapted, such as positions to data.image_size, has no mean of the files.
        own = {name: tensor.shape for name, tensor in network.state_dict().items()}
        check_shapes(f"weights: {found[0].path}", {name: spec.shape for name, spec in found[0].specs.items()}, own)

        def top1(chosen: Sequence[Weights]) -> float:
            network.load_state_dict(mean_weights(chosen))
            result, name = setup.evaluate(network, scored, split), "top-1"
            reached = result.top1
            if scored.source.label_sets is not None:
                name, reached = "mAP", set_scores(result, scored.source)["map"] or 0.0
            setup.display.note(f"{name} {reached:.2f}%: {' + '.join(str(each.path) for each in chosen)}")
            return reached

        kept = greedy(found, top1) if method == "greedy" else found
        if method == "uniform" and has_seen is not None:
            setup.display.note(f"not scored: {has_seen}")
        elif method == "uniform":
            top1(kept)
        if setup.world.is_main:
            # A soup of several splits has seen images of both sides of each.
            splits = {each.train_names for each in kept}
            mixed = replace(found[0], train_names=splits.pop() if len(splits) == 1 else SEVERAL_SPLITS)
            write_weights(path, mixed, mean_weights(kept))
            setup.display.note(f"{path}: the mean of {len(kept)} of {len(found)}")
    return DONE
