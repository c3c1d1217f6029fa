"""The catalogue of precision levels: each names the number formats that a step is computed in.

The names O0 to O3 are Apex's (NVIDIA, "apex.amp", opt_level). float16 has 5 bits of exponent: gradients under 2^-24
(6e-8) become zero, which scaling the loss repairs (Micikevicius et al., Mixed Precision Training, ICLR 2018, section
3.2). bfloat16 has float32's exponent and needs no scaling, with 8 bits of significand where float16 has 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["float32", "float16", "bfloat16"]
Name = Literal["auto", "fp32", "tf32", "amp_bf16", "amp_fp16", "fp16_master", "bf16_params", "fp16", "bf16", "fp8"]


@dataclass(frozen=True)
class Level:
    """What one level means.

    Attributes:
        apex: the same level's name in Apex, or "".
        autocast: format of products under torch's autocast; None without it.
        weights: format of the network's parameters and of the activations between layers.
        wide_norms: normalisation layers stay in float32 if `weights` is a half format.
        masters: "kept": the optimizer owns float32 copies of the weights, rounded into the network after each step.
            "none": it does not; if `weights` is a half format the update is computed in float32 from the rounded
            weight and rounded at once, so that an update under half a unit in the last place is lost.
        scaled: the loss is scaled.
        tf32: float32 products may round their factors to 10 bits of significand.
        float8: linear layers multiply in float8.
        note: one sentence.
        helps: when it is faster or smaller, with the figures measured so far and where.
        hurts: what it costs, and when.
        source: the paper, documentation or code that it comes from.
        ran: where it has been run, and where not.
        elsewhere: its name outside Apex.

    The texts make its card in `docs/switches.md` (`tools/switch_cards.py` writes it).
    """

    name: Name
    note: str
    helps: str
    hurts: str
    source: str
    ran: str
    elsewhere: str = ""
    apex: str = ""
    autocast: Format | None = None
    weights: Format = "float32"
    wide_norms: bool = False
    masters: Literal["none", "kept"] = "none"
    scaled: bool = False
    tf32: bool = False
    float8: bool = False

    @property
    def compute(self) -> Format:
        """The format of matrix products (at float8 levels: of those that are not in float8)."""
        return self.autocast or self.weights

    @property
    def in_16_bits(self) -> bool:
        """Whether products are in bfloat16 or float16, for which different kernels are the fastest."""
        return self.compute != "float32" and not self.float8


_LEVELS = (
    Level(
        "auto",
        "The fastest with float32 weights: amp_bf16 on CUDA from Ampere on, amp_fp16 before it; on a CPU fp32 "
        "or amp_bf16, whichever wins a race at the model's own shapes.",
        helps="The default. CPUs differ by a factor of 100: with AMX bfloat16 is three times as fast as float32 "
        "(docs/results/cpu_step.md), without any units for it 40 times slower.",
        hurts="Two machines may compute in different formats; the run's config.yaml says which one it was.",
        source="pycls_fast/build/race.py.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Level(
        "fp32",
        "Everything in float32.",
        helps="The reference that every other level is compared with.",
        hurts="Time and memory, wherever 16 bits are faster.",
        source="IEEE 754.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
        apex="O0",
    ),
    Level(
        "tf32",
        "float32 with products in TF32: its range, 10 bits of significand; CUDA from Ampere on.",
        helps="Products on tensor cores with nothing else changed: no casts, no loss scaling.",
        hurts="Weights and activations take as much memory as in float32.",
        source="torch.backends.cuda.matmul and cudnn, allow_tf32; torch.set_float32_matmul_precision.",
        ran="CUDA only: not run.",
        tf32=True,
    ),
    Level(
        "amp_bf16",
        "bfloat16 autocast: weights, gradients and optimizer in float32.",
        helps="The first one to try: ViT-S/16, batch 16, two CPU cores with AMX, speed=fast: 27.3 images/s, float32 "
        "8.6; ResNet-50: 21.3 and 8.3 (docs/results/cpu_step.md).",
        hurts="Each weight is cast in every step, and the cast is kept for the backward pass, on every rank and under "
        "every strategy. A very small network gains nothing: 139,000 weights on two CPU cores 0.97x (95% interval "
        "0.92 to 1.01).",
        source="torch.autocast; Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv "
        "1905.12322.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.01 of float32's; three seeds in a ledger "
        "(docs/results/ledger_modern). CUDA: not run.",
        apex="O1",
        autocast="bfloat16",
    ),
    Level(
        "amp_fp16",
        "float16 autocast with loss scaling.",
        helps="GPUs without bfloat16, and the accuracy of 11 bits of significand where bfloat16 has 8.",
        hurts="The loss has to be scaled, and a step whose gradients overflow is skipped. Casts as in amp_bf16. "
        "Optimizers without a fused step (lamb, lion, muon, adafactor, adamw8bit; speed.optimizer=loop or foreach) "
        "wait for the device in every step, to know whether gradients overflowed. On a CPU an order of magnitude "
        "slower than float32: useful only for checking numbers.",
        source="Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740; torch.amp.GradScaler.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.002 of float32's. CUDA: not run.",
        apex="O1",
        autocast="float16",
        scaled=True,
    ),
    Level(
        "fp16_master",
        "float16 network with norms in float32, float32 master weights in the optimizer, loss scaling.",
        helps="As bf16_params, with the 11 bits of float16.",
        hurts="As amp_fp16; the float16 copy of the weights lies beside the masters. Under ddp gradients are summed in "
        "float16, over microbatches and over ranks; under fsdp, hsdp and in one process in float32.",
        source="Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv 1710.03740, section 3.1.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.002 of float32's; on two ranks. CUDA: not run.",
        apex="O2",
        weights="float16",
        wide_norms=True,
        masters="kept",
        scaled=True,
    ),
    Level(
        "bf16_params",
        "bfloat16 copies of float32 master weights, cast once a step: FSDP2's MixedPrecisionPolicy on one rank.",
        helps="One cast per step instead of one per use, and activations in half the bytes. ViT-S/16, batch 16, "
        "two CPU cores with AMX, speed=fast: 27.9 images/s, amp_bf16 27.3, float32 8.6 (docs/results/cpu_step.md). "
        "Under fsdp blocks are gathered in bfloat16, and no cast is kept.",
        hurts="Residual sums and norms round to 8 bits of significand. The bfloat16 copy of the weights lies beside "
        "the masters. Under ddp gradients are summed in bfloat16, over microbatches and over ranks; under fsdp, hsdp "
        "and in one process in float32.",
        source="torch.distributed.fsdp.MixedPrecisionPolicy; Micikevicius et al., ICLR 2018, section 3.1, on masters.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.01 of float32's; on two and four ranks under "
        "every strategy that takes it. CUDA: not run.",
        elsewhere="FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), exactly so under fsdp "
        "and hsdp; nearest to Apex's O2, which keeps norms in float32",
        weights="bfloat16",
        masters="kept",
    ),
    Level(
        "fp16",
        "Weights, norms, activations and gradients in float16, no masters; loss scaling.",
        helps="The fewest bytes: no float32 copy of a weight from step to step.",
        hurts="An update smaller than 1/4096 of its weight is lost; pycls-fast ledger mode=gradients counts them, and "
        "the gradients that float16 cannot hold. Not with parallel=fsdp, whose shards are float32.",
        source="Meta, Significantly faster Vision Transformer training, 2022.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.003 of float32's; on two ranks. CUDA: not run.",
        apex="O3",
        elsewhere="full FP16 in Meta's post of 2022",
        weights="float16",
        scaled=True,
    ),
    Level(
        "bf16",
        "Weights, norms, activations and gradients in bfloat16, no masters.",
        helps="The fewest bytes, without loss scaling.",
        hurts="An update smaller than 1/512 of its weight is lost: try it in the ledger before relying on it. Not with "
        "parallel=fsdp, whose shards are float32.",
        source="Apex's O3 with the other half format.",
        ran="CPU (torch 2.15): 12 steps of a small ViT, losses within 0.02 of float32's. CUDA: not run.",
        apex="O3",
        weights="bfloat16",
    ),
    Level(
        "fp8",
        "Products of linear layers in float8 with scales per tensor or row (torchao), the rest bfloat16 autocast.",
        helps="Wide linear layers on GPUs with float8 (compute capability 8.9 on): published 1.28x on an 8B language "
        "model (torchtitan, H100).",
        hurts="Uncompiled, the scales and casts, each a kernel of its own, take longer than the products save (bytes "
        "counted, not timed): speed=fast therefore sets speed.compile=blocks where it can; otherwise a note says so. "
        "Narrow layers, for which finding the scales costs more than the product gains (torchao's table). Layers with "
        "a side that is not a multiple of 16 stay out, and those of precision.fp8_skip. Not for ResNets.",
        source="Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv 2209.05433; torchao.float8.",
        ran="CPU (torch 2.15, torchao's emulation, which is slow): 12 steps of a small ViT, losses within 0.05 of "
        "float32's. CUDA: not run.",
        autocast="bfloat16",
        float8=True,
    ),
)
LEVELS: dict[Name, Level] = {level.name: level for level in _LEVELS}

KEPT_IN_FLOAT32: tuple[str, ...] = (
    "layer_norm",
    "group_norm",
    "softmax",
    "log_softmax",
    "exp",
    "log",
    "pow",
    "cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Operations whose output is float32 under this package's autocast (level O1), whatever their input.

CUDA's autocast does this itself (torch's documentation, "CUDA Ops that can autocast to float32", lists more); the
CPU's covers only the losses, and `parallel/autocast.py` adds the others. Batch norm is on neither list: its output has
the input's format, its statistics and its arithmetic are float32.
"""
