"""The sources that `data.source` names, and the section `augment`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from pycls_fast.choice import Section, given
from pycls_fast.data.policies import Policy
from pycls_fast.data.source import ColumnSource, Opening, Source
from pycls_fast.values import (
    Hue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Text,
)

if TYPE_CHECKING:
    from pycls_fast.data.sources.base import Images

EvalCrop = Literal["center", "squash", "border"]


class Auto(Source, name="auto"):
    """Class folders, a table, Parquet or `save_to_disk` with images, packed images or CIFAR, recognised by what root
    is."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        shared = {key: getattr(self, key) for key in Source.model_fields if key != self.tag}
        return _kind_of(Path(root)).model_construct(**shared).open(root, how)


def _kind_of(root: Path) -> type[Source]:
    from pycls_fast.data.sources.arrays import find_cifar
    from pycls_fast.data.sources.hub import has_images, is_saved
    from pycls_fast.data.sources.packed import is_packed

    if root.is_file() and root.suffix.lower() == ".parquet":
        return Parquet if has_images(root) else Manifest
    if root.is_file() and root.suffix.lower() in (".csv", ".tsv"):
        return Manifest
    if is_saved(root):
        return Hub
    if any(is_packed(root / split) for split in ("train", "val", "test", "all")):
        return Packed
    return Folder if find_cifar(root) is None else Cifar


class Folder(Source, name="folder"):
    """One folder per class; ImageNet as downloaded."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.folders import open_folder

        return open_folder(root, self, how)


class Manifest(ColumnSource, name="manifest"):
    """A CSV, TSV or Parquet table of paths and labels."""

    path_column: Text = "path"
    """The column of a table that holds the images' paths: absolute, or relative to root (to the table's folder if root
    is a table)."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.tables import open_manifest

        return open_manifest(root, self, how, self.path_column)


class Parquet(ColumnSource, name="parquet"):
    """Parquet files that contain the images."""

    image_column: Text | None = None
    """The column of Parquet or hub data that holds the images; null: the only one with images."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.hub import open_parquet

        return open_parquet(root, self, self.image_column)


class Hub(ColumnSource, name="hub"):
    """A dataset of the Hugging Face hub by name, or a folder written by `save_to_disk`."""

    train: Text | None = None
    """The hub's split for training, if not train."""
    val: Text | None = None
    """The hub's split for validation; null: the one with a usual name, unless train is given."""
    image_column: Text | None = None
    """The column of Parquet or hub data that holds the images; null: the only one with images."""
    hub_config: Text | None = None
    """The configuration of a hub dataset that has several."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.hub import open_hub

        return open_hub(root, self, self.image_column, self.hub_config)


class Tar(ColumnSource, name="tar"):
    """Shards as webdataset writes them, on disk or at a remote address."""

    shard_cache: Text | None = None
    """A local folder for copies of remote shards; null: images are read from the remote shards one by one."""
    shard_cache_gib: PositiveFloat | None = None
    """The most that a user's shard cache holds, in GiB; the least recently used shards are deleted; null: no limit."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.tars import open_tars

        return open_tars(root, self, how, self.shard_cache, self.shard_cache_gib)


class Packed(Source, name="packed"):
    """A few files per split, made by `pycls-fast prepare pack`."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.packed import open_packed

        return open_packed(root, self.conversion)


class Cifar(Source, name="cifar"):
    """CIFAR-10 or CIFAR-100, unpacked."""

    has_photographs = False

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.arrays import open_cifar

        return open_cifar(root)


class Digits(Source, name="digits"):
    """scikit-learn's handwritten digits, written to root."""

    has_photographs = False

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.arrays import open_digits

        return open_digits(root, self, how)


class Synthetic(Source, name="synthetic"):
    """Noise, in memory."""

    needs_root = has_photographs = False

    synthetic_train_images: PositiveInt = 4096
    """The number of training images."""
    synthetic_val_images: PositiveInt = 512
    """The number of validation images."""
    synthetic_classes: Annotated[int, Field(ge=2, lt=2**31)] = 1000
    """The number of classes."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.arrays import open_synthetic

        return open_synthetic(self.image_size, how.seed, **self.own())


class Given(Source, name="given"):
    """A `Dataset` of torch or of Hugging Face in a Python program: `pycls_fast.train(data=dataset)`."""

    needs_root = has_photographs = False

    dataset: Text
    """The name of its class."""

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        from pycls_fast.data.sources.arrays import open_given

        datasets = given("data.dataset", self.dataset, "use data.source=auto data.root=PATH")
        return open_given(datasets, self)


class Augment(Section):
    """Training-time augmentation, and the crop used for evaluation.

    The order is crop, flips, quarter turns, `policy`, `color_jitter`, erasing and mixing.
    """

    crop: Literal["random_resized", "pad", "none", "squash", "border"] = "random_resized"
    """The training crop: a random area and shape, resized; padding, then a random crop of image_size; the centre; or
    the whole image, as eval_crop has it."""
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    """crop=random_resized: the smallest and the largest area, as a share of the image's."""
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """crop=random_resized: the smallest and the largest ratio of width to height, as multiples of image_size's."""
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
    """Repeated augmentation (Hoffer et al., 2020): each image of an epoch appears this often, augmented differently;
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
    """The probability that a batch is mixed at all."""
    mix_switch_probability: Probability = 0.5
    """The probability of CutMix instead of mixup when both are on."""
    eval_crop: EvalCrop = "center"
    """Evaluation: how images are resized to data.image_size / eval_crop_ratio before the centre is cut out: in
    proportion, to cover it (center); out of proportion (squash); or in proportion, within it (border, or letterbox:
    what is missing gets the mean color). With eval_crop_ratio=1 the last two keep the whole image."""
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
