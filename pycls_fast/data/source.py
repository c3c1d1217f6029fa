"""The section `data`: the family of sources, and the keys that all of them have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from pycls_fast.choice import Choice
from pycls_fast.values import (
    Deviation,
    ImageSize,
    Mean,
    NonNegativeInt,
    Off,
    PositiveInt,
    PositiveIntOrAuto,
    Seed,
    Size,
    Text,
)

if TYPE_CHECKING:
    from pycls_fast.data.sources.base import Images
    from pycls_fast.data.to_rgb import Conversion


@dataclass(frozen=True)
class Opening:
    """How a tool opens a source, besides the source's own keys."""

    seed: int = 0
    """The run's, for generated images."""
    index_all: bool = False
    """Keep the indexes of small datasets, too."""
    processes: int = 1
    """The number of processes that copy remote shards on this machine."""


class Source(Choice, key="data", tag="source", default="auto"):
    """Where images come from and how they are batched; `data/README.md` describes the layouts."""

    needs_root: ClassVar[bool] = True
    has_photographs: ClassVar[bool] = True
    """Its images are files that take a core milliseconds to decode, not small arrays."""

    source: str = ""
    """How the images are stored; auto: by what root is."""
    root: Text | None = None
    """A path; for tar possibly a URL, for hub the dataset's name."""
    index_cache: Annotated[Text, Off] = "auto"
    """Where lists of large datasets are kept: beside the data or in the user's cache (auto), in a folder, or nowhere
    (off)."""
    label_separator: Text | None = None
    """Images have several labels: in text separated by this, so that with ; an image of cat;dog is of both classes, and
    one whose label is empty of none; or in lists; a file in several class folders (linked) is of all of them. A table
    without a column of labels has one of zeros and ones for each class. null: one label each."""
    shuffle: Literal["auto", "full", "blocks"] = "auto"
    """The order of training images: a permutation of all, or shard by shard (blocks); auto: blocks for remote data."""
    shuffle_buffer: PositiveInt = 16384
    """The number of images within which shuffle=blocks mixes."""
    sampling: Literal["uniform", "square_root", "balanced"] = "uniform"
    """How often a class appears in an epoch: by its number of images, by the square root of it, or all equally
    often."""
    eval_set: Literal["real", "v2", "a", "r", "sketch"] | None = None
    """What pycls-fast test scores instead of a split: ImageNet-ReaL, -V2, -A, -R or -Sketch; null: a split."""
    eval_root: Text | None = None
    """The folder with the files of eval_set."""
    wnids: Text | None = None
    """A file with ImageNet's 1,000 WordNet ids in the order of the outputs, if the classes are not named by them."""
    exif_orientation: bool = False
    """Turn images as their EXIF orientation says, as viewers do. torchvision, timm and published numbers ignore it;
    photographs of phones need it. Saved and exported weights carry the setting."""
    transparent: Literal["drop", "white"] = "drop"
    """What transparent pixels become: the colours stored there, as in torchvision and timm, or white, as in viewers.
    Saved and exported weights carry the setting."""
    image_size: ImageSize = Field(default=224, validate_default=True)
    """The size of the images that the network gets, in pixels: the side of squares, or [height,width]."""
    image_size_schedule: tuple[tuple[NonNegativeInt, ImageSize], ...] = ()
    """Pairs of a first epoch and the size of training images from then on; before the first pair, and in evaluation, it
    is image_size."""
    global_batch_size: PositiveIntOrAuto = 256
    """Images per step over all ranks and microbatches; auto: by the number of training images, up to 64."""
    eval_batch_size: PositiveInt | None = None
    """Images per rank in evaluation; null: as in training; in tools that only score, at most 128."""
    num_workers: NonNegativeInt | None = None
    """Loader processes per rank; null: the rank's share of the CPU cores, at most 16, and on a CPU none for evaluations
    of up to 256 images."""
    prefetch_factor: Annotated[int, Field(gt=0, le=1024)] = 2
    """Batches that each loader process prepares ahead."""
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The share of each class that is held out at random for validation, if there is no validation split."""
    split_seed: Seed = 0
    """The seed of that random choice."""
    folds: Annotated[int, Field(ge=2)] | None = None
    """Cross-validation: cut each class into this many parts, one of which is held out, instead of val_fraction."""
    fold: NonNegativeInt = 0
    """The part that is held out, counted from 0."""
    group_by: Text | None = None
    """Images that share this are held out together (of one patient, one video): a column, or a regular expression that
    is searched for in the images' names; null: each image is drawn by itself."""
    normalization: Literal["configured", "weights"] = "configured"
    """Where mean and standard deviation come from: mean and std, or what `weights` names, if that has them."""
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    """The means of red, green and blue, on the scale 0 to 1, that are subtracted."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """The standard deviations of red, green and blue, on the scale 0 to 1."""
    max_damaged: NonNegativeInt = 100
    """Damaged images are reported, replaced in training and left out of evaluations; a run with more than this ends."""

    @field_validator("image_size_schedule")
    @classmethod
    def _increases(cls, value: tuple[tuple[int, Size], ...]) -> tuple[tuple[int, Size], ...]:
        epochs = [epoch for epoch, _ in value]
        if epochs != sorted(set(epochs)):
            raise ValueError("epochs must increase")
        return value

    @property
    def conversion(self) -> Conversion:
        """How images in files become the pixels that transforms see."""
        from pycls_fast.data.to_rgb import Conversion

        return Conversion(self.exif_orientation, on_white=self.transparent == "white")

    @property
    def training_image_sizes(self) -> dict[int, Size]:
        """The size of training images, by the epoch from which they have it; the first epoch is 0."""
        return dict(sorted({0: self.image_size, **dict(self.image_size_schedule)}.items()))

    @property
    def largest_image_size(self) -> Size:
        """The size of training images with the most pixels."""
        return max(self.training_image_sizes.values(), key=math.prod)

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        """The parts that are found: "all", or "train" and perhaps "val" and "test"; `splits.as_splits` does the rest.

        Args:
            root: `data.root`, an absolute path unless it is an address or a name.

        Raises:
            UserError: no such dataset, one in another layout, or mistakes in it.
        """
        raise NotImplementedError


class ColumnSource(Source):
    """Tables, shards or datasets that have the labels in a column, or in a field."""

    train: Text | None = None
    """The training files, if they do not have the usual names: a path, with `*` and `{000..146}`."""
    val: Text | None = None
    """The validation files, likewise."""
    label_column: Text = "label"
    """The column, or the field of a tar's .json, that holds the classes."""
