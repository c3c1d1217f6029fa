"""Cards: everything between the backward pass and the next step."""

from pycls_fast.speed.switch import Switch, SwitchName

OPTIMIZER: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.OPTIMIZER,
        values=("loop", "foreach", "fused"),
        fast={"cpu": "fused", "cuda": "fused"},
        numerics="rounding",
        requires={},
        note="One kernel per operation over all parameters (foreach), or one kernel for the whole update (fused).",
        mathematics="None; multiplications and additions of the update are contracted or ordered differently.",
        helps="Models with many small tensors and small batches. On one CPU core fused is 3.1x the loop for AdamW and "
        "2.9x for SGD (22 M parameters, docs/results/optimizers_cpu.md).",
        hurts="foreach needs temporary copies of all parameters, and on a CPU is 0.7x the loop; fused refuses some "
        "mixtures of sharded parameters. Adafactor and Muon only have the loop; Muon's runs 15 small products for each "
        "matrix of the blocks (72 in ViT-B), on every rank of ddp.",
        source="torch.optim documentation, foreach and fused implementations.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
    Switch(
        name=SwitchName.OPTIMIZER_COMPILE,
        values=("off", "on"),
        fast={"cpu": "off", "cuda": "off"},
        numerics="rounding",
        requires={},
        note="torch.compile of the optimizer step; the learning rate is a tensor, so a new value compiles nothing.",
        mathematics="None; the operations of an update are contracted into one kernel and round less often, but "
        "AdamW's bias corrections are computed in float32, by the loop in float64.",
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
        requires={},
        note="The gradient norm and the scaling by it as multi-tensor operations.",
        mathematics="None; the norm is summed in a different order.",
        helps="On accelerators, where launching one kernel per tensor takes longer than the arithmetic.",
        hurts="Nothing known.",
        source="torch.nn.utils.get_total_norm, foreach.",
        ran="CPU (torch 2.15). CUDA: not run.",
    ),
)
