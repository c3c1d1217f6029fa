"""The optimizers that `optim.name` names.

No optimizer reads a value from the device: that is why Adafactor is not torch's, which reads two norms of every tensor
on the host at every step. torch is imported where something is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from pycls_fast.choice import Choice
from pycls_fast.errors import refusing
from pycls_fast.values import (
    Betas,
    ModuleNames,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Rate,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer


Group = dict[str, Any]
"""A group of parameters, as torch's optimizers take them."""


class Optimizer(Choice, key="optim"):
    """Keys that all optimizers share."""

    # Facts that switches, strategies and tables ask for.
    implementations: ClassVar[tuple[str, ...]] = ("loop",)
    """The values of `speed.optimizer` that it has, the plain one first."""
    compilable: ClassVar[tuple[str, ...]] = ()
    """The implementations whose step can be compiled."""
    compiles_itself: ClassVar[bool] = False
    """Its step cannot be compiled because it compiles its own parts, which needs a compiler."""
    shardable: ClassVar[bool] = False
    """It updates sharded weights, and does not need whole matrices."""
    elementwise: ClassVar[bool] = False
    """It computes the same on flattened weights and on a rank's part of each, element by element."""
    capturable: ClassVar[tuple[str, ...]] = ()
    """The implementations that read the learning rate on the device, as a CUDA graph requires."""
    needs_units: ClassVar[bool] = False
    """It treats hidden matrices differently: its groups have `hidden` (`parameter_groups`, `split_hidden`)."""
    trust_ratio: ClassVar[bool] = False
    """Its steps are in proportion to the weights, so that weights of zero hardly change."""
    sends_state: ClassVar[bool] = True
    """Its state can be sent from rank to rank."""
    copies: ClassVar[float] = 2.0
    """The size of its state, in float32 copies of the weights, if its keys do not say otherwise (`state_copies`)."""
    state_keys: ClassVar[tuple[str, ...]] = ()
    """Its own keys that the shapes of its state depend on; a run cannot change them when it resumes."""

    name: str = ""
    """The optimizer."""
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
    """The largest number of layers for layer_decay: more blocks than that are joined into groups of consecutive ones
    (ConvNeXt); null: each block is a layer."""
    accumulation_steps: PositiveIntOrAuto = Field("auto", validate_default=True)
    """The number of microbatches that a rank computes one after the other in each step; auto: the fewest with which a
    step fits into the device's memory (runtime.device_memory), on a CPU 1."""
    trainable: Annotated[ModuleNames, Field(min_length=1)] = ("all",)
    """What is trained: all, head, or a list of head and names of modules or parameters, with * for any part ([head,
    norm, "blocks.1*"]). The rest has no gradient and no optimizer state, and modules that are frozen as a whole stay in
    evaluation mode, so that batch norm keeps its statistics and nothing is dropped."""
    lora_rank: PositiveInt | None = None
    """Adapt the matrices and convolutions of the blocks that trainable leaves frozen: each changes by a product of two
    matrices of this rank (LoRA; Hu et al., 2022); null: they are frozen."""
    batch_norm: Literal["auto", "train", "frozen"] = "train"
    """What batch norm normalises with in training: each batch's statistics, or those of the weights, which are kept;
    auto: frozen with fewer than 20,000 images."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Keep a moving average of the weights with this decay per step, whatever ema_every_steps is; null: none."""
    ema_warmup: bool = True
    """Average with a smaller decay at first, so that the initial values are forgotten."""
    ema_every_steps: PositiveInt = 1
    """Update the average once in this many steps."""

    @property
    def microbatches(self) -> int:
        """`accumulation_steps`; 1 as long as it is `auto`."""
        return max(self.accumulation_steps, 1)

    @property
    def state_copies(self) -> float:
        """The size of its state, in float32 copies of the weights."""
        return self.copies

    def scaled(self, global_batch_size: int) -> Self:
        """The same with its learning rate for this batch: in proportion if `lr_batch_size` is set."""
        if self.lr_batch_size is None:
            return self
        return self.model_copy(update={"lr": self.lr * global_batch_size / self.lr_batch_size, "lr_batch_size": None})

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        """An optimizer of parameter groups, whose rate is `lr`.

        Args:
            groups: with `params` and `weight_decay`; `lr_scale` is applied later.
            implementation: one of `implementations`.
        """
        raise NotImplementedError


class _Moments(Optimizer):
    """Keys of optimizers that average gradients and their squares."""

    betas: Betas = (0.9, 0.999)
    """The decay of the first and the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class AdamW(_Moments, name="adamw"):
    """AdamW (Loshchilov and Hutter, 2019): decay is `lr * weight_decay` per step, as in torch."""

    implementations = ("loop", "foreach", "fused")
    compilable = ("loop", "foreach")
    shardable = True
    elementwise = True
    capturable = ("fused",)

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        import torch

        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, **_flags(implementation))


class SGD(Optimizer, name="sgd"):
    """Stochastic gradient descent with (Nesterov) momentum; weight decay is added to the gradient."""

    implementations = ("loop", "foreach", "fused")
    compilable = ("loop", "foreach")
    shardable = True
    elementwise = True
    capturable = ("fused",)

    momentum: Rate = 0.9
    """The decay of the momentum, per step."""
    nesterov: bool = Field(True, validate_default=True)
    """Nesterov's momentum."""

    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("momentum") == 0:
            raise ValueError("needs optim.momentum larger than 0; use optim.nesterov=false")
        return value

    @property
    def state_copies(self) -> float:
        return 1.0 if self.momentum else 0.0

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        import torch

        made = torch.optim.SGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, **_flags(implementation)
        )
        if implementation == "fused" and self.momentum:
            # torch's fused step uses uninitialised memory as momentum if loss scaling skips the first step (2.11 to
            # 2.15).
            for group in made.param_groups:
                for parameter in group["params"]:
                    made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return made


class LAMB(_Moments, name="lamb"):
    """LAMB (You et al., 2020) as DeiT III uses it: no trust ratio for parameters without weight decay.

    With a trust ratio a step is in proportion to the weights, so that weights of zero hardly change: a ViT needs
    `model.init=trunc_normal`, whose head does not begin with zeros.
    """

    implementations = ("loop", "foreach")
    compilable = ("loop", "foreach")
    shardable = True
    trust_ratio = True

    eps: PositiveFloat = 1e-6

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        # As in the code that DeiT III and ResNet strikes back were trained with (apex FusedLAMB, timm Lamb), with bias
        # correction. Its clipping of the global gradient norm to 1 is `clip_norm` here.
        import timm.optim

        from pycls_fast.optim.optimizers import steps_from_state, steps_into_state

        made: TorchOptimizer = timm.optim.Lamb(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, max_grad_norm=None, foreach=implementation == "foreach"
        )
        # timm counts steps in the groups; our checkpoints save only the parameters' state.
        made.register_state_dict_post_hook(steps_into_state)
        made.register_load_state_dict_post_hook(steps_from_state)
        return made


class Lion(Optimizer, name="lion"):
    """Lion (Chen et al., 2023): the sign of a momentum; decay is `lr * weight_decay` per step."""

    implementations = ("loop", "foreach")
    compilable = ("loop",)
    shardable = True
    elementwise = True
    copies = 1.0

    betas: Betas = (0.9, 0.99)
    """The share of the momentum in a step, and the momentum's decay per step."""

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        import timm.optim

        foreach = implementation == "foreach"
        made: TorchOptimizer = timm.optim.Lion(groups, lr=self.lr, betas=self.betas, foreach=foreach)
        return made


class Adafactor(Optimizer, name="adafactor"):
    """Adafactor (Shazeer and Stern, 2018) as changed for ViTs by Zhai et al. (2022, section 3.4)."""

    compilable = ("loop",)
    state_keys = ("min_factored",)

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

    @property
    def state_copies(self) -> float:
        # The rows and columns of its second moments are next to nothing.
        return 0.5 if self.momentum_dtype == "bfloat16" else 1.0

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        # No scaling by the parameter; weight decay is `lr * weight_decay` per step, as in AdamW.
        import timm.optim

        made: TorchOptimizer = timm.optim.AdafactorBigVision(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            momentum_dtype=self.momentum_dtype,
            decay_rate=self.beta2_decay,
            beta2_cap=self.beta2_cap,
            min_dim_size_to_factor=self.min_factored,
            clipping_threshold=self.clip_threshold,
        )
        return made


class Muon(_Moments, name="muon"):
    """Muon (Jordan et al., 2024) for the blocks' matrices and all convolutions but the first, AdamW for the rest.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate and decay serve both;
    betas and eps are AdamW's.
    """

    compilable = ("loop",)
    needs_units = True
    # The parameters that it leaves to AdamW have two.
    copies = 1.0

    momentum: Rate = 0.95
    """The decay of the momentum, per step."""
    nesterov: bool = True
    """Nesterov's momentum."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that make an update orthogonal."""

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        # The update of a matrix is scaled by `0.2 * sqrt(max(rows, columns))` (Liu et al., section 2.2). Convolutions
        # are flattened to (out, in * height * width).
        import timm.optim

        # Without Nesterov the other parameters get AdamW; with it timm would give them NAdamW.
        # For hidden parameters timm's `eps` is the least norm in the Newton-Schulz iteration, not AdamW's.
        kinds: dict[bool, dict[str, Any]] = {
            True: {"use_muon": True, "nesterov": self.nesterov, "eps": 1e-7},
            False: {"use_fallback": True, "nesterov": False},
        }
        made: TorchOptimizer = timm.optim.Muon(
            [{**group, **kinds[group["hidden"]]} for group in groups],
            lr=self.lr,
            momentum=self.momentum,
            ns_steps=self.newton_schulz_steps,
            ns_coefficients="original",
            adjust_lr_fn="match_rms_adamw",
            conv_mode="flatten",
            betas=self.betas,
            eps=self.eps,
        )
        return made


class AdamW8bit(_Moments, name="adamw8bit"):
    """AdamW with both moments in 8 bits (Dettmers et al., 2022), by torchao (`pip install 'pycls_fast[torchao]'`)."""

    # torchao compiles each update itself, and has no DTensors of its 8-bit state.
    compiles_itself = True
    sends_state = False
    copies = 0.5

    def build(self, groups: Sequence[Group], implementation: str) -> TorchOptimizer:
        # Blocks of 256 numbers; tensors whose size is below 4096 or not a multiple of 256 keep float32 moments. torchao
        # compiles each parameter's update, on a CPU with the machine's C++ compiler.
        with refusing("optim.name: adamw8bit needs torchao", ImportError, use="pip install 'pycls_fast[torchao]'"):
            from torchao.optim import AdamW8bit
        return AdamW8bit(groups, lr=self.lr, betas=self.betas, eps=self.eps)


def _flags(implementation: str) -> dict[str, bool]:
    # Both flags are explicit: given None, torch would choose.
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}
