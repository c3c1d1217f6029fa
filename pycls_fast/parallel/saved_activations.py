"""Activation memory: recompute saved activations, keep them in 8 bits, or offload them to the host.

Recomputation: Chen et al. 2016, arXiv 1604.06174, by `torch.utils.checkpoint`; the selective form is that of
Korthikanti et al. 2022, arXiv 2205.05198, turned into a rule about operators. The second forward draws the same random
numbers as the first and does not change buffers, so gradients and BatchNorm statistics are bit-identical.

8 bits: Gist (Jain et al. 2018, ISCA) keeps ReLU's output as one bit if only its backward pass reads it; ActNN (Chen et
al. 2021, arXiv 2104.14129) keeps activations in few bits with a range per group. Rounding is to nearest and not
stochastic as in ActNN: at 8 bits the error is small, and no random number is drawn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pycls_fast.network import Units
from pycls_fast.speed import Speed

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def save_activation_memory(model: nn.Module, units: Units, switches: Speed) -> None:
    """Apply recomputation, compression and offloading to a model in place, after its number and memory formats are set,
    before compilation and sharding.

    With full recomputation only the units' inputs are kept (and offloaded), with "selective" what `KeepProducts` keeps,
    too; with "budget" the compiler chooses (`compile_model`). Names, types, checkpoints and evaluation are unchanged.
    Recomputation and compression exclude each other: every unit would run again from a rounded input, and the
    gradient's error was 10% instead of 1% on a small ViT. So do selective recomputation and offloading: torch keeps
    what is selected past the hooks of saved tensors.
    """
    is_selective = switches.recompute == "selective"
    for _, unit in units if is_selective or switches.recompute == "full" else ():
        for module in unit.modules():
            # timm's activations may follow a convolution, whose result is kept.
            if is_selective and "inplace" in vars(module):
                vars(module)["inplace"] = False
        unit.forward = Recomputed(unit, selective=is_selective)
    in_8_bits, on_host = switches.activation_compression == "8bit", switches.activation_offload == "cpu"
    if in_8_bits or on_host:
        model.forward = SavedTensors(model, in_8_bits=in_8_bits, on_host=on_host)


class Recomputed:
    """Stands in for a unit's `forward`.

    An object and not a wrapping module: the unit keeps its type and its names, and a copy of it calls the copy.
    """

    def __init__(self, unit: nn.Module, *, selective: bool) -> None:
        self.unit = unit
        self.inner: Callable[[Tensor], Tensor] = unit.forward
        self.selective = selective

    def __call__(self, features: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(features)
        extra: dict[str, Any] = {"context_fn": self._contexts}
        if torch.compiler.is_compiling():
            # A compiled unit is recomputed by its graph, which writes buffers once; our buffer contexts do not apply.
            # Nothing of this object is passed on, or each unit would be compiled to a separate graph.
            extra = {"context_fn": _keep_products} if self.selective else {}
        return checkpoint(self.inner, features, use_reentrant=False, preserve_rng_state=True, **extra)

    def _contexts(self) -> Contexts:
        """For the forward pass and for its repetition in the backward pass."""
        first, again = _keep_products() if self.selective else (nullcontext(), nullcontext())
        return first, buffers_put_back(self.unit, again)


def _keep_products() -> Contexts:
    first, again = create_selective_checkpoint_contexts(KeepProducts())
    return first, again


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
if torch.backends.mkldnn.is_available():
    # What speed.linear=products runs on a CPU.
    _PRODUCTS.add(torch.ops.mkldnn._linear_pointwise.default)
# The second is what speed.convolution=products runs in compiled code for 1x1 kernels.
_CONVOLUTIONS = {"aten::convolution", "pycls_fast::pointwise"}
_BATCHED_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default}


class KeepProducts:
    """The policy of "selective" for one forward pass: keeps results of convolutions and of products with weights.

    So attention, norms and activations run again, and so does the product after attention, its output projection: it
    is a twelfth of the operations of a ViT block's products with weights, and a tenth of what would be kept.
    """

    def __init__(self) -> None:
        self._after_attention = False

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Called for every operator in execution order."""
        if operator in _PRODUCTS:
            is_projection, self._after_attention = self._after_attention, False
            return CheckpointPolicy.PREFER_RECOMPUTE if is_projection else CheckpointPolicy.MUST_SAVE
        if operator.name() in _CONVOLUTIONS:
            return CheckpointPolicy.MUST_SAVE
        if operator in _BATCHED_PRODUCTS or "scaled_dot_product" in operator.name():
            self._after_attention = True
        return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def buffers_put_back(unit: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Replace all buffers by copies inside the context, so that BatchNorm's statistics count a batch only once."""
    owned = [(module, name, value) for module in unit.modules() for name, value in module.named_buffers(recurse=False)]
    for module, name, value in owned:
        setattr(module, name, value.clone())
    try:
        with inner:
            yield
    finally:
        for module, name, value in owned:
            setattr(module, name, value)


SMALLEST = 1024
"""Tensors with fewer elements are kept unchanged."""


class SavedTensors:
    """Stands in for a model's `forward`: saved tensors are kept in 8 bits, on the host, or both.

    Unchanged: images, parameters, their casts and views (autocast's copies), and tensors of fewer than `SMALLEST`
    elements. Only floating-point tensors that gradients flow through are kept in 8 bits, so never images, the
    statistics of norms, or softmax's sums; of ReLU only the sign. Views of one storage share one copy of it. The host's
    memory is pinned if the device is CUDA.
    """

    def __init__(self, model: nn.Module, *, in_8_bits: bool, on_host: bool) -> None:
        self.model = model
        self.inner: Callable[[Tensor], Tensor] = model.forward
        self.in_8_bits, self.on_host = in_8_bits, on_host

    def __call__(self, images: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(images)
        hook = _Hook((*self.model.parameters(), images), in_8_bits=self.in_8_bits, on_host=self.on_host)
        relus = BitReLUs() if self.in_8_bits else nullcontext()
        with relus, torch.autograd.graph.saved_tensors_hooks(hook.pack, _unpack):
            return self.inner(images)


def _unpack(kept: Tensor | View) -> Tensor:
    return kept.restore() if isinstance(kept, View) else kept


class PackedStorage:
    """A compressed or offloaded range of memory, kept once for all saved tensors that are views of it."""

    def __init__(self, flat: Tensor, *, in_8_bits: bool, on_host: bool) -> None:
        self.count, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.parts: tuple[Tensor, ...] = tuple(compress(flat)) if in_8_bits else (flat,)
        self.in_8_bits = in_8_bits
        if on_host:
            self.parts = tuple(_to_host(part) for part in self.parts)

    def restore(self) -> Tensor:
        parts = [part.to(self.device, non_blocking=True) for part in self.parts]
        return decompress(EightBits(*parts), self.count, self.dtype) if self.in_8_bits else parts[0]


def _to_host(tensor: Tensor) -> Tensor:
    # Both copies, here and back, are on the current stream: the host never waits, and never reads the copy.
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


class View:
    """A saved tensor as a position in a packed range of memory; without an offset, the whole range in logical order."""

    def __init__(self, packed: PackedStorage, tensor: Tensor, offset: int | None) -> None:
        self.packed, self.shape, self.strides, self.offset = packed, tensor.shape, tensor.stride(), offset

    def restore(self) -> Tensor:
        flat = self.packed.restore()
        if self.offset is not None:
            return flat.as_strided(self.shape, self.strides, self.offset)
        empty = torch.empty_strided(self.shape, self.strides, dtype=flat.dtype, device=flat.device)
        return empty.copy_(flat.view(self.shape))


class _Hook:
    """Packs the saved tensors of one forward pass; `held` are tensors that stay alive anyway."""

    def __init__(self, held: Iterable[Tensor], *, in_8_bits: bool, on_host: bool) -> None:
        self.in_8_bits, self.on_host = in_8_bits, on_host
        self.left_alone = {tensor.untyped_storage()._cdata for tensor in held}
        # By storage, version and part. The weak reference prevents the storage's id from being reused.
        self.done: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[PackedStorage]]] = {}

    def pack(self, tensor: Tensor) -> Tensor | View:
        in_8_bits = self.in_8_bits and tensor.is_floating_point() and tensor.requires_grad
        if not (in_8_bits or self.on_host) or tensor.numel() < SMALLEST or self._stays(tensor):
            # Detached, because an operation's output and its node would otherwise keep each other alive.
            return tensor.detach()
        reference = StorageWeakRef(tensor.untyped_storage())
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        # A small part of a storage is packed alone.
        part = None if 2 * tensor.numel() >= size else (tensor.shape, tensor.stride(), tensor.storage_offset())
        key = (reference.cdata, tensor._version, tensor.dtype, in_8_bits, part)
        _, known = self.done.get(key, (None, None))
        packed = known() if known is not None else None
        if packed is None:
            whole = tensor.detach()
            flat = whole.as_strided((size,), (1,), 0) if part is None else whole.reshape(-1)
            packed = PackedStorage(flat, in_8_bits=in_8_bits, on_host=self.on_host)
            self.done[key] = (reference, weakref.ref(packed))
        return View(packed, tensor, int(tensor.storage_offset()) if part is None else None)

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.left_alone or _comes_from_one_leaf(tensor)


def _comes_from_one_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter, or made from one by a few one-argument operations (casts and views)."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    for _ in range(6):
        if node is None or hasattr(node, "variable"):
            return node is not None
        # Inputs without a gradient count too: a convolution of images depends on more than its weight.
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


GROUP = 256
"""Consecutive numbers that share a range, stored in 8 bytes per group: 1.03 bytes per number in all."""


class EightBits(NamedTuple):
    """A compressed flat tensor; element i of group g is about `low_G1[g] + codes_GE[g, i] * step_G1[g]`."""

    codes_GE: Tensor
    low_G1: Tensor
    step_G1: Tensor


def compress(flat: Tensor) -> EightBits:
    """Compress a one-dimensional floating-point tensor to 8 bits.

    Each number is restored with an error of at most half a step, where a step is 1/255 of its group's range:
    |error| <= (max - min) / 510, plus the rounding of its own format. A group of equal numbers is exact. A non-finite
    number makes its whole group NaN, so that a loss scaler sees it.
    """
    wide = flat if flat.dtype == torch.float64 else flat.float()
    missing = -flat.numel() % GROUP
    if missing:
        wide = torch.cat([wide, wide[-1:].expand(missing)])
    wide_GE = wide.view(-1, GROUP)
    low_G1, high_G1 = torch.aminmax(wide_GE, dim=1, keepdim=True)
    step_G1 = (high_G1 - low_G1) / 255
    divisor_G1 = torch.where(step_G1 == 0, torch.ones_like(step_G1), step_G1)
    codes_GE = ((wide_GE - low_G1) / divisor_G1).round_().clamp_(0, 255)
    # Casting NaN to an integer is undefined; the group's range, which is NaN, restores it.
    return EightBits(codes_GE.nan_to_num_(0.0).to(torch.uint8), low_G1, step_G1)


def decompress(packed: EightBits, count: int, dtype: torch.dtype) -> Tensor:
    wide_GE = packed.codes_GE.to(packed.low_G1.dtype).mul_(packed.step_G1).add_(packed.low_G1)
    return wide_GE.view(-1)[:count].to(dtype)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a flat boolean tensor, eight elements per byte (uint8)."""
    padded_E8 = F.pad(mask.view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded_E8 * weights_8).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Restore the flat boolean tensor of `count` elements."""
    weights_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights_8).ne(0).view(-1)[:count]


class BitReLU(torch.autograd.Function):
    """ReLU that saves one bit per element for its backward pass, not its output; the gradient is bit-identical."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, inplace: bool) -> Tensor:
        out = features.relu_() if inplace else features.relu()
        if inplace:
            ctx.mark_dirty(features)
        # Not `> 0`: like torch's, the gradient passes where the output is NaN. The mask fills its memory without gaps.
        mask = ~(out <= 0)
        ctx.save_for_backward(pack_bits(mask.as_strided((mask.numel(),), (1,))))
        ctx.shape, ctx.strides = mask.shape, mask.stride()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        mask = unpack_bits(bits, ctx.shape.numel()).as_strided(ctx.shape, ctx.strides)
        return torch.where(mask, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)), None


_RELUS = {
    F.relu: False, torch.relu: False, Tensor.relu: False,
    F.relu_: True, torch.relu_: True, Tensor.relu_: True,
}  # fmt: skip


class BitReLUs(TorchFunctionMode):
    """A context in which every ReLU is a `BitReLU`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RELUS and torch.is_grad_enabled():
            features, inplace = _relu_arguments(*args, **(kwargs or {}))
            if features.requires_grad:
                return BitReLU.apply(features, inplace or _RELUS[func])
        return func(*args, **(kwargs or {}))


def _relu_arguments(input: Tensor, inplace: bool = False) -> tuple[Tensor, bool]:  # noqa: A002  # torch's name
    return input, inplace
