"""What takes trained weights: `pycls-fast predict`, `maps`, `export`, `test`, `soup`, `calibrate` and `knn`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pycls_fast.config import ModuleNames, Purpose, RunConfig, Section, Verb, typed_keys
from pycls_fast.errors import one_of
from pycls_fast.values import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Several, Text

Which = Literal["auto", "model", "ema"]
Device = Literal["auto", "cpu", "cuda"]


def _imported(verb: Verb) -> dict[str, Any]:
    """The verb's keys but `imports`, which are imported."""
    from pycls_fast.config.compose import import_modules

    given = dict(verb)
    import_modules(given.pop("imports"))
    return given


class _ImagesOptions(Section):
    """Keys that name a network and images."""

    weights: Text
    """A run folder (its best checkpoint), a checkpoint (RUN/checkpoints/step_000000100), a safetensors file from
    pycls-fast export, timm:NAME or torchvision:NAME; each has its own class names and preprocessing."""
    images: tuple[str, ...]
    """Files, folders (searched recursively), patterns in quotes ('cats/*.jpg', '**/*.png'), addresses
    (https://..., and what fsspec reads: s3://...), or - for a list of files and addresses on standard input. A video
    (pip install 'pycls_fast[video]') stands for its frames."""
    which: Which = "auto"
    """auto: the average of the weights if there is one."""
    device: Device = "auto"
    """Where the network runs."""
    imports: ModuleNames = ()
    """The modules that register a model of your own."""


class PredictVerb(_ImagesOptions, Verb, experiment=None, words=("weights", "images")):
    """Classify images: `pycls-fast predict RUN IMAGES... [key=value ...]`.

    Unreadable files are listed at the end. Exit status: 0, or 2 if no image could be read.
    """

    format: Literal["table", "json", "csv", "sheet"] | None = None
    """csv is written row by row; sheet is a contact sheet with the predictions; null: as output ends (.json, .csv,
    .png, .txt), on the screen a table."""
    output: Text | None = None
    """A file; null: standard output, for sheet predictions.png (then predictions_2.png, ...)."""
    topk: PositiveInt = 5
    """The number of classes per image."""
    threshold: Probability | None = None
    """List the classes that are likelier than this beside the first ones, as over; for an image of none of the classes
    perhaps none. null: no list, but over 0.5 where images have several labels."""
    every: PositiveFloat = 1.0
    """Seconds from one frame of a video to the next; each is an image, called clip.mp4@12.0s."""
    tta: Literal["none", "flip"] = "none"
    """flip: mean with mirror image; twice the time."""
    precision: Literal["fp32", "amp_bf16", "amp_fp16", "bf16", "fp16"] = "fp32"
    """The format of the computation."""
    batch_size: PositiveInt | None = None
    """Images at a time; null: 64."""
    num_workers: NonNegativeInt | None = None
    """Processes that read and decode; null: none for few images, else one per core."""

    def __call__(self) -> int:
        from pycls_fast.inference.predict import predict as predict_images

        given = _imported(self)
        by_suffix = {".json": "json", ".csv": "csv", ".png": "sheet", ".txt": "table"}
        suffix = Path(self.output or "").suffix
        if self.format is None and suffix:
            one_of("output, its ending", suffix, by_suffix, more=" without format=NAME")
        given["format"] = self.format or by_suffix.get(suffix, "table")
        return predict_images(**given)


class MapsVerb(_ImagesOptions, Verb, experiment=None, words=("weights", "images")):
    """Where a network looks, as pictures: `pycls-fast maps RUN IMAGES... [key=value ...]`.

    Draws one row per image: the crop that the network sees with its prediction, and maps over it.
    """

    kind: Literal["attention", "rollout", "features", "class"] | None = None
    """attention: of the class token (else the mean over the patches, or the pooling's own query) in the last block;
    rollout: through all blocks (Abnar and Zuidema 2020); features: the last ones of each patch, their first three
    principal components over all given images as red, green and blue; class: evidence for the predicted class
    (Grad-CAM), for ResNets and timm's networks; null: attention, or class for a network without it."""
    output: Text | None = None
    """A PNG file; null: attention.png, ..., or maps.png without kind."""
    heads: bool = True
    """attention: each head's; false: only their mean."""

    def __call__(self) -> int:
        from pycls_fast.inference.maps import draw_maps

        return draw_maps(**_imported(self))


class ExportVerb(Verb, experiment=None, words=("weights", "output")):
    """Export a checkpoint to other programs: `pycls-fast export RUN FILE.safetensors [format=...]`.

    All formats carry class names and preprocessing (image_size, crop_ratio, crop, interpolation, mean, std), as JSON
    strings in their metadata, for timm in config.json, and all but timm's the configuration without paths; onnx,
    openvino and program include the normalisation. All but safetensors are run beside the network, and are not written
    if they compute something else.
    """

    weights: Text
    """A run folder (its best checkpoint), a checkpoint (RUN/checkpoints/step_000000100), saved by any number of ranks
    under any strategy, a safetensors file, timm:NAME or torchvision:NAME."""
    output: Text
    """The file (or folder) to write."""
    format: Literal["safetensors", "timm", "onnx", "openvino", "program"] | None = None
    """null: as output ends (.onnx, .xml, .pt2), else safetensors. safetensors: the weights with the network's plain
    parameter names; weights=FILE loads them here; timm: a folder that timm.create_model('local-dir:FOLDER',
    pretrained=True) opens, with a model card; onnx: FILE.onnx, images (B, C, H, W) as bytes -> logits (pip install
    'pycls_fast[onnx]'), and run_onnx.py beside it, which reads images for it; with the same input and output openvino:
    FILE.xml and FILE.bin (pip install 'pycls_fast[openvino]'), which OpenVINO runs in bfloat16 where the CPU can unless
    it is compiled with INFERENCE_PRECISION_HINT=f32, and program: FILE.pt2 of torch.export."""
    which: Which = "auto"
    """auto: the average of the weights if there is one."""
    dtype: Literal["float32", "bfloat16", "float16", "int8"] | None = None
    """Of all floating-point tensors in safetensors and timm; int8: of an ONNX file's products, if at least 80% of the
    images keep their class; null: as saved."""
    images: Annotated[tuple[Text, ...], Several] = ()
    """Files and folders of images on which the file is compared with the network; int8 takes every other one to fit its
    ranges. Without them, drawn images."""
    overwrite: bool = False
    """Overwrite an existing file; of a folder, only the files of the export."""
    imports: ModuleNames = ()
    """The modules that register a model of your own."""

    def __call__(self) -> int:
        from pycls_fast.inference.export import export as export_weights

        given = _imported(self)
        return export_weights(given.pop("weights"), given.pop("output"), **given)


class TestVerb(Verb, words=("weights",), config_of_weights=True, purpose=Purpose(scores_sets=True, scores=True)):
    """Evaluate a checkpoint: `pycls-fast test RUN_OR_CHECKPOINT [split=val] [output=FILE.json]`.

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
    """Whose preprocessing published weights get: their own, but for keys that are typed, or the configuration's."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.score import score

        return score(config, **dict(self), typed=typed_keys())


class SoupVerb(Verb, words=("weights", "others"), config_of_weights=True, purpose=Purpose(scores=True)):
    """Average the weights of several runs: `pycls-fast soup RUN RUN RUN [method=greedy]`.

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
    which: Which = "auto"
    """auto: the average of the weights if there is one."""
    overwrite: bool = False
    """Overwrite an existing file."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.combine import soup as make_soup

        return make_soup(config, **dict(self))


class CalibrateVerb(Verb, words=("weights",), config_of_weights=True, purpose=Purpose(scores=True)):
    """Make probabilities say how often they are right: `pycls-fast calibrate RUN output=FILE.safetensors`.

    Divides the last layer by one temperature, fitted to validation images (Guo et al., 2017), so that predictions and
    exports of the file are calibrated. The predicted classes stay as they are. A temperature that raises the loss of
    other images is not used: of few images it says little.
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


class KnnVerb(Verb, experiment="finetune", words=("weights",), config_of_weights=True, purpose=Purpose(scores=True)):
    """Classify by nearest neighbours, untrained: `pycls-fast knn SOURCE data=FOLDER`.

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
    """Whose preprocessing published weights get: their own, but for keys that are typed, or the configuration's."""

    def __call__(self, config: RunConfig) -> int:
        from pycls_fast.train.tasks.score import score_neighbours

        return score_neighbours(config, **dict(self), typed=typed_keys())
