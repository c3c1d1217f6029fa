"""Cards: how the network is laid out, computed and compiled."""

from pycls_fast.speed.switch import Switch, SwitchName

NETWORK: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.MEMORY_FORMAT,
        values=("contiguous", "channels_last"),
        fast={"cpu": "channels_last", "cuda": "channels_last"},
        numerics="rounding",
        requires={},
        note="Convolution weights and images in NHWC order, which tensor cores and oneDNN read without transposing.",
        mathematics="None; the convolution kernels of the two layouts sum in different orders.",
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
        "torch pick the kernel; the others name it, and fail if it cannot run. sdpa_math is unfused, inside torch. "
        "products is unfused too, as six batched products with its own backward pass.",
        mathematics="None; softmax is computed block by block with running maxima, so sums are in a different order. "
        "With products the scores and the attention are rounded to the format of the products, also under autocast.",
        helps="sdpa: always saves memory, and more time the more tokens an image has. products: bfloat16 on a CPU, "
        "where torch's fused backward pass is slow: 2.4x faster than sdpa for 197 tokens and 2.1x for 577 (one core "
        "with AMX).",
        hurts="Head widths that a kernel pads (ViT-H's 80 to 96 in FlashAttention-2) waste part of its work. On CUDA, "
        "flash and cuDNN need 16-bit inputs. Which one wins differs by GPU: published figures have cuDNN 1.7-2.3x "
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
        mathematics="None; products and sums over the batch run in a different order. Drop-path drops the same "
        "samples.",
        helps="Written-out attention: batched products read (N, B * H, E) in place, 4 copies of the features a block "
        "and step instead of 8. About 4% of a step is published for that.",
        hurts="attention=sdpa on the CPU, whose kernel works in (B, N, H, E): 4 copies a block and step instead of 0.",
        source="Meta, Significantly faster Vision Transformer training, 2022 (the pycls recipes).",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run. Timed once on two CPU cores under other load (ViT-S/16 with "
        "2 blocks, batch 16, float32, 6 pairs): 0.95x, 95% interval 0.89-1.21 with sdpa; inconclusive.",
    ),
    Switch(
        name=SwitchName.QKV,
        values=("separate", "fused"),
        fast={"cpu": "separate", "cuda": "separate"},
        fast_16_bits={"cpu": "fused", "cuda": "fused"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Queries, keys and values by three products, or by one with the three matrices joined when they are used. "
        "Parameters, their initial values, optimizer state and checkpoints are the three's in both.",
        mathematics="None; the gradient of the features is one sum over three times as many terms, not a sum of three.",
        helps="Narrow models and small batches, whose products are too small to fill the device one by one. Under "
        "autocast the features, which a norm returns in float32, are cast and saved once instead of three times, and "
        "no sum of three gradients is computed. bfloat16 on a CPU: attention with its four linear layers 1.1x "
        "(ViT-S/16, batch 16, one core with AMX).",
        hurts="The joined matrix is written at every use: 3 D^2 numbers, next to products of 3 D^2 for each token. Not "
        "with precision=fp8, which changes the three layers.",
        source="Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053; timm's and torch's attention have one matrix.",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run. Timed once on two CPU cores under other load (ViT-S/16 with "
        "2 blocks, batch 16, float32, 6 pairs): 1.12x, 95% interval 0.83-1.45; inconclusive.",
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
        mathematics="None; a bias is added before the result is rounded, and sums over tokens run in a different "
        "order.",
        helps="bfloat16 on a CPU: forward and backward pass of a ViT-S's linear layers 1.14x, the MLP's 1.2x (batch "
        "16, one core with AMX). A whole step on two cores: 1.08x (1.07 to 1.11) beside the rest of speed=fast; "
        "without compilation not shown (0.98x, 0.93 to 1.03; docs/results/ledger_cpu).",
        hurts="float32: nothing gained. Not with precision=fp8, which changes the same layers.",
        source="oneDNN, matmul primitive: which layouts need no reordering; measured here (LOG.md).",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.GELU,
        values=("torch", "polynomial"),
        fast={"cpu": "torch", "cuda": "torch"},
        fast_16_bits={"cpu": "polynomial"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="The blocks' GELU by torch's error function, or by a polynomial of degree 21 for the distribution "
        "function and another for the slope, in compiled code and 16 bits; what runs uncompiled, as evaluation "
        "does, and wider formats have torch's.",
        mathematics="GELU within 3e-6 |x|, its slope within 9e-5: bfloat16 rounds a number by up to 1 / 512 of it.",
        helps="bfloat16 on a CPU: 4.8 M numbers forward in 1.2 ms instead of 1.8, backward in 1.1 ms instead of 2.9 "
        "(Inductor's code of both, two cores with AVX-512).",
        hurts="Nothing without speed.compile.",
        source="Chebyshev interpolation (Trefethen, Approximation Theory and Approximation Practice, 2013, chapter 4).",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.PATCHES,
        values=("convolution", "product"),
        fast={"cpu": "product", "cuda": "product"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="Patches are projected by a convolution whose stride is its size, or cut out and projected by one "
        "product. The weights are the convolution's.",
        mathematics="None; the sum over a patch runs in a different order.",
        helps="On a CPU: the stem of ViT-S/16, forward and backward pass, 2.8x in bfloat16 and 1.2x in float32 (batch "
        "16, one core with AMX); 2% of a step. On CUDA a convolution of 3 channels seldom reaches the tensor cores; "
        "counted, not timed: ViT-H/16 with 64 images spends up to 7 of 107 ms there.",
        hurts="The cut images are one more copy of the batch, kept for the backward pass.",
        source="Dosovitskiy et al. 2021, equation 1, to the letter.",
        ran="CPU (torch 2.15 and 2.11). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.CONVOLUTION,
        values=("torch", "products"),
        fast={"cpu": "torch", "cuda": "torch"},
        fast_16_bits={"cpu": "products"},
        numerics="rounding",
        applies_to=("resnet",),
        requires={},
        note="Convolutions by torch, or parts of them by matrix products over channels-last pixels: 1x1 kernels in "
        "both directions, and the gradient of the weights of larger ones where maps are small and channels many. "
        "Contiguous maps and grouped convolutions are torch's.",
        mathematics="None; sums over pixels run in a different order.",
        helps="bfloat16 on a CPU: forward and backward pass of ResNet-50 1.10x (batch 16, two cores with AMX, medians "
        "of 6 steps each, one run each, uncompiled), its whole step with speed.compile=model 1.09x (95% interval "
        "1.07-1.21, 6 pairs).",
        hurts="The numbers under a kernel are copied, k x k times the map. float32: not timed.",
        source="Chellapilla et al., High Performance Convolutional Neural Networks for Document Processing, 2006 "
        "(convolutions as products); measured here (LOG.md).",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ALLOCATOR,
        values=("default", "keep"),
        fast={"cpu": "keep", "cuda": "default"},
        numerics="identical",
        requires={"keep": "cpu"},
        note="Tells glibc's malloc to keep freed memory for the process instead of returning it (mallopt): a step's "
        "activations reuse the pages of the previous step.",
        mathematics="None.",
        helps="On a CPU, where each step gets and returns its activations page by page. ViT-S/16, batch "
        "16, bfloat16: 113,000 to 122,000 page faults a step become none, 15% of its CPU time (one core, under other "
        "load); float32 64,000 and 4%, ResNet-50 in bfloat16 42,000 and 4%.",
        hurts="The process stays at its peak size, so compare the two in separate runs. Needs glibc (Linux); with a "
        "different C library the fast preset leaves it at default. No effect on an allocator that LD_PRELOAD puts in "
        "its place.",
        source="mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX; PyTorch performance tuning guide, CPU, on allocators.",
        ran="CPU (torch 2.15 and 2.11).",
    ),
    Switch(
        name=SwitchName.COMPILE,
        values=("off", "blocks", "model"),
        fast={"cpu": "off", "cuda": "blocks"},
        fast_16_bits={"cpu": "model"},
        numerics="rounding",
        requires={},
        note="torch.compile in place: of each repeated block, which compiles once for all blocks of a shape, or of the "
        "whole model. Norms, GELU, drop-path, residual sums and casts are fused; evaluation runs uncompiled. On CUDA "
        "the fast preset compiles a ViT by blocks and other networks as a whole, under every strategy of torch's, "
        "unless the run is too short for it to pay.",
        mathematics="None; fused operations keep float32 between them where separate ones round to the autocast "
        "format. On the CPU drop-path drops the same samples as without; on CUDA it draws from the device's generator.",
        helps="bfloat16 on a CPU, with the switches that go with it: 1.08x on ViT-S, 1.08x on ResNet-50 (batch 16, two "
        "cores with AMX). Memory-bound operations on GPUs: published for inference 1.07-1.21x on ViTs and about 1.9x "
        "on ResNet-50 (timm's tables), for training 1.16x on an 8B language model (torchtitan).",
        hurts="The first step takes 20 to 100 s. On the CPU in float32 nothing was gained: 1.01-1.03x on ViT-S, "
        "0.97-1.10x on ResNet-50 (batch 16, two cores); blocks of ResNet-50 in bfloat16 0.59x. Needs Python's "
        "headers and a compiler (C++ for a CPU, C for CUDA); without them, or with settings that conflict with "
        "compiled code, the fast preset leaves it off. Hooks inside do not see what is fused.",
        source="Ansel et al., PyTorch 2, 2024; torch.nn.Module.compile; PyTorch recipe on regional compilation.",
        ran="CPU (torch 2.15), traced under single, ddp and fsdp: two graphs and no graph break for a ViT of any "
        "depth. CUDA: not run.",
    ),
    Switch(
        name=SwitchName.COMPILE_MODE,
        values=("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
        fast={"cpu": "default", "cuda": "default"},
        numerics="rounding",
        requires={"reduce-overhead": "cuda", "max-autotune": "cuda"},
        note="torch.compile's mode, with speed.compile. reduce-overhead replays the compiled parts as CUDA graphs; "
        "max-autotune times several kernels for each product; max-autotune has both.",
        mathematics="None; different kernels sum in different orders.",
        helps="reduce-overhead: small batches, whose kernels are shorter than their launch; under ddp, too. On CUDA "
        "the fast preset takes it, with speed.compile=model, for steps of less than 2 TFLOP on a rank (ResNet-50: 80 "
        "images), in which a GPU waits for launches.",
        hurts="Compiling takes several times longer with max-autotune. CUDA graphs keep their own memory, and need "
        "speed.compile=model, optim.accumulation_steps=1 and weights that are not sharded. Under ddp gradients are "
        "then exchanged after the backward pass, not beside it.",
        source="torch.compile documentation, mode.",
        ran="CPU (torch 2.15): default and max-autotune-no-cudagraphs, the latter only on a ViT of 3 blocks. The "
        "others and CUDA: not run.",
    ),
)
