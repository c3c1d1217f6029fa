"""The catalogue of performance switches: every optimization is one named choice beside its slow, plain twin.

`numerics` says what a fast value owes its reference:

- `identical`: the same bits, step after step;
- `rounding`: the same mathematics in another order of operations;
- `training`: it changes what is learned, so its accuracy has to be measured.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pycls_fast.errors import UserError

Numerics = Literal["identical", "rounding", "training"]
Device = Literal["cpu", "cuda"]

# Some settings of the process are those of its C library.
HAS_GLIBC = platform.libc_ver()[0] == "glibc"


class SwitchName(enum.StrEnum):
    """The names that the `speed` group of the configuration accepts."""

    MEMORY_FORMAT = "memory_format"
    ATTENTION = "attention"
    LAYOUT = "layout"
    QKV = "qkv"
    LINEAR = "linear"
    PATCHES = "patches"
    ALLOCATOR = "allocator"
    COMPILE = "compile"
    COMPILE_MODE = "compile_mode"
    OPTIMIZER = "optimizer"
    OPTIMIZER_COMPILE = "optimizer_compile"
    EMA = "ema"
    CLIP = "clip"
    DECODE = "decode"
    DECODE_SCALE = "decode_scale"
    INPUT_COPY = "input_copy"
    NORMALIZE_ON = "normalize_on"
    ERASE_ON = "erase_on"
    MIX_ON = "mix_on"
    METRICS = "metrics"
    SEQUENCE_PADDING = "sequence_padding"
    CROSS_ENTROPY = "cross_entropy"
    CUDA_GRAPHS = "cuda_graphs"
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
        fast_16_bits: the best value where products are in 16 bits, on devices where it is another than `fast`.
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
    fast_16_bits: Mapping[Device, str] = field(default_factory=dict)

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
        applies_to=("vit", "resnet", "timm"),
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
        values=("reference", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "products"),
        fast={"cpu": "sdpa", "cuda": "sdpa"},
        fast_16_bits={"cpu": "products"},
        numerics="rounding",
        applies_to=("vit", "timm"),
        requires={"sdpa_efficient": "cuda", "sdpa_cudnn": "cuda"},
        note="torch's fused scaled_dot_product_attention: the N x N scores are never written to memory. sdpa lets "
        "torch pick the kernel; the others name it, and fail where it cannot run. sdpa_math is written out inside of "
        "torch. products is written out too, as six batched products with a backward pass of its own.",
        mathematics="None; softmax is computed block by block with running maxima, so sums are in another order. With "
        "products the scores and the attention are rounded to the format of the products, inside of autocast too.",
        helps="sdpa: always in memory; in time the more, the more tokens an image has. products: bfloat16 on a CPU, "
        "where torch's fused backward pass is slow: 2.4x faster than sdpa for 197 tokens and 2.1x for 577 (one core "
        "with AMX).",
        hurts="Head widths that a kernel pads (ViT-H's 80 to 96 in FlashAttention-2) waste part of its work. On CUDA, "
        "flash and cuDNN want 16-bit inputs. Which one wins differs by GPU: published figures have cuDNN 1.7-2.3x "
        "faster than flash on H100, and slower on A100. products keeps N x N numbers a head, and in float32 is slower "
        "than sdpa (0.8x, 0.6x for 577 tokens).",
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
        fast_16_bits={"cpu": "fused"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Queries, keys and values by three products, or by one with the three matrices joined when they are used. "
        "Parameters, their initial values, optimizer state and checkpoints are the three's in both.",
        mathematics="None; the gradient of the features is one sum over three times as many terms, not a sum of three.",
        helps="Narrow models and small batches, whose products are too small to fill the device one by one. bfloat16 "
        "on a CPU: attention with its four linear layers 1.1x (ViT-S/16, batch 16, one core with AMX).",
        hurts="The joined matrix is written at every use: 3 D^2 numbers, next to products of 3 D^2 for each token. Not "
        "with precision=fp8, which changes the three layers.",
        source="Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; timm's and torch's attention have one matrix.",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run. Timed once on two CPU cores under other load (ViT-S/16 with "
        "2 blocks, batch 16, float32, 6 pairs): 1.12x, 95% interval 0.83-1.45; nothing can be told.",
    ),
    Switch(
        name=SwitchName.LINEAR,
        values=("torch", "products"),
        fast={"cpu": "torch", "cuda": "torch"},
        fast_16_bits={"cpu": "products"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="The blocks' linear layers by torch, or by products that suit a CPU: the bias is added within the "
        "product, the gradient of the weights gets a transposed copy of its narrower factor, and the gradient of the "
        "bias is a product with ones.",
        mathematics="None; a bias is added before the result is rounded, and sums over tokens run in another order.",
        helps="bfloat16 on a CPU: forward and backward pass of a ViT-S's linear layers 1.14x, the MLP's 1.2x (batch "
        "16, one core with AMX).",
        hurts="float32: nothing gained. Not with precision=fp8, which changes the same layers.",
        source="oneDNN, matmul primitive: which layouts need no reordering; measured here (LOG.md).",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.PATCHES,
        values=("convolution", "product"),
        fast={"cpu": "product", "cuda": "convolution"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Patches are projected by a convolution whose stride is its size, or cut out and projected by one "
        "product. The weights are the convolution's.",
        mathematics="None; the sum over a patch runs in another order.",
        helps="On a CPU: the stem of ViT-S/16, forward and backward pass, 2.8x in bfloat16 and 1.2x in float32 (batch "
        "16, one core with AMX); 2% of a step.",
        hurts="The cut images are one more copy of the batch, kept for the backward pass.",
        source="Dosovitskiy et al. 2021, equation 1, to the letter.",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ALLOCATOR,
        values=("default", "keep"),
        fast={"cpu": "keep", "cuda": "default"},
        numerics="identical",
        applies_to=("vit", "resnet", "timm"),
        requires={"keep": "cpu"},
        note="Tells glibc's malloc to keep freed memory for the process instead of giving it back (mallopt): "
        "activations of a step lie in pages that the one before it had.",
        mathematics="None.",
        helps="On a CPU, where each step gets and gives back its activations page by page. ViT-S/16, batch "
        "16, bfloat16: 113,000 to 122,000 page faults a step become none, 15% of its CPU time (one core, under other "
        "load); float32 64,000 and 4%, ResNet-50 in bfloat16 42,000 and 4%.",
        hurts="The process stays as large as it once was, so compare the two in runs of their own. Needs glibc "
        "(Linux); where there is another C library the fast preset leaves it at default. An allocator put in its place "
        "with LD_PRELOAD decides for itself.",
        source="mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX; PyTorch performance tuning guide, CPU, on allocators.",
        ran="CPU (torch 2.15 and 2.11).",
    ),
    Switch(
        name=SwitchName.COMPILE,
        values=("off", "blocks", "model"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="torch.compile in place: of each repeated block, which compiles once for all blocks of a shape, or of the "
        "whole model. Norms, GELU, drop-path, residual sums and casts are fused; evaluation runs uncompiled.",
        mathematics="None; fused operations keep float32 between them where separate ones round to the autocast "
        "format. On the CPU drop-path drops the same samples as without; on CUDA it draws from the device's generator.",
        helps="Memory-bound operations on GPUs: published for inference 1.07-1.21x on ViTs and about 1.9x on ResNet-50 "
        "(timm's tables), for training 1.16x on an 8B language model (torchtitan).",
        hurts="The first step takes 20 to 100 s. On the CPU nothing was gained: 1.01-1.03x on ViT-S, 0.97-1.10x on "
        "ResNet-50 (float32, batch 16, two cores); in bfloat16 1.02x and 1.00x, blocks of ResNet-50 0.59x. Needs a "
        "C++ compiler. Hooks inside do not see what is fused.",
        source="Ansel et al., PyTorch 2, 2024; torch.nn.Module.compile; PyTorch recipe on regional compilation.",
        ran="CPU (torch 2.15). CUDA: not run, which is why the fast preset has it off.",
    ),
    Switch(
        name=SwitchName.COMPILE_MODE,
        values=("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
        fast={"cpu": "default", "cuda": "default"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="The gradient norm and the scaling by it as multi-tensor operations.",
        mathematics="None; the norm is summed in another order.",
        helps="On accelerators, where launching one kernel per tensor takes longer than the arithmetic.",
        hurts="Nothing known.",
        source="torch.nn.utils.get_total_norm, foreach.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.DECODE,
        values=("pillow", "simplejpeg", "region"),
        fast={"cpu": "region", "cuda": "region"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="How JPEGs become crops: all of the image by Pillow, all of it by simplejpeg with torch's resize, or only "
        "the rows and blocks that the crop needs, resized row by row (region: C, compiled on first use). Other formats "
        "and damaged files are Pillow's in any case.",
        mathematics="Boxes and flips are the same draws. Decoded pixels are the same bits; resized ones differ by a "
        "rounding. 200 ImageNet JPEGs at 224, mean absolute difference from Pillow 13 in grey levels of 255: region "
        "0.031 bilinear and 0.035 bicubic in training (164 of 200 crops are equal to the bit; in the others Pillow "
        "resizes columns before rows), 0 in evaluation; simplejpeg 0.033, 0.038 and 0.002, 0.004. No pixel is off by "
        "more than 1 (bilinear, training), 2 (evaluation), 13 (bicubic, at edges).",
        helps="Wherever the processor cannot decode as fast as the device trains. Training crops of 200 ImageNet "
        "JPEGs, one worker, times the rate with Pillow: simplejpeg 1.16x, region 1.61x; times torchvision's preset "
        "1.57x and 2.32x (docs/results/input_pipeline.md).",
        hurts="region needs a C compiler and libjpeg-turbo's header, simplejpeg its package (pip install "
        "'pycls_fast[jpeg]'): the fast preset takes what there is. Little is gained for progressive JPEGs, of which "
        "all is read before a pixel is known.",
        source="libjpeg-turbo's jpeg_skip_scanlines and jpeg_crop_scanline; DALI's and FFCV's crops before decoding; "
        "Pillow's resampling.",
        ran="CPU (torch 2.15, libjpeg-turbo 2.1.5). Images do not reach the device before, so CUDA changes nothing.",
    ),
    Switch(
        name=SwitchName.DECODE_SCALE,
        values=("full", "dct"),
        fast={"cpu": "full", "cuda": "full"},
        numerics="training",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="JPEGs whose crop is at least 2, 4 or 8 times as large as the training image both ways are decoded "
        "at a half, a quarter or an eighth of their size by a smaller inverse DCT, and resized from there. With "
        "speed.decode=region; evaluation decodes in full.",
        mathematics="The low frequencies of each 8 x 8 block stand in for the average that the resizing filter takes: "
        "other pixels, a little sharper or with more aliasing. Of the crops that change, the mean absolute difference "
        "is 0.9 to 1.2 grey levels of 255 (5% of ImageNet's crops at 224, 90% at 112).",
        helps="Photographs of several megapixels, and small training images. Training crops on one core, bilinear, 5 "
        "rounds: photographs of 12 megapixels at 224, 2.6x; 200 ImageNet JPEGs at 112, 1.21x, at 224, 1.03x.",
        hurts="Not a matter of rounding: try it in the ledger before relying on it. Nothing at 224 pixels for most of "
        "ImageNet's crops, which are smaller than 448.",
        source="libjpeg's scale_denom; Pillow's draft mode.",
        ran="CPU (libjpeg-turbo 2.1.5). Images do not reach the device before, so CUDA changes nothing.",
    ),
    Switch(
        name=SwitchName.INPUT_COPY,
        values=("blocking", "prefetch"),
        fast={"cpu": "blocking", "cuda": "prefetch"},
        numerics="identical",
        applies_to=("vit", "resnet", "timm"),
        requires={"prefetch": "cuda"},
        note="Batches travel on a side stream, two in flight, while the step before them computes.",
        mathematics="None.",
        helps="When copying a batch to the device takes a share of the step that is worth hiding.",
        hurts="One more batch lies in device memory.",
        source="torch CUDA semantics: use pinned memory buffers; the prefetcher of NVIDIA's ImageNet examples.",
        ran="CUDA only: not run.",
    ),
    Switch(
        name=SwitchName.NORMALIZE_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="Where uint8 images become normalised floating-point ones: in the loader's workers, as plain loops do "
        "(torchvision's ToTensor and Normalize), or behind the copy.",
        mathematics="None, and the same bits on a CPU; CUDA may multiply by 1 / 255 where the CPU divides.",
        helps="The copy to the device, the pinned memory and the queue of the workers hold a quarter of the bytes.",
        hurts="Nothing known. On cpu the workers, which are short on big machines, do the arithmetic.",
        source="NVIDIA's ImageNet example and timm (their prefetchers normalise on the device).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ERASE_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="Where the boxes of random erasing are filled; cpu is in the loader's workers, with "
        "speed.normalize_on=cpu alone, for what fills a box is no uint8. The boxes are drawn by the workers in any "
        "case.",
        mathematics="None, and the same bits on a CPU. On CUDA augment.erase_value=noise draws other numbers of the "
        "same distribution from the same seed, since CPU and CUDA have different generators.",
        helps="Noise costs a worker about as much as decoding a small image; a GPU draws it in passing.",
        hurts="Nothing known.",
        source="Zhong et al., Random Erasing Data Augmentation, 2017, arXiv 1708.04896; timm erases on the device.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.MIX_ON,
        values=("cpu", "device"),
        fast={"cpu": "device", "cuda": "device"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="Where mixup and CutMix mix a microbatch; cpu is in the loader's workers, on images that were "
        "normalised and erased there. What is mixed with what is drawn from the same seed.",
        mathematics="None, and the same bits on a CPU with float32 weights; with 16-bit weights the CPU mixes before "
        "rounding and the device after it.",
        helps="One pass over the batch is nothing to a GPU, and a worker's time is decoding time.",
        hurts="Nothing known.",
        source="Zhang et al., mixup, 2017, arXiv 1710.09412; Yun et al., CutMix, 2019, arXiv 1905.04899; torchvision's "
        "references mix in the loader's collate function.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.METRICS,
        values=("step", "interval"),
        fast={"cpu": "interval", "cuda": "interval"},
        numerics="identical",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="When the host reads loss and gradient norm: in every step, as plain loops do with loss.item(), or once "
        "per runtime.log_every_steps, from sums that are kept on the device.",
        mathematics="None; both sum in float64, and the same numbers are logged.",
        helps="On accelerators: the host queues steps ahead instead of waiting for each. The smaller the step, the "
        "more.",
        hurts="A loss that is no longer finite is seen at the end of the interval.",
        source="PyTorch performance tuning guide, Avoid unnecessary CPU-GPU synchronization.",
        ran="CPU (torch 2.11 and 2.15), where there is nothing to wait for. CUDA: not run.",
    ),
    Switch(
        name=SwitchName.SEQUENCE_PADDING,
        values=("none", "8", "64"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Tokens are padded to a multiple of 8 or 64 (197 to 200 or 256) in front of the blocks and cut off behind "
        "them. No token attends to the padding: attention=reference masks its scores, the fused kernels are given the "
        "keys and values of the real tokens alone.",
        mathematics="None; sums over tokens have zeros in them and run in another order.",
        helps="Written-out attention in 16 bits, whose products have 197 columns otherwise: tensor cores want "
        "multiples of 8. Kernels that tile by 64 or 128 have no ragged last tile.",
        hurts="The padding is computed: 1.5% (8) or 30% (64) more of everything but attention's keys, for 197 tokens. "
        "Reported operations do not count it.",
        source="NVIDIA, Matrix Multiplication Background User's Guide, on alignment and tile quantization.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.CROSS_ENTROPY,
        values=("plain", "fused"),
        fast={"cpu": "plain", "cuda": "plain"},
        numerics="rounding",
        applies_to=("vit", "resnet", "timm"),
        requires={},
        note="The loss and its gradient (cross-entropy or binary cross-entropy, smoothing, two labels) compiled into "
        "few kernels that read the logits once, instead of a dozen.",
        mathematics="None; the loss of a mixed batch is summed as lam loss(a) + (1 - lam) loss(b), in both.",
        helps="Many classes and small steps: launches and passes over (B, K) numbers.",
        hurts="Compiling takes seconds and needs a compiler. With 1,000 classes the loss is well below 1% of a step. "
        "torch's linear_cross_entropy, which never writes the logits, is for vocabularies, and is not in torch 2.11.",
        source="Ansel et al., PyTorch 2, 2024 (torch.compile).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.CUDA_GRAPHS,
        values=("off", "on"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={"on": "cuda"},
        note="After three steps the whole step (forward, loss, backward, clipping, optimizer, average, metrics) is "
        "recorded as one CUDA graph and replayed. Images, labels, the mix and the learning rate are copied into "
        "tensors that the graph reads.",
        mathematics="None. Drop-path draws from the device's generator, so other samples are dropped than without; "
        "the loss of a mixed batch always has both terms.",
        helps="Steps that are shorter than the launching of their kernels: small models, small batches, optimizers and "
        "averages of many tensors.",
        hurts="The graph keeps its own memory, beside what evaluation takes. With optim.name adamw or sgd, fused "
        "(float16 levels as well), one rank and one microbatch; not with what asks the host in between, which is "
        "refused.",
        source="NVIDIA and PyTorch, Accelerating PyTorch with CUDA Graphs, 2021; torch.cuda.CUDAGraph.",
        ran="CPU (torch 2.11 and 2.15): all but the recording, with a stand-in that calls the step again. CUDA: not "
        "run.",
    ),
    Switch(
        name=SwitchName.RECOMPUTE,
        values=("off", "full", "selective"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="identical",
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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
        applies_to=("vit", "resnet", "timm"),
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


# What differs from the reference in the recipe of Meta's post of 2022 and its code (pycls): images are mixed on the
# device, everything else of their preparation is the loader's; the host reads the loss in every step. Precision, the
# classifier and FairScale's sharding are other groups (`configs/speed/meta2022.yaml`).
META2022: Mapping[SwitchName, str] = {
    SwitchName.LAYOUT: "batch_second",
    SwitchName.OPTIMIZER: "foreach",
    SwitchName.MIX_ON: "device",
}


def preset_value(preset: str, switch: Switch, device: Device, *, in_16_bits: bool = False) -> str:
    """What a preset ("reference", "fast" or "meta2022") says of a switch, with products in 16 bits or not."""
    if preset == "fast":
        if switch.name == SwitchName.ALLOCATOR and not HAS_GLIBC:
            return switch.reference
        return switch.fast_16_bits.get(device, switch.fast[device]) if in_16_bits else switch.fast[device]
    return META2022.get(switch.name, switch.reference) if preset == "meta2022" else switch.reference


def resolve(
    preset: str,
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: str | None = None,
    *,
    in_16_bits: bool = False,
    sharded: bool = False,
) -> dict[SwitchName, str]:
    """The value of every switch on this device: the one chosen by hand, else the preset's.

    Args:
        preset: "reference", "fast" or "meta2022".
        chosen: the switches set by hand.
        device: where the run is.
        optimizer: `optim.name`. The preset takes the fastest implementation that there is of it on this device.
        in_16_bits: products are in bfloat16 or float16, for which other values may be the fastest.
        sharded: the optimizer's parameters are torch's DTensors.

    Raises:
        UserError: a value was chosen that this device cannot run, or an implementation that the optimizer has not.
    """
    resolved: dict[SwitchName, str] = {}
    problems: list[str] = []
    for switch in CATALOGUE:
        value = chosen.get(switch.name)
        if value is None:
            value = preset_value(preset, switch, device, in_16_bits=in_16_bits)
        needed = switch.requires.get(value)
        if needed is not None and needed != device:
            usable = " or ".join(v for v in switch.values if switch.requires.get(v, device) == device)
            problems.append(
                f"speed.{switch.name}: {value} needs {needed.upper()} and this run is on {device.upper()}; "
                f"use speed.{switch.name}={usable}"
            )
        resolved[switch.name] = value
    if resolved.get(SwitchName.ALLOCATOR) == "keep" and not HAS_GLIBC:
        problems.append("speed.allocator: keep needs glibc, which this system has not; use speed.allocator=default")
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
