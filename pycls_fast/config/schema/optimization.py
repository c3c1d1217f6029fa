"""Keys of what is minimised, and how: `loss`, `optim` and `schedule`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pycls_fast.config.schema.section import Section
from pycls_fast.config.schema.values import (
    Betas,
    EpochsOrAuto,
    ModuleNames,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
    Rate,
)


class Loss(Section):
    """The training loss. Evaluations report the same one without smoothing, threshold and weights."""

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Softmax cross-entropy, or binary cross-entropy with a sigmoid for each class."""
    label_smoothing: Rate = 0.0
    """The share of the target that is spread over all classes."""
    bce_reduction: Literal["mean", "sum"] = "mean"
    """bce: average the classes as timm does, or add them as big_vision does."""
    bce_threshold: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """bce: classes with a larger share of a mixed image get the target 1, all others 0; null: the share is the
    target."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each image counts by the mean number of images per class divided by its own class's."""


class _Optim(Section):
    """Keys that all optimizers share."""

    lr: PositiveFloat
    """The learning rate after the warm-up."""
    lr_batch_size: PositiveInt | None = None
    """The global batch size that lr is for: the rate is scaled in proportion to data.global_batch_size (Goyal et al.,
    2017); null: not scaled."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices and convolutions."""
    decay_norms: bool = False
    """Decay the scales and shifts of norms, and layer scales, too."""
    decay_biases: bool = False
    """Decay the biases of other layers, too."""
    decay_embeddings: bool = False
    """Decay positions, class and register tokens, too."""
    clip_norm: PositiveFloat | None = None
    """Scale the gradients down to this norm over all parameters; null: no clipping."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] | None = None
    """A layer's learning rate divided by the next layer's (BEiT, MAE); null: one rate for all; auto: 0.75 for networks
    of blocks without batch norm, else null."""
    layer_decay_groups: PositiveInt | None = None
    """The most layers of layer_decay: more blocks than that are joined into groups of consecutive ones (ConvNeXt);
    null: each block is a layer."""
    accumulation_steps: PositiveIntOrAuto = Field("auto", validate_default=True)
    """The number of microbatches that a rank computes one after the other in each step; auto: the fewest with which a
    step fits into the device's memory (runtime.device_memory), on a CPU 1."""
    trainable: Annotated[ModuleNames, Field(min_length=1)] = ("all",)
    """What is trained: all, head, or a list of head and names of modules or parameters, with * for any part ([head,
    norm, "blocks.1*"]). The rest has no gradient and no optimizer state, and modules that are frozen as a whole stay in
    evaluation mode, so that batch norm keeps its statistics and nothing is dropped."""
    batch_norm: Literal["auto", "train", "frozen"] = "train"
    """What batch norm normalises with in training: each batch's statistics, or those of the weights, which are kept;
    auto: frozen with fewer than 20,000 images."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Keep a moving average of the weights with this decay per step, whatever ema_every_steps is; null: none."""
    ema_warmup: bool = True
    """Average with a smaller decay at first, so that the initial values are forgotten."""
    ema_every_steps: PositiveInt = 1
    """Update the average after so many steps."""

    @property
    def microbatches(self) -> int:
        """`accumulation_steps`; 1 as long as it is `auto`."""
        return max(self.accumulation_steps, 1)

    def own(self) -> dict[str, Any]:
        """The keys that only this optimizer has, with their values: the arguments of its function in `optim`."""
        keys = [key for key in type(self).model_fields if key not in _Optim.model_fields and key != "name"]
        return {key: getattr(self, key) for key in keys}


class SGD(_Optim):
    """Stochastic gradient descent with (Nesterov) momentum; weight decay is added to the gradient."""

    name: Literal["sgd"]
    """The optimizer."""
    momentum: Rate = 0.9
    """The decay of the momentum, per step."""
    nesterov: bool = True
    """Nesterov's momentum."""


class AdamW(_Optim):
    """AdamW (Loshchilov and Hutter, 2019): decay is `lr * weight_decay` per step, as in torch."""

    name: Literal["adamw"]
    """The optimizer."""
    betas: Betas = (0.9, 0.999)
    """The decay of the first and the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class LAMB(_Optim):
    """LAMB (You et al., 2020) as DeiT III uses it: no trust ratio for parameters without weight decay.

    With a trust ratio a step is in proportion to the weights, so that weights of zero hardly change: a ViT needs
    `model.init=trunc_normal`, whose head does not begin with zeros.
    """

    name: Literal["lamb"]
    """The optimizer."""
    betas: Betas = (0.9, 0.999)
    """The decay of the first and the second moment, per step."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""


class Lion(_Optim):
    """Lion (Chen et al., 2023): the sign of a momentum; decay is `lr * weight_decay` per step."""

    name: Literal["lion"]
    """The optimizer."""
    betas: Betas = (0.9, 0.99)
    """The share of the momentum in a step, and the momentum's decay per step."""


class Adafactor(_Optim):
    """Adafactor (Shazeer and Stern, 2018) as changed for ViTs by Zhai et al. (2022, section 3.4)."""

    name: Literal["adafactor"]
    """The optimizer."""
    momentum: Rate = 0.9
    """The decay of the momentum, per step."""
    momentum_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The format in which the momentum is kept."""
    beta2_decay: PositiveFloat = 0.8
    """The second moment's decay at step t is 1 - t^-beta2_decay, up to beta2_cap."""
    beta2_cap: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """The largest decay of the second moment."""
    min_factored: PositiveInt = 32
    """Second moments of tensors with two axes of at least this size are factored into rows and columns."""
    clip_threshold: PositiveFloat | None = None
    """The largest root mean square of a tensor's update; null: not clipped."""


class Muon(_Optim):
    """Muon (Jordan et al., 2024) for the blocks' matrices and all convolutions but the first, AdamW for the rest.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate and decay serve both;
    betas and eps are AdamW's.
    """

    name: Literal["muon"]
    """The optimizer."""
    momentum: Rate = 0.95
    """The decay of the momentum, per step."""
    nesterov: bool = True
    """Nesterov's momentum."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that make an update orthogonal."""
    betas: Betas = (0.9, 0.999)
    """The decay of the first and the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class AdamW8bit(_Optim):
    """AdamW with both moments in 8 bits (Dettmers et al., 2022), by torchao (`pip install -e '.[torchao]'`)."""

    name: Literal["adamw8bit"]
    """The optimizer."""
    betas: Betas = (0.9, 0.999)
    """The decay of the first and the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


Optim = SGD | AdamW | LAMB | Lion | Adafactor | Muon | AdamW8bit


class Schedule(Section):
    """Learning rate per step: a linear warm-up, then a curve."""

    name: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """The curve: cosine and linear fall to final_factor, step is multiplied by step_factor after every step_epochs
    epochs."""
    epochs: PositiveIntOrAuto = 100
    """The length of the run; auto: 160 steps, but 10 to 50 epochs."""
    max_steps: NonNegativeInt | None = None
    """Stop after so many steps, without changing the curve; null: at the end of the epochs; 0: only fit the head and
    evaluate (head=probe)."""
    warmup_epochs: EpochsOrAuto = 5.0
    """The length of the warm-up; auto: a tenth of the epochs, at most 2."""
    warmup_start_factor: Probability = 0.0
    """The learning rate at the start of the warm-up, as a share of optim.lr."""
    final_factor: Probability = 0.0
    """The learning rate at the end, as a share of optim.lr."""
    curve_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the curve begins: where the warm-up ends, or at the first step, where the warm-up replaces its beginning
    (timm; nearly pycls')."""
    step_epochs: PositiveInt | None = None
    """The epochs between two steps of the curve `step`."""
    step_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The factor of each step of the curve `step`."""
    early_stopping_evals: PositiveInt | None = None
    """End the run when the best evaluation is so many evaluations old; null: never."""
    best_metric: Literal["top1", "class_top1", "loss"] = "top1"
    """What makes an evaluation the best one, also for checkpoints/best and summary.json: top-1, the mean of the
    classes' accuracies, or the loss. Of equal ones it is the first."""
    best_tolerance: NonNegativeFloat = 0.0
    """Of evaluations whose accuracy is within so many of its standard errors of the highest, the last is the best one:
    few validation images tell good epochs from lucky ones badly."""
