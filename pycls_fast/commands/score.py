"""`pycls-fast test`, `soup`, `calibrate` and `knn`: trained weights on the images of a configuration."""

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import Purpose, RunConfig, Verb
from pycls_fast.values import Text


class TestVerb(Verb, config_of_weights=True, purpose=Purpose(scores_sets=True)):
    """Evaluate a checkpoint: `pycls-fast test weights=RUN_OR_CHECKPOINT [split=val] [output=FILE.json]`.

    Without `--config-name` the configuration is the one that the weights were trained with, as stored in a run, a
    checkpoint or an exported file. Weights of timm and torchvision are scored with their own preprocessing, beside the
    published number: `--config-name deit_s16 weights=timm:deit_small_patch16_224.fb_in1k`.
    """

    split: str = "val"
    """val, train, test, or all of data that is not split."""
    output: Text | None = None
    """A JSON file for the numbers."""
    predictions: Text | None = None
    """A CSV file of all images and predictions, worst first."""
    report: Text | None = None
    """A folder for index.html: scores of each class, the confusion matrix, and wrong predictions, those first whose
    labels may be wrong."""
    tta: Literal["none", "flip"] = "none"
    """flip: mean with mirror image; twice the time."""
    preprocessing: Literal["weights", "config"] = "weights"
    """Whose preprocessing published weights get: their own, or the configuration's."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.score import score

        return score(config, **dict(self))


class SoupVerb(Verb, config_of_weights=True):
    """Average the weights of several runs: `pycls-fast soup weights=RUN 'others=[RUN,RUN]' [method=greedy]`.

    Runs that were fine-tuned from the same weights, with other seeds or learning rates, often give a better network as
    their mean, which costs no more than one of them (Wortsman et al., Model soups, 2022). Data and preprocessing are
    those of the first.
    """

    others: Annotated[tuple[Text, ...], Field(min_length=1)]
    """The weights besides those of weights=: a list of runs, checkpoints or files of the same network."""
    output: Text = "soup.safetensors"
    """The file to write, which is used like a run."""
    method: Literal["greedy", "uniform"] = "greedy"
    """greedy: from the best, add each that does not lower the top-1 accuracy on split; uniform: the mean of all."""
    split: str = "val"
    """The split that greedy chooses by: not the one that the soup is reported on."""
    which: Literal["auto", "model", "ema"] = "auto"
    """auto: the average of the weights if there is one."""
    overwrite: bool = False
    """Overwrite an existing file."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.combine import soup as make_soup

        return make_soup(config, **dict(self))


class CalibrateVerb(Verb, config_of_weights=True):
    """Make probabilities say how often they are right: `pycls-fast calibrate weights=RUN output=FILE.safetensors`.

    Divides the last layer by one temperature, fitted to validation images (Guo et al., 2017), so that predictions and
    exports of the file are calibrated. The predicted classes stay as they are.
    """

    output: Text = "calibrated.safetensors"
    """The file to write, which is used like a run."""
    split: str = "val"
    """The split whose images are used: every second one to fit, the others to measure."""
    overwrite: bool = False
    """Overwrite an existing file."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.combine import calibrate as calibrate_weights

        return calibrate_weights(config, **dict(self))


class KnnVerb(Verb, default="finetune", config_of_weights=True):
    """Classify by nearest neighbours, untrained: `pycls-fast knn model=vit_b16 weights=SOURCE data.root=PATH`.

    Compares features before the head; the k=20 nearest training images vote with exp(similarity / temperature). The
    configuration is the one stored with the weights, if there is one; else that of the experiment finetune.
    """

    k: Annotated[int, Field(gt=0)] = 20
    """The number of neighbours that vote."""
    temperature: Annotated[float, Field(gt=0.0)] = 0.07
    """A vote counts exp(similarity / temperature)."""
    split: str = "val"
    """The split that is classified by the neighbours in train."""
    output: Text | None = None
    """A JSON file for the numbers."""
    preprocessing: Literal["weights", "config"] = "weights"
    """Whose preprocessing published weights get: their own, or the configuration's."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.score import score_neighbours

        return score_neighbours(config, **dict(self))
