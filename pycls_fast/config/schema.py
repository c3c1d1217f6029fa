"""The typed configuration of a run: strict, frozen, and the only list of keys that exist.

YAML files and the command line say what differs from the defaults here. Unknown keys, wrong types and values out of
range are refused (`extra="forbid"`, `strict=True`); what involves several keys at once is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pycls_fast.speed import SwitchName

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# An unset variable of the shell (`data.root=$DATA`) must not become the current folder.
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of keys; what every part of the configuration inherits."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ViTModel(Section):
    """Vision Transformer (Dosovitskiy et al., 2021); sizes are in `configs/model/vit_*.yaml`."""

    kind: Literal["vit"]
    patch_size: PositiveInt = 16
    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    classifier: Literal["token", "pooled"] = "token"
    positions: Literal["learned", "sincos2d"] = "learned"
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    num_classes: PositiveInt | None = None


class ResNetModel(Section):
    """ResNet (He et al., 2016) with the stride in the 3x3 convolution of bottleneck blocks."""

    kind: Literal["resnet"]
    depth: Literal[18, 34, 50, 101, 152]
    stem: Literal["imagenet", "small"] = "imagenet"
    zero_init_last_gamma: bool = True
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    num_classes: PositiveInt | None = None


class Data(Section):
    """Where images come from and how they are batched.

    `global_batch_size` is over all ranks and microbatches, `eval_batch_size` per rank (left out: that of training),
    `num_workers` per rank (left out: the rank's share of the cores).
    """

    source: Literal["folder", "digits", "synthetic"] = "folder"
    root: Text | None = None
    image_size: PositiveInt = 224
    global_batch_size: PositiveInt = 256
    eval_batch_size: PositiveInt | None = None
    num_workers: Annotated[int, Field(ge=0)] | None = None
    prefetch_factor: PositiveInt = 2
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    split_seed: Seed = 0
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    max_damaged: Annotated[int, Field(ge=0)] = 100
    synthetic_train_images: PositiveInt = 4096
    synthetic_val_images: PositiveInt = 512
    synthetic_classes: Annotated[int, Field(ge=2)] = 1000


class RandAugment(Section):
    """RandAugment (Cubuk et al., 2020) in torchvision's parameterisation."""

    num_ops: PositiveInt = 2
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9


class Augment(Section):
    """Training-time augmentation, and the crop used for evaluation."""

    crop: Literal["random_resized", "pad", "none"] = "random_resized"
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    pad: Annotated[int, Field(ge=0)] = 4
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    hflip: Probability = 0.5
    rand_augment: RandAugment | None = None
    erase_probability: Probability = 0.0
    erase_value: Literal["mean", "noise"] = "mean"
    mixup_alpha: NonNegativeFloat = 0.0
    cutmix_alpha: NonNegativeFloat = 0.0
    mix_probability: Probability = 1.0
    mix_switch_probability: Probability = 0.5
    eval_crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.875


class Loss(Section):
    """`bce` is binary cross-entropy per class, summed over classes as in big_vision or averaged as in timm."""

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    bce_reduction: Literal["mean", "sum"] = "mean"


class _Optim(Section):
    lr: PositiveFloat
    lr_batch_size: PositiveInt | None = None
    weight_decay: NonNegativeFloat = 0.0
    decay_norms: bool = False
    decay_biases: bool = False
    decay_embeddings: bool = False
    clip_norm: PositiveFloat | None = None
    accumulation_steps: PositiveInt = 1
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    ema_warmup: bool = True


class SGD(_Optim):
    """Stochastic gradient descent with (Nesterov) momentum; weight decay is added to the gradient."""

    name: Literal["sgd"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    nesterov: bool = True


class AdamW(_Optim):
    """AdamW (Loshchilov and Hutter, 2019): decay is `lr * weight_decay` a step, as in torch."""

    name: Literal["adamw"]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class Schedule(Section):
    """Learning rate per step: linear warm-up, then cosine or constant. `max_steps` stops early, the curve unchanged."""

    name: Literal["cosine", "constant"] = "cosine"
    epochs: PositiveInt = 100
    max_steps: PositiveInt | None = None
    warmup_epochs: NonNegativeFloat = 5.0
    warmup_start_factor: Probability = 0.0
    final_factor: Probability = 0.0


class Precision(Section):
    """Number formats of the step; the loss-scale keys are used by `amp_fp16` only."""

    name: Literal["fp32", "amp_bf16", "amp_fp16"] = "fp32"
    loss_scale_start: PositiveFloat = 65536.0
    loss_scale_growth: Annotated[float, Field(gt=1.0)] = 2.0
    loss_scale_backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    loss_scale_interval: PositiveInt = 2000
    loss_scale_floor: PositiveFloat = 2.0**-14


class Parallel(Section):
    """`auto` is `ddp` under torchrun with more than one rank, else `single`."""

    name: Literal["auto", "single", "ddp"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout_seconds: PositiveInt = 600


class Speed(Section):
    """Performance switches; one that is not set takes the preset's value for the device (`pycls_fast/speed.py`)."""

    preset: Literal["reference", "fast"] = "reference"
    memory_format: Literal["contiguous", "channels_last"] | None = None
    attention: Literal["reference", "sdpa"] | None = None
    optimizer: Literal["loop", "foreach", "fused"] | None = None
    ema: Literal["loop", "foreach"] | None = None
    clip: Literal["loop", "foreach"] | None = None
    input_copy: Literal["blocking", "prefetch"] | None = None

    def chosen(self) -> dict[SwitchName, str]:
        """The switches set by hand."""
        values = self.model_dump(exclude={"preset"}, exclude_none=True)
        return {SwitchName(name): value for name, value in values.items()}


class Runtime(Section):
    """The machine, and how often things happen."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    log_every_steps: PositiveInt = 10
    eval_every_epochs: PositiveInt = 1
    checkpoint_every_steps: PositiveInt | None = None
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    deterministic: bool = False
    tensorboard: bool = True
    progress: Literal["auto", "bar", "plain"] = "auto"


class RunConfig(Section):
    """One run, whole. `run_dir=None` is `runs/<config_name>/<time>`."""

    config_name: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    run_dir: Text | None = None
    resume: Text = "auto"
    weights: Text | None = None
    model: Annotated[ViTModel | ResNetModel, Field(discriminator="kind")]
    data: Data = Data()
    augment: Augment = Augment()
    loss: Loss = Loss()
    optim: Annotated[SGD | AdamW, Field(discriminator="name")]
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    speed: Speed = Speed()
    runtime: Runtime = Runtime()
