"""Cards: trading time for memory, and skipping dropped branches."""

from pycls_fast.speed.switch import Switch, SwitchName

MEMORY: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.RECOMPUTE,
        values=("off", "full", "selective", "budget"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        requires={},
        note="Blocks keep their input (full) or also the results of convolutions and products with weights (selective) "
        "and run again in the backward pass; parallel.recompute_every=k takes every k-th block. budget is for compiled "
        "code, which chooses what to keep within a share of the activations (parallel.recompute_budget) so that the "
        "fewest operations are repeated.",
        mathematics="None: the second run draws the same drop-path and does not update BatchNorm's statistics. full "
        "and selective give the same bits; budget fuses other operations, which round differently.",
        helps="When activations do not fit. Activations of a ViT-B/16 at batch 32 that are kept between the passes, "
        "relative to off: full 7% in float32 and 10% in bf16 autocast, selective 56% and 47%.",
        hurts="Time: full adds a forward pass, a third of the operations of a step (ViT-H/16 counted: 3.67 forward "
        "passes instead of 3); selective adds attention with its projection, norms and activation functions. Without "
        "speed.compile selective calls a Python policy for every operation of both runs (not timed): with small "
        "microbatches the device waits for the host, and full or parallel.recompute_every=2 costs less.",
        source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174; Korthikanti et "
        "al., 2022, arXiv 2205.05198; torch.utils.checkpoint.",
        ran="CPU (torch 2.11 and 2.15; budget 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ACTIVATION_OFFLOAD,
        values=("none", "cpu"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="identical",
        requires={},
        note="Tensors saved for the backward pass are kept in the host's pinned memory; with recompute=full those are "
        "the blocks' inputs.",
        mathematics="None.",
        helps="When activations do not fit in device memory and the bus is idle. A ViT-B/16 of batch 32 holds nothing "
        "on the device in float32, and 7% in bf16 autocast: the weights' copies.",
        hurts="Time: the copies run on the compute stream and do not overlap with it. torch pins memory in powers "
        "of two, so the host needs up to twice the bytes. On a CPU it only copies.",
        source="torch.autograd.graph.save_on_cpu, here with views of one storage copied once, strides kept and "
        "parameters left out.",
        ran="CPU (torch 2.11 and 2.15: as a copy). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.ACTIVATION_COMPRESSION,
        values=("none", "8bit"),
        fast={"cpu": "none", "cuda": "none"},
        numerics="training",
        requires={},
        note="Tensors saved for the backward pass are kept in 8 bits per number with a range per 256 numbers, the sign "
        "of a ReLU in 1 bit.",
        mathematics="The forward pass is exact. A saved number is restored with an error of at most 1/510 of the range "
        "of its group of 256 (plus its format's rounding), so gradients are approximate; ReLU's own gradient is exact.",
        helps="When activations do not fit. A ViT-B/16 at batch 32 keeps 26% in float32 and 50% in bf16 autocast, "
        "relative to none.",
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
        requires={"cpu": "cuda"},
        note="The optimizer's state and its float32 copy of the weights are in the host's memory, and the host updates "
        "them. With parallel=fsdp or hsdp the shards are on the host (torch's CPUOffloadPolicy); blocks are copied to "
        "the device when they compute.",
        mathematics="None; the CPU's kernels round and order the update differently.",
        helps="When optimizer state does not fit: AdamW's 8 bytes a parameter leave the device.",
        hurts="Time: each step waits for the gradients on the host, the CPU's update and the way back (22 M "
        "parameters of AdamW, fused, one core: 28 ms for the update alone, docs/results/optimizers_cpu.md). torchrun "
        "gives each rank one thread (OMP_NUM_THREADS=1); with this switch a rank uses its share of the cores, even if "
        "you set OMP_NUM_THREADS=1 yourself, unless runtime.threads is set.",
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
        note="Drop-path computes a branch for the kept samples only (skip) instead of multiplying the dropped ones by "
        "zero.",
        mathematics="None: the same samples are dropped; products over fewer rows add in a different order.",
        helps="In proportion to model.drop_path. A small ViT (width 192, batch 16, one CPU core), the same rate "
        "in every block: 1.27x at 0.2, 1.77x at 0.45, 2.31x at 0.6.",
        hurts="Shapes change from block to block and step to step: no CUDA graphs, no compilation with constant "
        "shapes, and ranks with different amounts of work. Not for networks with BatchNorm.",
        source="Oquab et al., DINOv2, 2023, arXiv 2304.07193, section 4 (which keeps a fixed number of samples; here "
        "each sample is drawn on its own, on the host).",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
)
