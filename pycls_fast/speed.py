"""The catalogue of performance switches: every optimization is one named choice beside its slow, plain twin.

`numerics` says what a fast value owes its reference:

- `identical`: the same bits, step after step;
- `rounding`: the same mathematics in another order of operations;
- `training`: it changes what is learned, so its accuracy has to be measured.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pycls_fast.errors import UserError

Numerics = Literal["identical", "rounding", "training"]
Device = Literal["cpu", "cuda"]


class SwitchName(enum.StrEnum):
    """The names that the `speed` group of the configuration accepts."""

    MEMORY_FORMAT = "memory_format"
    ATTENTION = "attention"
    LAYOUT = "layout"
    QKV = "qkv"
    COMPILE = "compile"
    COMPILE_MODE = "compile_mode"
    OPTIMIZER = "optimizer"
    OPTIMIZER_COMPILE = "optimizer_compile"
    EMA = "ema"
    CLIP = "clip"
    INPUT_COPY = "input_copy"
    RECOMPUTE = "recompute"
    ACTIVATION_OFFLOAD = "activation_offload"
    ACTIVATION_COMPRESSION = "activation_compression"
    PARAM_OFFLOAD = "param_offload"
    DROP_PATH_COMPUTE = "drop_path_compute"


@dataclass(frozen=True)
class Switch:
    """One optimization: `values[0]` is the reference, `fast` the value that was found best on each device.

    The texts make its card in `docs/switches.md` (`tools/switch_cards.py` writes it); full sentences, ended by a dot.

    Attributes:
        name, values, fast: see above.
        numerics: what the other values owe the reference.
        applies_to: kinds of model in which it changes anything.
        requires: device that a value cannot do without.
        note: what it does.
        mathematics: what changes in the numbers, to the letter.
        helps: when it is faster or smaller, with the figures measured so far and where.
        hurts: when it costs something.
        source: paper, documentation or code that it is from.
        ran: where it has been run, and where not.
    """

    name: SwitchName
    values: tuple[str, ...]
    fast: Mapping[Device, str]
    numerics: Numerics
    applies_to: tuple[str, ...]
    requires: Mapping[str, Device]
    note: str
    mathematics: str
    helps: str
    hurts: str
    source: str
    ran: str

    @property
    def reference(self) -> str:
        """The plain value that every other one is compared with."""
        return self.values[0]


CATALOGUE: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.MEMORY_FORMAT,
        values=("contiguous", "channels_last"),
        fast={"cpu": "channels_last", "cuda": "channels_last"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="Convolution weights and images in NHWC order, which tensor cores and oneDNN read without transposing.",
        mathematics="None; the convolution kernels of the two layouts add in different orders.",
        helps="Convolutional networks: ResNet-50 float32 1.24x on two CPU cores (batch 16), about 1.5x published on "
        "GPUs.",
        hurts="Grouped convolutions on some GPUs (timm's RegNetY tables); a ViT has one convolution and gains little.",
        source="PyTorch tutorial Channels Last Memory Format; timm's published benchmark tables (NHWC against NCHW).",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ATTENTION,
        values=("reference", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"),
        fast={"cpu": "sdpa", "cuda": "sdpa"},
        numerics="rounding",
        applies_to=("vit",),
        requires={"sdpa_efficient": "cuda", "sdpa_cudnn": "cuda"},
        note="torch's fused scaled_dot_product_attention: the N x N scores are never written to memory. sdpa lets "
        "torch pick the kernel; the others name it, and fail where it cannot run. sdpa_math is written out inside of "
        "torch.",
        mathematics="None; softmax is computed block by block with running maxima, so sums are in another order.",
        helps="Always in memory; in time the more, the more tokens an image has.",
        hurts="Head widths that a kernel pads (ViT-H's 80 to 96 in FlashAttention-2) waste part of its work. On CUDA, "
        "flash and cuDNN want 16-bit inputs. Which one wins differs by GPU: published figures have cuDNN 1.7-2.3x "
        "faster than flash on H100, and slower on A100.",
        source="Dao et al., FlashAttention, 2022, arXiv 2205.14135; torch.nn.functional.scaled_dot_product_attention.",
        ran="CPU (torch 2.15 and 2.11: math and flash). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.LAYOUT,
        values=("batch_first", "batch_second"),
        fast={"cpu": "batch_first", "cuda": "batch_first"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Features inside are (B, N, D) or (N, B, D). Parameters, checkpoints, images and logits are the same.",
        mathematics="None; products and sums over the batch run in another order. Drop-path drops the same samples.",
        helps="Written-out attention: batched products read (N, B * H, E) in place, 4 copies of the features a block "
        "and step instead of 8. About 4% of a step is published for that.",
        hurts="attention=sdpa on the CPU, whose kernel works in (B, N, H, E): 4 copies a block and step instead of 0.",
        source="Meta, Significantly faster Vision Transformer training, 2022 (the pycls recipes).",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run. Timed once on two CPU cores under other load (ViT-S/16 with "
        "2 blocks, batch 16, float32, 6 pairs): 0.95x, 95% interval 0.89-1.21 with sdpa; nothing can be told.",
    ),
    Switch(
        name=SwitchName.QKV,
        values=("separate", "fused"),
        fast={"cpu": "separate", "cuda": "separate"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Queries, keys and values by three products, or by one with the three matrices joined when they are used. "
        "Parameters, their initial values, optimizer state and checkpoints are the three's in both.",
        mathematics="None; the gradient of the features is one sum over three times as many terms, not a sum of three.",
        helps="Narrow models and small batches, whose products are too small to fill the device one by one.",
        hurts="The joined matrix is written at every use: 3 D^2 numbers, next to products of 3 D^2 for each token. Not "
        "with precision=fp8, which changes the three layers.",
        source="Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; timm's and torch's attention have one matrix.",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run. Timed once on two CPU cores under other load (ViT-S/16 with "
        "2 blocks, batch 16, float32, 6 pairs): 1.12x, 95% interval 0.83-1.45; nothing can be told.",
    ),
    Switch(
        name=SwitchName.COMPILE,
        values=("off", "blocks", "model"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="torch.compile in place: of each repeated block, which compiles once for all blocks of a shape, or of the "
        "whole model. Norms, GELU, drop-path, residual sums and casts are fused; evaluation runs uncompiled.",
        mathematics="None; fused operations keep float32 between them where separate ones round to the autocast "
        "format. On the CPU drop-path drops the same samples as without; on CUDA it draws from the device's generator.",
        helps="Memory-bound operations on GPUs: published for inference 1.07-1.21x on ViTs and about 1.9x on ResNet-50 "
        "(timm's tables), for training 1.16x on an 8B language model (torchtitan).",
        hurts="The first step takes 20 to 100 s. On the CPU nothing was gained: 1.01-1.03x on ViT-S, 0.97-1.10x on "
        "ResNet-50 (float32, batch 16, two cores). Needs a C++ compiler. Hooks inside do not see what is fused.",
        source="Ansel et al., PyTorch 2, 2024; torch.nn.Module.compile; PyTorch recipe on regional compilation.",
        ran="CPU (torch 2.15). CUDA: not run, which is why the fast preset has it off.",
    ),
    Switch(
        name=SwitchName.COMPILE_MODE,
        values=("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
        fast={"cpu": "default", "cuda": "default"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={"reduce-overhead": "cuda", "max-autotune": "cuda"},
        note="torch.compile's mode, with speed.compile. reduce-overhead replays the compiled parts as CUDA graphs; "
        "max-autotune times several kernels for each product; max-autotune has both.",
        mathematics="None; other kernels sum in another order.",
        helps="reduce-overhead: small batches, whose kernels are shorter than their launch.",
        hurts="Compiling takes several times longer with max-autotune. CUDA graphs keep their own memory, and do not "
        "go together with optim.accumulation_steps above 1.",
        source="torch.compile documentation, mode.",
        ran="CPU (torch 2.15): default alone. The others and CUDA: not run.",
    ),
    Switch(
        name=SwitchName.OPTIMIZER,
        values=("loop", "foreach", "fused"),
        fast={"cpu": "fused", "cuda": "fused"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="One kernel per operation over all parameters (foreach), or one kernel for the whole update (fused).",
        mathematics="None; multiplications and additions of the update are contracted or ordered differently.",
        helps="Models with many small tensors and small batches. AdamW of 86.6 M parameters on two CPU cores: loop 233 "
        "ms, foreach 221 ms, fused 38 ms.",
        hurts="foreach needs temporary copies of all parameters; fused refuses some mixtures of sharded parameters.",
        source="torch.optim documentation, foreach and fused implementations.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.OPTIMIZER_COMPILE,
        values=("off", "on"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="torch.compile of the optimizer step; the learning rate is a tensor, so a new value compiles nothing.",
        mathematics="None; the operations of an update are contracted into one kernel and round less often.",
        helps="Meant for optimizers without a fused implementation. ViT-S parameters, one CPU core: AdamW 2.2x and SGD "
        "2.9x faster than the loop (fused: 3.1x and 2.9x); LAMB and Lion compiled: not measured yet.",
        hurts="The first two steps compile, about a minute for ViT-S, more for LAMB; needs a compiler on the machine; "
        "fused is refused.",
        source="PyTorch recipe Compiled Optimizer with torch.compile (and its page on learning-rate schedulers).",
        ran="CPU (torch 2.11, 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.EMA,
        values=("loop", "foreach"),
        fast={"cpu": "foreach", "cuda": "foreach"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="The moving average of the weights in one multi-tensor operation instead of one per tensor.",
        mathematics="None; the interpolation is rounded once or twice depending on the kernel.",
        helps="On accelerators, where launching one kernel per tensor takes longer than the arithmetic.",
        hurts="Nothing known.",
        source="torch._foreach_lerp_, the multi-tensor kernels that torch.optim uses.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.CLIP,
        values=("loop", "foreach"),
        fast={"cpu": "foreach", "cuda": "foreach"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="The gradient norm and the scaling by it as multi-tensor operations.",
        mathematics="None; the norm is summed in another order.",
        helps="On accelerators, where launching one kernel per tensor takes longer than the arithmetic.",
        hurts="Nothing known.",
        source="torch.nn.utils.get_total_norm, foreach.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.INPUT_COPY,
        values=("blocking", "prefetch"),
        fast={"cpu": "blocking", "cuda": "prefetch"},
        numerics="identical",
        applies_to=("vit", "resnet"),
        requires={"prefetch": "cuda"},
        note="Batches travel on a side stream, two in flight, while the step before them computes.",
        mathematics="None.",
        helps="When copying a batch to the device takes a share of the step that is worth hiding.",
        hurts="One more batch lies in device memory.",
        source="torch CUDA semantics: use pinned memory buffers; the prefetcher of NVIDIA's ImageNet examples.",
        ran="CUDA only: not run.",
    ),
    Switch(
        name=SwitchName.RECOMPUTE,
        values=("off", "full", "selective"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="identical",
        applies_to=("vit", "resnet"),
        requires={},
        note="Blocks keep their input (full) or also the results of convolutions and products with weights (selective) "
        "and run again in the backward pass; parallel.recompute_every=k takes every k-th block.",
        mathematics="None: the second run draws the same drop-path and leaves BatchNorm's statistics alone.",
        helps="When activations do not fit. Held between the passes by a ViT-B/16 of batch 32, of what is held "
        "without: full 7% in float32 and 10% in bf16 autocast, selective 56% and 47%.",
        hurts="Time: full adds a forward pass, a third of the operations of a step (ViT-H/16 counted: 3.67 forward "
        "passes instead of 3); selective adds attention with its projection, norms and activation functions.",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174; Korthikanti et "
        "al., 2022, arXiv 2205.05198; torch.utils.checkpoint.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ACTIVATION_OFFLOAD,
        values=("none", "cpu"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="identical",
        applies_to=("vit", "resnet"),
        requires={},
        note="What is saved for the backward pass waits in pinned memory of the host; with recompute=full that is the "
        "blocks' inputs.",
        mathematics="None.",
        helps="When activations do not fit in device memory and the bus is idle. A ViT-B/16 of batch 32 holds nothing "
        "on the device in float32, and 7% in bf16 autocast: the weights' copies.",
        hurts="Time: the copies are on the stream that computes, not hidden behind it. On a CPU it only copies.",
        source="torch.autograd.graph.save_on_cpu, here with views of one storage copied once, strides kept and "
        "parameters left out.",
        ran="CPU (torch 2.11 and 2.15: as a copy). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ACTIVATION_COMPRESSION,
        values=("none", "8bit"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="training",
        applies_to=("vit", "resnet"),
        requires={},
        note="What is saved for the backward pass is kept in 8 bits a number with a range per 256 numbers, the sign of "
        "a ReLU in 1 bit.",
        mathematics="The forward pass is exact. A saved number comes back with an error of at most 1/510 of the range "
        "of its group of 256 (plus its format's rounding), so gradients are approximate; ReLU's own gradient is exact.",
        helps="When activations do not fit. A ViT-B/16 of batch 32 holds 26% in float32 and 50% in bf16 "
        "autocast, of what it holds without.",
        hurts="Time: each saved tensor is read and written several times more, by kernels that are not fused. "
        "Accuracy: not measured yet over several seeds.",
        source="Jain et al., Gist, ISCA 2018; Chen et al., ActNN, 2021, arXiv 2104.14129 (without its stochastic "
        "rounding).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.PARAM_OFFLOAD,
        values=("none", "cpu"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={"cpu": "cuda"},
        note="The optimizer's state and its float32 copy of the weights are in the host's memory, and the host updates "
        "them. With parallel=fsdp or hsdp the shards are there (torch's CPUOffloadPolicy); blocks come to "
        "the device when they compute.",
        mathematics="None; the CPU's kernels round and order the update differently.",
        helps="When optimizer state does not fit: AdamW's 8 bytes a parameter leave the device.",
        hurts="Time: each step waits for the gradients on the host, the CPU's update and the way back (86.6 M "
        "parameters of AdamW, fused, two CPU cores: 38 ms for the update alone).",
        source="Ren et al., ZeRO-Offload, 2021, arXiv 2101.06840; torch.distributed.fsdp.CPUOffloadPolicy.",
        ran="Its arithmetic on the CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.DROP_PATH_COMPUTE,
        values=("multiply", "skip"),
        fast={"cpu": "multiply", "cuda": "multiply"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Drop-path computes a branch for the kept samples alone (skip) instead of multiplying the dropped ones by "
        "zero.",
        mathematics="None: the same samples are dropped; products over fewer rows add in another order.",
        helps="In proportion to model.drop_path. A small ViT (width 192, batch 16, one CPU core), the same rate "
        "in every block: 1.27x at 0.2, 1.77x at 0.45, 2.33x at 0.6 (docs/results/drop_path_cpu.md).",
        hurts="Shapes change from block to block and step to step: no CUDA graphs, no compilation with constant "
        "shapes, and ranks with different amounts of work. Not for networks with BatchNorm.",
        source="Oquab et al., DINOv2, 2023, arXiv 2304.07193, section 4 (which keeps a fixed number of samples; here "
        "each sample is drawn on its own, on the host).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
)


# What there is of each optimizer (`optim.name`), the plain one first, and what of it can be compiled.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach", "fused"),
    "adamw": ("loop", "foreach", "fused"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop", "foreach"),
    "adafactor": ("loop",),
    "muon": ("loop",),
    "adamw8bit": ("loop",),
}
COMPILABLE: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach"),
    "adamw": ("loop", "foreach"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop",),
    "adafactor": ("loop",),
    "muon": ("loop",),
    # torchao compiles each update itself.
    "adamw8bit": (),
}
# What updates weights that are cut over ranks as torch's DTensors. Not there: Adafactor and Muon, which look at whole
# matrices, and torchao's 8-bit state.
SHARDABLE: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach"),
    "adamw": ("loop", "foreach", "fused"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop", "foreach"),
}


def resolve(
    preset: str,
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: str | None = None,
    *,
    sharded: bool = False,
) -> dict[SwitchName, str]:
    """The value of every switch on this device: the one chosen by hand, else the preset's.

    Args:
        preset: "reference" or "fast".
        chosen: the switches set by hand.
        device: where the run is.
        optimizer: `optim.name`. The preset takes the fastest implementation that there is of it on this device.
        sharded: the optimizer's parameters are torch's DTensors.

    Raises:
        UserError: a value was chosen that this device cannot run, or an implementation that the optimizer has not.
    """
    resolved: dict[SwitchName, str] = {}
    problems: list[str] = []
    for switch in CATALOGUE:
        value = chosen.get(switch.name)
        if value is None:
            value = switch.reference if preset == "reference" else switch.fast[device]
        needed = switch.requires.get(value)
        if needed is not None and needed != device:
            usable = " or ".join(v for v in switch.values if switch.requires.get(v, device) == device)
            problems.append(
                f"speed.{switch.name}: {value} needs {needed.upper()} and this run is on {device.upper()}; "
                f"use speed.{switch.name}={usable}"
            )
        resolved[switch.name] = value
    if optimizer is not None:
        problems += _fit_optimizer(resolved, chosen, device, optimizer, sharded=sharded)
    if problems:
        raise UserError(*problems)
    return resolved


def _fit_optimizer(
    resolved: dict[SwitchName, str],
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: str,
    *,
    sharded: bool,
) -> list[str]:
    """Take what there is where the preset's value does not exist; what is wrong with a value chosen by hand.

    On a GPU that is foreach; on a CPU the loop, than which foreach is slower (docs/results/optimizers_cpu.md).
    """
    compiled = resolved.get(SwitchName.OPTIMIZER_COMPILE) == "on"
    there = OPTIMIZERS[optimizer]
    if compiled and not COMPILABLE[optimizer]:
        return [f"speed.optimizer_compile: optim.name={optimizer} compiles itself; use speed.optimizer_compile=off"]
    if sharded and optimizer not in SHARDABLE:
        return [
            f"optim.name: {optimizer} needs whole weights, and fsdp and hsdp cut them; use optim=adamw or parallel=ddp"
        ]
    usable = tuple(
        name for name in (COMPILABLE[optimizer] if compiled else there) if not sharded or name in SHARDABLE[optimizer]
    )
    value = resolved[SwitchName.OPTIMIZER]
    if value in usable:
        return []
    if SwitchName.OPTIMIZER not in chosen:
        resolved[SwitchName.OPTIMIZER] = usable[-1] if device == "cuda" else usable[0]
        return []
    if sharded and value in there and value not in SHARDABLE[optimizer]:
        why = f"has no {value} for weights that are cut over ranks (fsdp, hsdp)"
    else:
        compiles = f"with {value} cannot be compiled (speed.optimizer_compile=on)"
        why = f"has no {value}" if value not in there else compiles
    return [f"speed.optimizer: optim.name={optimizer} {why}; use speed.optimizer={' or '.join(usable)}"]
