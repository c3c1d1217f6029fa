"""Keys of the images, `data` and `augment`, and the sources that `data.source` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from pycls_fast.choice import Section
from pycls_fast.data.policies import Policy
from pycls_fast.values import (
    Deviation,
    Hue,
    Mean,
    NonNegativeFloat,
    NonNegativeInt,
    Off,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
    Seed,
    Text,
    Wording,
)

if TYPE_CHECKING:
    from pycls_fast.data.sources.base import Images
    from pycls_fast.data.sources.splits import OpenOptions


class Source:
    """How images are stored: a subclass with a name is what `data.source=NAME` opens, wherever it is defined.

    Its `open` gives `as_splits` the parts that it finds, or returns splits of its own, "train" and "val" among them.
    """

    members: ClassVar[dict[str, type[Source]]] = {}
    names_files: ClassVar[bool] = False
    """Whether data.train and data.val say which files (or splits) of root belong to which split."""
    is_split: ClassVar[bool] = False
    """Whether there always is a validation split, so that data.folds cannot cut one."""
    needs_root: ClassVar[bool] = True

    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()
        other = cls.members.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"data.source: {name} is {other.__module__}.{other.__qualname__}, too; rename one")
        cls.members[name] = cls

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        """The splits by name.

        Args:
            root: `data.root`, an absolute path unless it is an address or a name.

        Raises:
            UserError: no such dataset, one in another layout, or mistakes in it.
        """
        raise NotImplementedError


class Auto(Source, name="auto"):
    """Class folders, packed images or CIFAR, recognised by what is in root."""

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pathlib import Path

        from pycls_fast.data.sources.cifar import find_cifar
        from pycls_fast.data.sources.packed import is_packed

        if any(is_packed(Path(root) / split) for split in ("train", "val", "test", "all")):
            return Packed().open(root, options)
        return (Folder if find_cifar(Path(root)) is None else Cifar)().open(root, options)


class Folder(Source, name="folder"):
    """One folder per class; ImageNet as downloaded."""

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.folders import open_folder

        return open_folder(root, options)


class Manifest(Source, name="manifest"):
    """A CSV, TSV or Parquet table of paths and labels."""

    names_files = True

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.tables import open_manifest

        return open_manifest(root, options)


class Parquet(Source, name="parquet"):
    """Parquet files that contain the images."""

    names_files = True

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.hub import open_parquet

        return open_parquet(root, options)


class Hub(Source, name="hub"):
    """A dataset of the Hugging Face hub by name, or a folder written by `save_to_disk`."""

    names_files = True

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.hub import open_hub

        return open_hub(root, options)


class Tar(Source, name="tar"):
    """Shards as webdataset writes them, on disk or at a remote address."""

    names_files = True

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.tars import open_tars

        return open_tars(root, options)


class Packed(Source, name="packed"):
    """A few files per split, made by `pycls-fast prepare pack`."""

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.packed import open_packed

        return open_packed(root, options)


class Cifar(Source, name="cifar"):
    """CIFAR-10 or CIFAR-100, unpacked."""

    is_split = True

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.cifar import open_cifar

        return open_cifar(root, options)


class Digits(Source, name="digits"):
    """scikit-learn's handwritten digits, written to root."""

    def open(self, root: str, options: OpenOptions) -> dict[str, Images]:
        from pycls_fast.data.sources.synthetic import open_digits

        return open_digits(root, options)


class Synthetic(Source, name="synthetic"):
    """Noise of the numbers that synthetic_train_images, synthetic_val_images and synthetic_classes say."""

    is_split = True
    needs_root = False


def _source(name: str) -> str:
    # Looked up now, when the user's modules have been imported.
    if name not in Source.members:
        *most, last = (repr(known) for known in Source.members)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
    return name


class Data(Section):
    """Where images come from and how they are batched; `data/README.md` describes the layouts."""

    source: Annotated[str, AfterValidator(_source), Wording(f"one of {', '.join(Source.members)}")] = "auto"
    """The layout of the data; auto: class folders, packed images or CIFAR, by what is in root."""
    root: Text | None = None
    """A path; for tar possibly a URL, for hub the dataset's name."""
    train: Text | None = None
    """The training files, or the hub's split, if they do not have the usual name."""
    val: Text | None = None
    """The validation files, or the hub's split, if they do not have the usual name."""
    path_column: Text = "path"
    """The column of a table that holds the images' paths: absolute, or relative to root (to the table's folder if root
    is a table)."""
    image_column: Text | None = None
    """The column of Parquet or hub data that holds the images; null: the only one with images."""
    label_column: Text = "label"
    """The column, or the field of a tar's .json, that holds the classes."""
    hub_config: Text | None = None
    """The configuration of a hub dataset that has several."""
    index_cache: Annotated[Text, Off] = "auto"
    """Where lists of large datasets are kept: beside the data or in the user's cache (auto), in a folder, or nowhere
    (off)."""
    shard_cache: Text | None = None
    """A local folder for copies of remote shards; null: images are read from the remote shards one by one."""
    shard_cache_gib: PositiveFloat | None = None
    """The most that the shard cache holds, in GiB; the least recently used shards are deleted; null: no limit."""
    shuffle: Literal["auto", "full", "blocks"] = "auto"
    """The order of training images: a permutation of all, or shard by shard (blocks); auto: blocks for remote data."""
    shuffle_buffer: PositiveInt = 16384
    """The number of images within which shuffle=blocks mixes."""
    sampling: Literal["uniform", "square_root", "balanced"] = "uniform"
    """How often a class appears in an epoch: by its number of images, by the square root of it, or all equally
    often."""
    eval_set: Literal["real", "v2", "a", "r", "sketch"] | None = None
    """What pycls-fast test scores instead of a split: ImageNet-ReaL, -V2, -A, -R or -Sketch; null: a split."""
    eval_root: Text | None = Field(default=None, validate_default=True)
    """The folder with the files of eval_set."""
    wnids: Text | None = None
    """A file with ImageNet's 1,000 WordNet ids in the order of the outputs, if the classes are not named by them."""
    exif_orientation: bool = False
    """Turn images as their EXIF orientation says, as viewers do. torchvision, timm and published numbers ignore it;
    photographs of phones need it. Saved and exported weights carry the setting."""
    image_size: PositiveInt = 224
    """The side of the square images that the network gets, in pixels."""
    image_size_schedule: tuple[tuple[NonNegativeInt, PositiveInt], ...] = ()
    """Pairs of a first epoch and the size of training images from then on; before the first pair, and in evaluation, it
    is image_size."""
    global_batch_size: PositiveIntOrAuto = 256
    """Images per step over all ranks and microbatches; auto: by the number of training images, up to 64."""
    eval_batch_size: PositiveInt | None = None
    """Images per rank in evaluation; null: as in training; in tools that only score, at most 128."""
    num_workers: NonNegativeInt | None = None
    """Loader processes per rank; null: the rank's share of the CPU cores, at most 16."""
    prefetch_factor: Annotated[int, Field(gt=0, le=1024)] = 2
    """Batches that each loader process prepares ahead."""
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The share of each class that is held out at random for validation, if there is no validation split."""
    split_seed: Seed = 0
    """The seed of that random choice."""
    folds: Annotated[int, Field(ge=2)] | None = None
    """Cross-validation: cut each class into so many parts, one of which is held out, instead of val_fraction."""
    fold: NonNegativeInt = 0
    """The part that is held out, counted from 0."""
    normalization: Literal["configured", "weights"] = "configured"
    """Where mean and standard deviation come from: mean and std, or what `weights` names, if that has them."""
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    """The means of red, green and blue, on the scale 0 to 1, that are subtracted."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """The standard deviations of red, green and blue, on the scale 0 to 1."""
    max_damaged: NonNegativeInt = 100
    """Damaged images are reported, replaced in training and left out of evaluations; more than so many end the run."""
    synthetic_train_images: PositiveInt = 4096
    """The number of training images of source=synthetic."""
    synthetic_val_images: PositiveInt = 512
    """The number of validation images of source=synthetic."""
    synthetic_classes: Annotated[int, Field(ge=2, lt=2**31)] = 1000
    """The number of classes of source=synthetic."""

    @field_validator("train", "val")
    @classmethod
    def _files_have_names(cls, value: str | None, info: ValidationInfo) -> str | None:
        source = info.data.get("source", "hub")
        if value is not None and not Source.members[source].names_files:
            raise ValueError(f"data.source={source} knows its splits; use data.{info.field_name}=null")
        # A split of the hub has a usual name, files have none.
        if info.field_name == "val" and value is not None and info.data.get("train") is None and source != "hub":
            raise ValueError("given without data.train; give both, or neither")
        return value

    @field_validator("shard_cache_gib")
    @classmethod
    def _limits_a_folder(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("shard_cache") is None:
            raise ValueError("limits a folder that is not set; give it as data.shard_cache=PATH")
        return value

    @field_validator("sampling")
    @classmethod
    def _visits_in_any_order(cls, value: str, info: ValidationInfo) -> str:
        if value != "uniform" and info.data.get("shuffle") == "blocks":
            raise ValueError(
                "visits images in any order, but data.shuffle=blocks follows the order of shards; use "
                "data.shuffle=full or loss.class_weights=balanced"
            )
        return value

    @field_validator("eval_root")
    @classmethod
    def _has_the_set(cls, value: str | None, info: ValidationInfo) -> str | None:
        name = info.data.get("eval_set")
        if name is not None and value is None:
            raise ValueError(f"not set; give the files of data.eval_set={name} as data.eval_root=PATH")
        return value

    @field_validator("image_size_schedule")
    @classmethod
    def _increases(cls, value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        epochs = [epoch for epoch, _ in value]
        if epochs != sorted(set(epochs)):
            raise ValueError("epochs must increase")
        return value

    @field_validator("folds")
    @classmethod
    def _has_no_split(cls, value: int | None, info: ValidationInfo) -> int | None:
        source = info.data.get("source", "auto")
        if value is not None and Source.members[source].is_split:
            raise ValueError(f"data.source={source} has a validation split; use data.folds=null")
        return value

    @field_validator("fold")
    @classmethod
    def _is_one_of(cls, value: int, info: ValidationInfo) -> int:
        folds = info.data.get("folds")
        if value >= (folds or 1):
            known = f"data.folds={folds}" if folds else "data.folds, which is not set (data.folds=5, say)"
            raise ValueError(f"chooses one of {known}, counted from 0")
        return value

    @property
    def training_image_sizes(self) -> dict[int, int]:
        """The side of training images in pixels, by the epoch from which they have it; the first epoch is 0."""
        return dict(sorted({0: self.image_size, **dict(self.image_size_schedule)}.items()))


class Augment(Section):
    """Training-time augmentation, and the crop used for evaluation.

    The order is crop, flips, quarter turns, `policy`, `color_jitter`, erasing and mixing.
    """

    crop: Literal["random_resized", "pad", "none"] = "random_resized"
    """The training crop: a random area and shape, resized; padding, then a random crop of image_size; or the centre
    square, after resizing the short side."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """crop=random_resized: the smallest and the largest area, as a share of the image's."""
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """crop=random_resized: the smallest and the largest ratio of width to height."""
    pad: NonNegativeInt = 4
    """crop=pad: pixels added on each side."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    """crop=pad: add black, or the mirrored image."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """The filter that resizes images, with antialiasing; also that of rotations in the policy."""
    hflip: Probability = 0.5
    """The probability of a horizontal flip."""
    vflip: Probability = 0.0
    """The probability of a vertical flip."""
    quarter_turns: bool = False
    """Rotate by 0, 90, 180 or 270 degrees at random."""
    policy: Policy | None = None
    """Random operations on each image: a name, or {name: ..., KEY: ...}; null: none."""
    color_jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Hue] | None = None
    """The largest changes of brightness, contrast, saturation and hue; null: off."""
    repeats: PositiveInt = 1
    """Repeated augmentation (Hoffer et al., 2020): each image of an epoch appears so many times, augmented differently;
    an epoch has that many times fewer different images."""
    erase_probability: Probability = 0.0
    """The probability that a random box of an image is erased (Zhong et al., 2020)."""
    erase_value: Literal["mean", "noise"] = "mean"
    """What erased boxes are filled with: data.mean, or normal noise."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Mixup (Zhang et al., 2018): its share is drawn from Beta(alpha, alpha); 0: off."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """CutMix (Yun et al., 2019): its area is drawn from Beta(alpha, alpha); 0: off."""
    mix_probability: Probability = 1.0
    """The probability that a batch (with mix_mode=pair or elem: a pair, an image) is mixed at all."""
    mix_switch_probability: Probability = 0.5
    """The probability of CutMix instead of mixup when both are on."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """Draw one mixing ratio for the whole batch, for each pair of images, or for each image."""
    eval_crop: Literal["center", "squash", "border"] = "center"
    """Evaluation: the side that is resized to data.image_size / eval_crop_ratio before the centre is cut out: the short
    one (center), both (squash), or the long one (border; what is missing gets the mean color)."""
    # The whole image is resized to the side of the crop divided by this: a tiny ratio would take all memory.
    eval_crop_ratio: Annotated[float, Field(ge=0.1, le=1.0)] = 0.875
    """Evaluation: the side of the centre crop as a share of the resized side."""

    @field_validator("scale", "ratio")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float], info: ValidationInfo) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("the first value must not be larger than the second")
        if info.field_name == "scale" and value[1] > 1:
            raise ValueError("an area cannot be larger than the image's (1.0)")
        return value

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed with each other (mixup, CutMix)."""
        return self.mix_probability > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)
