"""Model soups: one network whose weights are the mean of several runs' or checkpoints' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, UserError
from pycls_fast.files import user_path
from pycls_fast.train.by_class import set_scores
from pycls_fast.train.export import checked, write_weights
from pycls_fast.train.tasks.score import evaluated, scored_split, set_up
from pycls_fast.train.weights import Weights, find_weights, open_weights


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
    path = checked(user_path(output), "safetensors", None, overwrite=overwrite)
    with set_up(config) as setup:
        found = [open_weights(find_weights(each), kind=which) for each in (setup.weights, *others)]
        for each in found[1:]:
            if (each.specs, each.classes) != (found[0].specs, found[0].classes):
                raise UserError(f"others: {each.origin.path} has other tensors or classes than {found[0].origin.path}")
        scored = scored_split(setup, split)
        network, _ = setup.load(scored.source)

        def top1(chosen: Sequence[Weights]) -> float:
            network.load_state_dict(mean_weights(chosen))
            result, name = evaluated(setup, split, scored, network), "top-1"
            reached = result.top1
            if scored.source.label_sets is not None:
                name, reached = "mAP", set_scores(result, scored.source)["map"] or 0.0
            setup.display.note(f"{name} {reached:.2f}%: {' + '.join(str(each.origin.path) for each in chosen)}")
            return reached

        kept = greedy(found, top1) if method == "greedy" else found
        if method == "uniform":
            top1(kept)
        if setup.world.is_main:
            write_weights(path, found[0], mean_weights(kept))
            setup.display.note(f"{path}: the mean of {len(kept)} of {len(found)}")
    return DONE
