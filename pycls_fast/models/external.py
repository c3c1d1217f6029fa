"""Other people's modules with the interface of our models: any image classifier of timm, and the user's own.

The repeated blocks are found from timm's own grouping of a model's layers (`group_matcher`, which its layer-wise
learning rates use), else from the module tree. All of them are `layers()`; `units()` are those that take and return one
tensor, because recomputation and compilation by blocks can handle no others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import UserError, did_you_mean, first_line, refusing
from pycls_fast.models.complexity import meta_copy
from pycls_fast.network import Network, Units
from pycls_fast.values import Size


class ExternalNetwork(Network):
    """A network around a module, `network`: names are the module's with the prefix `network.`."""

    network: Any
    _layer_names: Sequence[str]
    _unit_names: Sequence[str]

    def values(self) -> dict[str, Tensor]:
        """The initial values of the module's parameters and buffers by their names."""
        raise NotImplementedError

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.network(images_BCHW)

    def units(self) -> Units:
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._unit_names]

    def layers(self) -> Units:
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._layer_names]

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module that owns tensors, without its children, filled from `values`.

        The values are made when the first module is filled; each is freed once it has been copied.
        """
        values: dict[str, Tensor] = {}
        for name, module in self.network.named_modules():
            if named_tensors(module, recurse=False):
                yield without_children(module), partial(self._fill, values, f"{name}." if name else "")

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor], prefix: str, module: nn.Module) -> None:
        if not values:
            values.update(self.values())
        for key, tensor in named_tensors(module):
            tensor.copy_(values.pop(prefix + key))


class GivenNetwork(ExternalNetwork):
    """A copy of a user's module, which begins with the module's values.

    Args:
        module: images (B, 3, H, W) to logits (B, K); K are the outputs of its last linear layer.

    Raises:
        UserError: it does not take the images, or gives other outputs.
    """

    skips_parameters = True

    def __init__(self, module: nn.Module, classes: int, image_size: Size) -> None:
        super().__init__()
        self.given = dict(named_tensors(module))
        """The initial values."""
        owners: dict[nn.Parameter, list[str]] = {}
        for path, owner in module.named_modules():
            for name, parameter in owner.named_parameters(path, recurse=False):
                owners.setdefault(parameter, []).append(name)
        self.tied = next((names for names in owners.values() if len(names) > 1), [])
        """Names of a parameter that several modules have, if there is one."""
        self.network = copy.deepcopy(module).to(torch.get_default_device(), torch.get_default_dtype())
        what = f"does not classify {classes} classes of {image_size} px images by a last linear layer"
        with refusing(f"model: the given {type(module).__name__} {what}", Exception):
            self._layer_names, self._unit_names = find_blocks(self.network, classes, image_size)
            self.last_layer()

    def values(self) -> dict[str, Tensor]:
        return self.given


def named_tensors(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each under all of its names."""
    return [
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    ]


def without_children(module: nn.Module) -> nn.Module:
    """A module that shares this one's tables of parameters and buffers: replacing a tensor replaces it in both."""
    own = nn.Module()
    own._parameters, own._buffers = module._parameters, module._buffers
    return own


def find_blocks(network: Any, num_classes: int, image_size: Size) -> tuple[list[str], list[str]]:
    """The repeated blocks of a model, and those of them that run once and take and return a single tensor.

    Both are in the order of a forward pass, which runs on the meta device.

    Raises:
        ValueError: the output is not one logit per class. Layers that the images do not fit raise other errors.
    """
    found = _matched(network) or _repeated(network)
    candidates = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    meta = meta_copy(network).eval()
    is_unit: dict[str, bool] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            single = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            is_unit[name] = single and not kwargs and name not in is_unit

        return hook

    for name in candidates:
        meta.get_submodule(name).register_forward_hook(note(name), with_kwargs=True)
    logits = run_without_memory(meta, image_size)
    if logits.shape[1:] != (num_classes,):
        raise ValueError(f"the output of an image has shape {tuple(logits.shape[1:])}, not ({num_classes},)")
    return list(is_unit), [name for name, usable in is_unit.items() if usable]


def run_without_memory(meta: nn.Module, image_size: Size) -> Tensor:
    """The output of a `meta_copy` for two images, on the meta device."""
    dtype = next(meta.parameters()).dtype
    with torch.no_grad():
        return meta(torch.empty(2, 3, *image_size, device="meta", dtype=dtype))


def accepts_size(network: nn.Module, image_size: Size) -> bool:
    """Whether a network accepts images of this size, whatever size it was built for."""
    try:
        run_without_memory(meta_copy(network).eval(), image_size)
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


def _matched(network: Any) -> list[str]:
    """Modules that timm's own patterns name as layers of the trunk."""
    matcher = network.group_matcher(coarse=False) if hasattr(network, "group_matcher") else None
    if not isinstance(matcher, dict):
        return []
    # CoaT has stem1 to stem4.
    specs: list[Any] = [spec for group, spec in matcher.items() if not group.startswith("stem")]
    pairs = [pair for spec in specs for pair in ([(spec, None)] if isinstance(spec, str) else spec)]
    # A pattern with a rank stands for layers between or after the blocks.
    patterns = [re.compile(pattern) for pattern, rank in pairs if rank is None]
    return [
        name
        for name, module in network.named_modules()
        if any(pattern.fullmatch(name) for pattern in patterns) and any(True for _ in module.parameters())
    ]


def _repeated(network: nn.Module) -> list[str]:
    """Children of sequential containers that have several children of the same class."""
    found = []
    for name, chain in network.named_modules():
        if not isinstance(chain, nn.Sequential | nn.ModuleList):
            continue
        kinds = [type(child) for child in chain.children()]
        found += [
            f"{name}.{key}" if name else key
            for key, child in chain.named_children()
            if kinds.count(type(child)) > 1 and any(True for _ in child.parameters())
        ]
    return found


class TimmNetwork(ExternalNetwork):
    """timm's model with our interface.

    Args:
        name: timm's, with or without a tag (`resnet50`, `vit_base_patch16_224.mae`); weights are never downloaded.
        image_size: side of the images in pixels, or height and width; models with a fixed input size are built for it.
        options: further keyword arguments of the model, as timm names them.
        attention: "reference": written out; "sdpa": torch's fused one. No effect on models whose modules lack timm's
            `fused_attn` switch.

    Raises:
        UserError: a name that timm does not have, or an argument or image size that the model does not take.
    """

    def __init__(
        self,
        *,
        name: str,
        num_classes: int,
        image_size: int | tuple[int, int] = 224,
        drop_path: float = 0.0,
        options: Mapping[str, Any] | None = None,
        attention: str = "sdpa",
    ) -> None:
        super().__init__()
        self.name = name
        self.image_size = Size.of(image_size)
        self.options = dict(options or {})
        self.arguments: dict[str, Any] = {"num_classes": num_classes, **self.options}
        if drop_path:
            self.arguments["drop_path_rate"] = drop_path
        if _built_for_one_size(name):
            self.arguments.setdefault("img_size", self.image_size.typed)
        self.network = self._create()
        head = getattr(self.network, "default_cfg", {}).get("classifier")
        if not isinstance(dict(self.network.named_modules(remove_duplicate=False)).get(str(head)), nn.Linear):
            raise UserError(
                f"model.name: {name} has no single linear classifier (default_cfg['classifier'] is {head!r}); choose "
                "another model, or name the last layer in your own: self.default_cfg = {'classifier': 'head'}"
            )
        switched = [module for module in self.network.modules() if hasattr(module, "fused_attn")]
        for module in switched:
            module.fused_attn = attention == "sdpa"
        self.has_fused_attention = bool(switched)
        """Whether `attention` changes anything."""
        try:
            # A forward pass, which also shows whether the model takes the images.
            self._layer_names, self._unit_names = find_blocks(self.network, num_classes, self.image_size)
        except Exception as error:
            known = self.network.default_cfg.get("input_size")
            made_for = Size.of(known[-2:]) if known else None
            hint = f", and was made for {made_for}" if made_for not in (None, self.image_size) else ""
            raise self._refusal(f"does not take images of {self.image_size} pixels{hint}", error) from error

    @property
    def head_name(self) -> str:
        return f"network.{self.network.default_cfg['classifier']}"

    @property
    def first_conv_name(self) -> str | None:
        found = self.network.default_cfg.get("first_conv")
        return f"network.{found}" if isinstance(found, str) else None

    def embedding_names(self) -> set[str]:
        """Parameters that timm keeps out of weight decay by name: tokens and positions."""
        exempt = getattr(self.network, "no_weight_decay", set)
        # As timm matches them (`timm.optim.param_groups_weight_decay`): XCiT has "pos_embed.*".
        patterns = [f"network.{pattern}" for pattern in exempt()]
        return {name for name, _ in self.named_parameters() if any(fnmatch(name, pattern) for pattern in patterns)}

    def values(self) -> dict[str, Tensor]:
        """The initial values that timm's constructor draws, for the whole model, on the CPU."""
        with torch.device("cpu"):
            return dict(named_tensors(self._create()))

    def _create(self) -> Any:
        import timm

        try:
            return timm.create_model(self.name, pretrained=False, **self.arguments)
        except Exception as error:
            # timm passes unknown arguments on to the model's constructor, and hardly checks the known ones.
            raise self._refusal(f"refuses {self.arguments}", error) from error

    def _refusal(self, what: str, error: Exception) -> UserError:
        keys = [f"model.options.{key}" for key in self.options] + ["data.image_size"]
        if "drop_path_rate" in str(error):
            keys = ["model.drop_path"]
        told = f"{type(error).__name__}: {first_line(error)}"
        return UserError(f"model.name: timm's {self.name} {what} ({told}); correct {' or '.join(keys)}")


def _built_for_one_size(name: str) -> bool:
    """Whether timm's model takes only one image size.

    Raises:
        UserError: no such model.
    """
    import timm

    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models()) or "; python -c 'import timm; print(timm.list_models())'"
        raise UserError(
            f"model.name: timm {timm.__version__} has no model {name}{hint}; if it is your own, name the module that "
            "registers it: imports=[MODULE] (in Python: import it first)"
        )
    with refusing(f"model.name: {name} has a tag that timm does not know", RuntimeError, use="leave out the tag"):
        config = timm.get_pretrained_cfg(name)
    return bool(config is not None and config.fixed_input_size)
