"""The typed configuration of a run: strict, frozen, and the only list of keys that exist.

YAML files and the command line override the defaults here. Unknown keys, wrong types and values out of range are
refused (`extra="forbid"`, `strict=True`); checks that involve several keys are in `checks/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pycls_fast.config.values import (
    Betas,
    Deviation,
    EpochsOrAuto,
    Hue,
    LossScale,
    Mean,
    ModuleNames,
    NonNegativeFloat,
    Off,
    OffOn,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
    Seed,
    Text,
)
from pycls_fast.speed import SwitchName


class Section(BaseModel):
    """The base class of every group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ViTModel(Section):
    """Vision Transformer (Dosovitskiy et al., 2021); sizes are in `configs/model/vit_*.yaml`.

    `models.VisionTransformer` documents each key. `stem: conv` has convolutions of `stem_widths` and `stem_strides`;
    `layer_scale` is the initial value of its factors; `pre_logits` is the width of a tanh layer before the head.
    `init: jax` initialises as google-research/vision_transformer, whose head begins with zeros, `trunc_normal` as DeiT
    and timm.
    """

    kind: Literal["vit"]
    patch_size: PositiveInt = 16
    width: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    stem: Literal["patch", "conv"] = "patch"
    stem_widths: tuple[PositiveInt, ...] = ()
    stem_strides: tuple[PositiveInt, ...] = ()
    class_token: bool | None = None
    registers: Annotated[int, Field(ge=0)] = 0
    classifier: Literal["token", "pooled", "map"] = "token"
    classifier_norm: Literal["before_pool", "after_pool"] | None = None
    pre_logits: PositiveInt | None = None
    positions: Literal["learned", "sincos2d"] = "learned"
    position_tokens: Literal["all", "patches"] = "all"
    layer_scale: PositiveFloat | None = None
    qk_norm: bool = False
    norm_eps: PositiveFloat = 1e-6
    init: Literal["jax", "trunc_normal"] = "jax"
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    drop_path_rule: Literal["linear", "constant"] = "linear"
    num_classes: PositiveInt | None = None


class ResNetModel(Section):
    """ResNet (He et al., 2016) with the stride in the 3x3 convolution of bottleneck blocks.

    `groups` and `width_per_group` make a ResNeXt or a Wide ResNet, `stem: deep` with `shortcut: pool` a ResNet-D.
    """

    kind: Literal["resnet"]
    depth: Literal[18, 26, 34, 50, 101, 152, 200]
    stem: Literal["imagenet", "deep", "small"] = "imagenet"
    shortcut: Literal["conv", "pool"] = "conv"
    groups: PositiveInt = 1
    width_per_group: PositiveInt = 64
    zero_init_last_gamma: bool = True
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    num_classes: PositiveInt | None = None


class TimmModel(Section):
    """Any timm model by its name, newly initialised; `options` go to its constructor under timm's names."""

    kind: Literal["timm"]
    name: Text
    options: dict[str, bool | int | float | str | None] = {}
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    num_classes: PositiveInt | None = None


class Data(Section):
    """Where images come from and how they are batched.

    `global_batch_size` is over all ranks and microbatches, `eval_batch_size` per rank (default: that of training; in
    tools that only score, at most 128), `num_workers` per rank (default: the rank's share of the cores).

    `source` is a layout of `data/README.md`; `auto` detects it from what is in `root`: a path, for `tar` possibly a
    URL, for `hub` a dataset's name. `train` and `val` name the files (for `hub`: the splits) if their names are not
    the usual ones. Remote shards are kept in `shard_cache`, up to `shard_cache_gib`. Indexes of large datasets are kept
    beside the data or in the user's cache (`index_cache: auto`), in a folder of your choice, or not at all (`off`).
    With `shuffle: blocks` shards are read one after the other, mixing within `shuffle_buffer` images; `auto` does so
    for remote data.

    `global_batch_size: auto` depends on the number of training images (`build.resolve_auto`). `normalization: weights`
    takes mean and standard deviation from what `weights` names, if that has them, instead of `mean` and `std`, which
    are for red, green and blue on the scale 0 to 1.
    `sampling` is how often a class appears in an epoch: in proportion to its number of images (`uniform`), to the
    square root of it, or each class equally often (`data.class_order`).

    `exif_orientation` turns images as their EXIF orientation says, as viewers do. torchvision, timm and published
    numbers ignore it; photographs of phones need it. Saved and exported weights carry the setting.

    Without a validation split, `val_fraction` of each class is held out at random (`split_seed`). With `folds` each
    class is cut into that many parts instead, and `fold`, counted from 0, is the part held out.

    `image_size_schedule` holds pairs of a first epoch and the size of training images from then on; before the first
    pair and in evaluation it is `image_size`.

    `eval_set` is what `tools/test_net.py` scores instead of a split, from the files in `eval_root`; `wnids` lists
    ImageNet's 1,000 WordNet ids in the order of the outputs, if the training classes are not named by these ids.
    """

    source: Literal["auto", "folder", "manifest", "parquet", "hub", "tar", "packed", "cifar", "digits", "synthetic"] = (
        "auto"
    )
    root: Text | None = None
    train: Text | None = None
    val: Text | None = None
    path_column: Text = "path"
    image_column: Text | None = None
    label_column: Text = "label"
    hub_config: Text | None = None
    index_cache: Annotated[Text, Off] = "auto"
    shard_cache: Text | None = None
    shard_cache_gib: PositiveFloat | None = None
    shuffle: Literal["auto", "full", "blocks"] = "auto"
    shuffle_buffer: PositiveInt = 16384
    sampling: Literal["uniform", "square_root", "balanced"] = "uniform"
    eval_set: Literal["real", "v2", "a", "r", "sketch"] | None = None
    eval_root: Text | None = None
    wnids: Text | None = None
    exif_orientation: bool = False
    image_size: PositiveInt = 224
    image_size_schedule: tuple[tuple[Annotated[int, Field(ge=0)], PositiveInt], ...] = ()
    global_batch_size: PositiveIntOrAuto = 256
    eval_batch_size: PositiveInt | None = None
    num_workers: Annotated[int, Field(ge=0)] | None = None
    prefetch_factor: PositiveInt = 2
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    split_seed: Seed = 0
    folds: Annotated[int, Field(ge=2)] | None = None
    fold: Annotated[int, Field(ge=0)] = 0
    normalization: Literal["configured", "weights"] = "configured"
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    max_damaged: Annotated[int, Field(ge=0)] = 100
    synthetic_train_images: PositiveInt = 4096
    synthetic_val_images: PositiveInt = 512
    synthetic_classes: Annotated[int, Field(ge=2)] = 1000

    @property
    def training_image_sizes(self) -> dict[int, int]:
        """The side of training images in pixels, by the epoch from which they have it; the first epoch is 0."""
        return dict(sorted({0: self.image_size, **dict(self.image_size_schedule)}.items()))


class RandAugment(Section):
    """RandAugment (Cubuk et al., 2020) as parameterised by `library`.

    torchvision: magnitude 0..30. timm (and DeiT): magnitude 0..10 with a normal spread of `magnitude_std`; each
    operation is applied with `probability` (default 0.5), its strength `increasing` with the magnitude or not.
    """

    library: Literal["torchvision", "timm"] = "torchvision"
    num_ops: PositiveInt = 2
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    magnitude_std: NonNegativeFloat = 0.0
    increasing: bool = False
    probability: Probability | None = None


class Augment(Section):
    """Training-time augmentation, and the crop used for evaluation.

    `eval_crop` says which side is resized to `data.image_size / eval_crop_ratio` before the centre is cut out: the
    short one (`center`), both (`squash`) or the long one (`border`; what is missing gets the mean color).

    `quarter_turns` rotates by 0, 90, 180 or 270 degrees. After flips and rotation comes at most one of `rand_augment`,
    `auto_augment` (torchvision's, by the dataset of its policy), `trivial_augment` and `three_augment` (DeiT III), then
    `color_jitter` (brightness, contrast, saturation, hue).
    `mix_mode`: one mixing ratio for the whole batch, per pair, or per element. With `repeats` each image of an epoch
    appears that many times, augmented differently, and an epoch has a `repeats`-th of the images.
    """

    crop: Literal["random_resized", "pad", "none"] = "random_resized"
    scale: tuple[PositiveFloat, PositiveFloat] = (0.08, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    pad: Annotated[int, Field(ge=0)] = 4
    pad_mode: Literal["constant", "reflect"] = "constant"
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    hflip: Probability = 0.5
    vflip: Probability = 0.0
    quarter_turns: bool = False
    rand_augment: RandAugment | None = None
    auto_augment: Literal["imagenet", "cifar10", "svhn"] | None = None
    trivial_augment: bool = False
    three_augment: bool = False
    color_jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Hue] | None = None
    repeats: PositiveInt = 1
    erase_probability: Probability = 0.0
    erase_value: Literal["mean", "noise"] = "mean"
    mixup_alpha: NonNegativeFloat = 0.0
    cutmix_alpha: NonNegativeFloat = 0.0
    mix_probability: Probability = 1.0
    mix_switch_probability: Probability = 0.5
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    eval_crop: Literal["center", "squash", "border"] = "center"
    eval_crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.875


class Loss(Section):
    """The training loss; `bce` is binary cross-entropy, summed over classes as in big_vision or averaged as in timm.

    With `bce_threshold` a class whose share in a mixed image is larger has the target 1, every other class 0.
    `class_weights: balanced` weights each image by the mean number of images per class divided by its own class's.
    Evaluations report the same loss without smoothing, threshold and weights.
    """

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    bce_reduction: Literal["mean", "sum"] = "mean"
    bce_threshold: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    class_weights: Literal["none", "balanced"] = "none"


class _Optim(Section):
    """Keys that all optimizers share.

    `ema_decay` is per step, whatever `ema_every_steps`; `layer_decay` is a layer's learning rate divided by the next
    layer's. `trainable` says what is trained: `all`, `head`, or a list of `head` and names of modules or parameters,
    with * for any part (`[head, norm, "blocks.1*"]`). The rest is frozen: no gradient, no optimizer state, and fully
    frozen modules stay in evaluation mode, so that batch norm keeps its statistics and nothing is dropped.
    """

    lr: PositiveFloat
    lr_batch_size: PositiveInt | None = None
    weight_decay: NonNegativeFloat = 0.0
    decay_norms: bool = False
    decay_biases: bool = False
    decay_embeddings: bool = False
    clip_norm: PositiveFloat | None = None
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    accumulation_steps: PositiveInt = 1
    trainable: Annotated[ModuleNames, Field(min_length=1)] = ("all",)
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    ema_warmup: bool = True
    ema_every_steps: PositiveInt = 1


class SGD(_Optim):
    """Stochastic gradient descent with (Nesterov) momentum; weight decay is added to the gradient."""

    name: Literal["sgd"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    nesterov: bool = True


class AdamW(_Optim):
    """AdamW (Loshchilov and Hutter, 2019): decay is `lr * weight_decay` per step, as in torch."""

    name: Literal["adamw"]
    betas: Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class LAMB(_Optim):
    """LAMB (You et al., 2020) as DeiT III uses it: no trust ratio for parameters without weight decay.

    With a trust ratio a step is in proportion to the weights, so that weights of zero hardly change: a ViT needs
    `model.init: trunc_normal`, whose head does not begin with zeros.
    """

    name: Literal["lamb"]
    betas: Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-6


class Lion(_Optim):
    """Lion (Chen et al., 2023): the sign of a momentum; decay is `lr * weight_decay` per step."""

    name: Literal["lion"]
    betas: Betas = (0.9, 0.99)


class Adafactor(_Optim):
    """Adafactor (Shazeer and Stern, 2018) as changed for ViTs by Zhai et al. (2022, section 3.4).

    Second moments of tensors with two axes of `min_factored` or more are factored into rows and columns.
    """

    name: Literal["adafactor"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    momentum_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    beta2_decay: PositiveFloat = 0.8
    beta2_cap: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    min_factored: PositiveInt = 32
    clip_threshold: PositiveFloat | None = None


class Muon(_Optim):
    """Muon (Jordan et al., 2024) for the matrices and convolutions of the blocks, AdamW for the rest.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so that one lr and decay serve both; `betas` and `eps`
    are AdamW's.
    """

    name: Literal["muon"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    nesterov: bool = True
    newton_schulz_steps: PositiveInt = 5
    betas: Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class AdamW8bit(_Optim):
    """AdamW with both moments in 8 bits (Dettmers et al., 2022), by torchao (`pip install -e '.[torchao]'`)."""

    name: Literal["adamw8bit"]
    betas: Betas = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


Optim = SGD | AdamW | LAMB | Lion | Adafactor | Muon | AdamW8bit


class Schedule(Section):
    """Learning rate per step: linear warm-up, then a curve. `max_steps` stops early without changing the curve.

    `cosine` and `linear` fall to `final_factor`; `step` multiplies by `step_factor` after every `step_epochs` epochs.
    The curve begins where the warm-up ends or, with `curve_from: start`, at the first step, where the warm-up replaces
    its beginning (timm, pycls).

    `epochs: auto` depends on the number of training images (`build.resolve_auto`), `warmup_epochs: auto` is a tenth of
    the epochs, at most 2. `early_stopping_evals` ends the run when the best evaluation is so many evaluations old. The
    best one, here as in `summary.json` and `checkpoints/best`, is the best by `early_stopping_metric`, the first of
    equal ones. `class_top1` is the mean of the classes' accuracies.
    """

    name: Literal["cosine", "linear", "step", "constant"] = "cosine"
    epochs: PositiveIntOrAuto = 100
    max_steps: PositiveInt | None = None
    warmup_epochs: EpochsOrAuto = 5.0
    warmup_start_factor: Probability = 0.0
    final_factor: Probability = 0.0
    curve_from: Literal["warmup_end", "start"] = "warmup_end"
    step_epochs: PositiveInt | None = None
    step_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    early_stopping_evals: PositiveInt | None = None
    early_stopping_metric: Literal["top1", "class_top1", "loss"] = "top1"


class Precision(Section):
    """Number formats of the step (`pycls_fast/precision.py`).

    The `loss_scale` keys are for the float16 levels: `dynamic`, with start, growth, back-off, interval and floor, or a
    constant. The `fp8` keys are for `fp8`: layers whose qualified name contains one of `fp8_skip` are left out, as are
    those with a side that is not a multiple of 16; `fp8_emulate` rounds to float8 on hardware without it, slowly.
    """

    name: Literal["fp32", "tf32", "amp_bf16", "amp_fp16", "fp16_master", "bf16_params", "fp16", "bf16", "fp8"] = "fp32"
    loss_scale: LossScale = "dynamic"
    loss_scale_start: PositiveFloat = 65536.0
    loss_scale_growth: Annotated[float, Field(gt=1.0)] = 2.0
    loss_scale_backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    loss_scale_interval: PositiveInt = 2000
    loss_scale_floor: PositiveFloat = 2.0**-14
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    fp8_skip: tuple[Text, ...] = ("head", "pooling")
    fp8_emulate: bool = False


class Parallel(Section):
    """How the ranks share the work; `auto` is `ddp` under torchrun with more than one rank, else `single`.

    Only `ddp`: `compression` of the gradients that ranks exchange (`powersgd`: to matrices of `powersgd_rank`, from
    step `powersgd_start_step` on; Vogels et al., 2019), and `static_graph`, a promise to torch that every step uses the
    same parameters in the same order.

    Sharded strategies: `reshard_after_forward` gathers weights again in the backward pass (ZeRO-3) instead of keeping
    them (ZeRO-2); `prefetch_units` blocks are prefetched (0: torch's default order). Only `hsdp`: shards over
    `shard_degree` ranks (default: those of a node), replicated by `replicate_degree` groups (default: the rest).

    `sync_batchnorm` computes batch norm's statistics over all ranks. With `speed.recompute` on, every
    `recompute_every`-th block is recomputed, starting with the first.
    """

    name: Literal["auto", "single", "ddp", "fsdp", "hsdp", "fairscale_fsdp", "fairscale_sharded_ddp"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout_seconds: PositiveInt = 600
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: PositiveInt = 1
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    static_graph: bool = False
    reshard_after_forward: bool = True
    prefetch_units: Annotated[int, Field(ge=0)] = 1
    shard_degree: PositiveInt | None = None
    replicate_degree: PositiveInt | None = None
    sync_batchnorm: bool = False
    recompute_every: PositiveInt = 1


class Speed(Section):
    """Performance switches; an unset one takes the preset's value for the device (`pycls_fast/speed/`)."""

    preset: Literal["reference", "fast", "meta2022"] = "reference"
    memory_format: Literal["contiguous", "channels_last"] | None = None
    attention: (
        Literal["reference", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "products"] | None
    ) = None
    layout: Literal["batch_first", "batch_second"] | None = None
    qkv: Literal["separate", "fused"] | None = None
    linear: Literal["torch", "products"] | None = None
    gelu: Literal["torch", "polynomial"] | None = None
    patches: Literal["convolution", "product"] | None = None
    convolution: Literal["torch", "products"] | None = None
    allocator: Literal["default", "keep"] | None = None
    compile: Annotated[Literal["off", "blocks", "model"] | None, Off] = None
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] | None = None
    optimizer: Literal["loop", "foreach", "fused"] | None = None
    optimizer_compile: Annotated[Literal["off", "on"] | None, OffOn] = None
    ema: Literal["loop", "foreach"] | None = None
    clip: Literal["loop", "foreach"] | None = None
    decode: Literal["pillow", "simplejpeg", "region"] | None = None
    decode_scale: Literal["full", "dct"] | None = None
    input_copy: Literal["blocking", "prefetch"] | None = None
    normalize_on: Literal["cpu", "device"] | None = None
    erase_on: Literal["cpu", "device"] | None = None
    mix_on: Literal["cpu", "device"] | None = None
    metrics: Literal["step", "interval"] | None = None
    sequence_padding: Literal["none", "8", "64"] | None = None
    cross_entropy: Literal["plain", "fused"] | None = None
    cuda_graphs: Annotated[Literal["off", "on"] | None, OffOn] = None
    recompute: Annotated[Literal["off", "full", "selective"] | None, Off] = None
    activation_offload: Literal["none", "cpu"] | None = None
    activation_compression: Literal["none", "8bit"] | None = None
    param_offload: Literal["none", "cpu"] | None = None
    drop_path_compute: Literal["multiply", "skip"] | None = None

    @field_validator("sequence_padding", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        # 8 is a number on the command line and in YAML, but a switch's values are names.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def chosen(self) -> dict[SwitchName, str]:
        """The switches set by hand."""
        values = self.model_dump(exclude={"preset"}, exclude_none=True)
        return {SwitchName(name): value for name, value in values.items()}


class Runtime(Section):
    """The device, and how often to log, evaluate and save.

    `keep_checkpoints` is the number of newest ones that are kept, besides the best. With `checkpoint_async` training
    continues while a copy of its state is written; the copy takes as much host memory as a rank's share of the state.
    `eval_every_epochs: auto` makes at most 20 evaluations in a run; `eval_every_steps` replaces it.
    `threads` is the number of CPU threads (default: torch's choice, but at most a container's CPU limit; with
    speed.param_offload under torchrun, the rank's share of the cores).
    `watchdog` names the first module whose output or gradient is not finite; it makes every step slower.
    `profile_step` is the first of three steps, counted from 1, of which rank 0 writes a profile (`profile/`).
    `tracker` gets the same numbers as TensorBoard, the configuration and how the run ended; a resumed run continues its
    run there. `tracker_project` is W&B's project or MLflow's experiment. Everything else, such as entity, server and
    offline mode, comes from the tracker's environment variables (WANDB_ENTITY, WANDB_MODE, MLFLOW_TRACKING_URI).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    log_every_steps: PositiveInt = 10
    eval_every_epochs: PositiveIntOrAuto = 1
    eval_every_steps: PositiveInt | None = None
    checkpoint_every_steps: PositiveInt | None = None
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    checkpoint_async: bool = True
    deterministic: bool = False
    watchdog: bool = False
    profile_step: PositiveInt | None = None
    tensorboard: bool = True
    tracker: Literal["none", "wandb", "mlflow"] = "none"
    tracker_project: Text = "pycls_fast"
    progress: Literal["auto", "bar", "plain"] = "auto"


class RunConfig(Section):
    """The complete configuration of a run. `run_dir: null` is `runs/<config_name>/<time>`.

    `weights` is a run folder, a checkpoint, a file of another project, `timm:NAME`, `torchvision:NAME` or
    `hf:ORG/NAME[@REVISION]`, which a run records with the commit; `weights_allow` names tensors, with * for any part,
    that may be missing, unexpected or of a different shape. With `needs_weights` training does not start without
    `weights`: the recipe is for fine-tuning.

    `imports` names Python modules that are imported before anything is built, from the current folder or where Python
    looks: they can register models with timm (`timm.models.register_model`) for `model=timm`. They are saved with a
    run, so every tool that builds the network of a run's folder or checkpoint imports them: load only those that you
    trust. Exported files never import anything.
    """

    config_name: Text
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    run_dir: Text | None = None
    resume: Text = "auto"
    weights: Text | None = None
    weights_allow: tuple[Text, ...] = ()
    needs_weights: bool = False
    imports: ModuleNames = ()
    model: Annotated[ViTModel | ResNetModel | TimmModel, Field(discriminator="kind")]
    data: Data = Data()
    augment: Augment = Augment()
    loss: Loss = Loss()
    optim: Annotated[Optim, Field(discriminator="name")]
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    speed: Speed = Speed()
    runtime: Runtime = Runtime()
