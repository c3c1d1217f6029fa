"""Cards: the step around the network: metrics on the host, token padding, the loss, recorded steps."""

from pycls_fast.speed.switch import Switch, SwitchName

STEP: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.METRICS,
        values=("step", "interval"),
        fast={"cpu": "interval", "cuda": "interval"},
        numerics="identical",
        requires={},
        note="When the host reads loss and gradient norm: in every step, as plain loops do with loss.item(), or once "
        "per runtime.log_every_steps, from sums that are kept on the device.",
        mathematics="None; both sum in float64, and the same numbers are logged.",
        helps="On accelerators: the host queues steps ahead instead of waiting for each. The smaller the step, the "
        "more.",
        hurts="A loss that is not finite is noticed only at the end of the interval.",
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
        note="Tokens are padded to a multiple of 8 or 64 (197 to 200 or 256) before the blocks and cut off after them. "
        "No token attends to the padding: attention=reference masks its scores, the fused kernels get only the keys "
        "and values of the real tokens.",
        mathematics="None; sums over tokens include zeros and run in a different order.",
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
        mathematics="None. Drop-path draws from the device's generator, so different samples are dropped; the loss of "
        "a mixed batch always has both terms.",
        helps="Steps that are shorter than the launching of their kernels: small models, small batches, optimizers and "
        "averages of many tensors.",
        hurts="The graph keeps its own memory, beside what evaluation takes. With optim.name adamw or sgd, fused "
        "(float16 levels as well), one rank and one microbatch; settings that need the host during the step are "
        "refused.",
        source="NVIDIA and PyTorch, Accelerating PyTorch with CUDA Graphs, 2021; torch.cuda.CUDAGraph.",
        ran="CPU (torch 2.11 and 2.15): all but the recording, with a stand-in that calls the step again. CUDA: not "
        "run.",
    ),
)
