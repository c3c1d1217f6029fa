"""A trained network that takes images in any form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pycls_fast import build
from pycls_fast.choice import give
from pycls_fast.config import validate_saved
from pycls_fast.config.run import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.source import Source
from pycls_fast.errors import UserError, one_of
from pycls_fast.inference.images import GivenImages, given_images
from pycls_fast.loss_choices import Loss
from pycls_fast.network import Network
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.speed import Speed
from pycls_fast.train.checkpoint import check_shapes
from pycls_fast.train.evaluate import FlipAveraged
from pycls_fast.train.features import head_inputs
from pycls_fast.train.load_weights import open_trained
from pycls_fast.train.saved_weights import Weights

Skip = Callable[[str, str], None]
"""Called with the name of an unreadable image and the reason."""

BATCH_SIZE = 64
"""The default number of images at a time."""

# Levels that need neither process-wide settings nor special hardware.
_PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16", "fp16")
# Up to this many images, one process reads them faster than workers start.
_FEW = 128


@dataclass(frozen=True)
class Guess:
    """One class, by the output's index and its name, and its probability: softmax of the scores; for a network trained
    with binary cross-entropy the class's sigmoid, so that an image's probabilities need not sum to 1."""

    label: int
    class_name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image.

    Attributes:
        image: its path, or "image 3" if it was given as pixels.
        position: index in the input.
        top: the likeliest classes, best first.
        over: all classes with a probability over the threshold, best first: perhaps none. None without a threshold,
            which is 0.5 where images have several labels.
    """

    image: str
    position: int
    top: tuple[Guess, ...]
    over: tuple[Guess, ...] | None = None

    @property
    def label(self) -> int:
        return self.top[0].label

    @property
    def class_name(self) -> str:
        return self.top[0].class_name

    @property
    def probability(self) -> float:
        return self.top[0].probability


@contextmanager
def float32_convolutions() -> Iterator[None]:
    """Run float32 convolutions in float32: cuDNN's default is TF32, a setting of the process that is restored after."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before


def load(
    run: str | Path,
    *,
    which: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    fast: bool = True,
    model: nn.Module | None = None,
) -> Classifier:
    """A trained classifier.

        classifier = pycls_fast.load("runs/my_run")
        for found in classifier.predict(["cat.jpg", "more/images"]):
            print(found.image, found.class_name, found.probability)

    Args:
        run: a run folder (its best checkpoint), a checkpoint, a safetensors file of `pycls-fast export`, or published
            weights by name: `timm:NAME`, `torchvision:NAME`.
        which: "auto" (the average of the weights if there is one), "model" or "ema".
        device: "auto", "cpu" or "cuda".
        precision: "fp32", "amp_bf16", "amp_fp16", "bf16" or "fp16".
        fast: use the device's fast kernels, else the reference ones.
        model: a module like the one that was given to `pycls_fast.train`, if one was: needed in another process, and
            once another of its class was given.

    Raises:
        UserError: no such weights, weights that do not name their model, or a device that is not available.
    """
    if model is not None:
        give(model)
    one_of("device", device, ("auto", "cpu", "cuda"))
    one_of("precision", precision, _PRECISIONS)
    weights = open_trained(run, kind=which)
    (saved_config, classes), path = weights.require_model(), weights.path
    config = _config(saved_config, str(path), device, precision, "fast" if fast else "reference")
    world = build.alone(config)
    switches = build.switches(config, world.device)
    # Do not advance the caller's generator; the initial values are overwritten below.
    with torch.random.fork_rng(devices=[]):
        network = build.model(config, config.model.num_classes or len(classes), switches)
    state = network.state_dict()
    saved = {name: spec.shape for name, spec in weights.specs.items()}
    here = {name: value.shape for name, value in state.items()}
    check_shapes(f"weights: {path} does not fit its own model", saved, here)
    with torch.no_grad():
        weights.fill(state)
    network = place_model(network, world, memory_format=switches.memory_format)
    build.apply_precision(config, network, world.device)
    several = bool(saved_config["data"].get("label_separator"))
    return Classifier(network.eval().requires_grad_(False), classes, config, weights, world, switches, several=several)


def _config(saved: Mapping[str, Any], where: str, device: str, precision: str, preset: str) -> RunConfig:
    # Decode as the run did: the pixels of different libraries differ a little.
    decode = saved["speed"].get("decode") or (None if saved["speed"]["preset"] == "fast" else "pillow")
    if decode is not None and not build.has_decoder(decode):
        decode = None
    changes: dict[str, Any] = {
        "run_dir": None,
        "weights": None,
        "precision": {"name": precision},
        "parallel": {"name": "single"},
        # Maps and features need whole batches without padding.
        "speed": {"preset": preset, "decode": decode, "normalize_on": "device", "sequence_padding": "none",
                  "erase_on": "device", "mix_on": "device", "compile": "off", "cuda_graphs": "off"},
        "runtime": {"device": device},
        "data": {key: value for key, value in saved["data"].items() if key in Source.model_fields} | {"source": "auto"},
        # What only training needs may be of classes that nobody has registered here.
        "augment": saved["augment"] | {"policy": None},
        "optim": {"name": "adamw", "lr": 1.0},
        "schedule": {}, "distill": {}, "trackers": [], "callbacks": [],
    }  # fmt: skip
    if "imports" not in saved and saved["loss"]["name"] not in Loss.choices():
        # An exported file names no modules.
        changes |= {"loss": {}}
    return validate_saved({**saved, **changes}, where)


@dataclass(eq=False, repr=False)
class Classifier:
    """A network in evaluation mode, with the preprocessing and the class names that it was trained with.

    Attributes:
        classes: names of the outputs, in order.
        config: the run's, but with the requested device, precision and switches.
        world: this process only, on the device.
        several: images have several labels.
    """

    network: Network
    classes: tuple[str, ...]
    config: RunConfig
    weights: Weights
    world: World
    switches: Speed
    several: bool

    def __post_init__(self) -> None:
        self.device = self.world.device
        self.inputs = build.prepare(self.config, self.device, self.switches)
        """A batch as the network takes it: (B, C, H, W), normalised."""
        self._autocast = build.autocast(self.config, self.device)

    @property
    def preprocessing(self) -> str:
        """What is done to an image before the network sees it, in one line."""
        return build.preprocessing(self.config)

    def class_name(self, label: int) -> str:
        """The name of an output; models may have more outputs than their data had classes."""
        return self.classes[label] if label < len(self.classes) else f"output {label}"

    def predict(self, images: Any, **options: Any) -> list[Prediction]:
        """What `stream` yields, with the same options (`topk`, `batch_size`, `tta`, ...), as a list."""
        return list(self.stream(images, **options))

    def stream(
        self,
        images: Any,
        *,
        topk: int = 5,
        threshold: float | None = None,
        batch_size: int | None = None,
        num_workers: int | None = None,
        every: float = 1.0,
        tta: Literal["none", "flip"] = "none",
        skip: Skip | None = None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Prediction]:
        """Yield the likeliest classes of each image, in the order of the images, as soon as a batch is done.

        Args:
            images: what `given_images` takes: paths, folders, patterns, videos, Pillow images, uint8 arrays, or a list
                of them.
            topk: number of classes to return, or all if there are fewer.
            threshold: the probability, from 0 to 1, over which a class is in `Prediction.over`.
            batch_size: images at a time.
            num_workers: processes that read and decode; None: none for few images, else one per core.
            every: seconds from one frame of a video to the next.
            tta: "flip": average the probabilities of each image and its mirror image.
            skip: called for each unreadable image, which is then left out. None: an unreadable image is an error.
            advance: called with the number of images done since the last call.

        Raises:
            UserError: at the first image: no images, an unsupported kind of image, or an image that cannot be read.
        """
        one_of("tta", tta, ("none", "flip"))
        if threshold is not None and not 0 <= threshold <= 1:
            raise UserError(f"threshold: must be from 0 to 1; got {threshold}")
        source = images if isinstance(images, GivenImages) else self.given(images, every)
        for batch in self.batches(source, batch_size=batch_size, num_workers=num_workers, skip=skip):
            scores_BK = self.scores(batch, tta).double()
            if not torch.isfinite(scores_BK).all():
                raise UserError(
                    f"weights: {self.weights.path} gives scores that are not finite; if they are with precision=fp32 "
                    "too, the run diverged"
                )
            yield from self._guesses(source, batch, scores_BK, topk, threshold)
            advance(len(batch) + len(batch.damaged))

    def _guesses(
        self, source: GivenImages, batch: Batch, scores_BK: Tensor, topk: int, threshold: float | None
    ) -> Iterator[Prediction]:
        least = 0.5 if threshold is None and self.several else threshold
        # Sorted by scores, which have fewer ties than probabilities; ties by the lowest index, as in evaluation.
        order_BK = scores_BK.sort(dim=1, descending=True, stable=True).indices
        likely_BK = self.probabilities(scores_BK).gather(1, order_BK)
        shown = topk if least is None else max(topk, int((likely_BK > least).sum(dim=1).max()))
        order_BT, likely_BT = order_BK[:, :shown], likely_BK[:, :shown]
        rows = zip(batch.indices_B.tolist(), order_BT.tolist(), likely_BT.tolist(), strict=True)
        for position, labels, probabilities in rows:
            top = tuple(Guess(k, self.class_name(k), p) for k, p in zip(labels, probabilities, strict=True))
            over = None if least is None else tuple(guess for guess in top if guess.probability > least)
            yield Prediction(source.name(position), position, top[:topk], over)

    def logits(self, images: Any, *, batch_size: int | None = None, num_workers: int | None = None) -> Tensor:
        """The network's scores (N, K), float32, on the CPU; arguments and errors as in `stream`."""
        batches = self.batches(self.given(images), batch_size=batch_size, num_workers=num_workers)
        return torch.cat([self.scores(batch).float().cpu() for batch in batches])

    def features(self, images: Any, *, batch_size: int | None = None, num_workers: int | None = None) -> Tensor:
        """The input of the network's last linear layer (N, D), float32, on the CPU; arguments as in `stream`."""
        with head_inputs(self.network) as seen:
            self.logits(images, batch_size=batch_size, num_workers=num_workers)
        return torch.cat(seen)

    def given(self, images: Any, every: float = 1.0) -> GivenImages:
        """Images in any form as one source; see `given_images`."""
        return given_images(images, self.config.data.conversion, every)

    def batches(
        self,
        source: GivenImages,
        *,
        batch_size: int | None = None,
        num_workers: int | None = None,
        skip: Skip | None = None,
    ) -> Iterator[Batch]:
        """The images as the network sees them, uint8 (B, H, W, 3), on the device; arguments and errors as in `stream`.

        Batches whose images were all damaged and left out are not yielded.
        """
        few = source.in_memory or len(source) <= _FEW
        workers = 0 if few and num_workers is None else num_workers
        config = self.config.with_values(data={"eval_batch_size": batch_size or BATCH_SIZE, "num_workers": workers})
        for batch in build.eval_batches(config, source, self.world, self.switches):
            for name, reason in batch.damaged:
                if skip is None:
                    raise UserError(f"{name}: {reason}")
                skip(name, reason)
            if len(batch):
                yield batch

    @torch.no_grad()
    def scores(self, batch: Batch, tta: Literal["none", "flip"] = "none") -> Tensor:
        """Logits (B, K) of a batch, in the format that the precision gives them; for `tta` see `stream`."""
        network = FlipAveraged(self.network, sigmoid=self.has_sigmoid) if tta == "flip" else self.network
        with float32_convolutions(), self._autocast():
            return network(self.inputs(batch))

    def probabilities(self, scores_BK: Tensor) -> Tensor:
        """Class probabilities (B, K): sigmoids for a network trained with binary cross-entropy, or where images have
        several labels, else a softmax."""
        return scores_BK.sigmoid() if self.has_sigmoid else scores_BK.softmax(dim=1)

    @property
    def has_sigmoid(self) -> bool:
        # As in evaluation, whatever a user's own loss says of itself.
        return self.several or self.config.loss.criterion().sigmoid
