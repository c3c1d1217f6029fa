"""Any image-classification model of timm, by name, with the interface of our models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pycls_fast.errors import UserError, first_line, refusing
from pycls_fast.models.complexity import meta_copy
from pycls_fast.models.given import WrappedNetwork, find_blocks, named_tensors, run_without_memory
from pycls_fast.values import Size

FusedAttention = Literal["reference", "sdpa"]


class TimmNetwork(WrappedNetwork):
    """timm's model with our interface.

    Args:
        name: timm's, with or without a tag (`resnet50`, `vit_base_patch16_224.mae`); weights are never downloaded.
        num_classes: K.
        image_size: side of the images in pixels, or height and width; models with a fixed input size are built for it.
        drop_path: timm's `drop_path_rate`.
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
        attention: FusedAttention = "sdpa",
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
        if not hasattr(self.network, "default_cfg"):
            raise UserError(
                f"model.name: {name} has no default_cfg; set it in the model to name its last linear layer, for "
                "example self.default_cfg = {'classifier': 'head'}"
            )
        if not isinstance(self._head(), nn.Linear):
            raise UserError(
                f"model.name: {name} has no single linear classifier (default_cfg['classifier'] is "
                f"{self.network.default_cfg.get('classifier')!r}); choose another model, or correct that in your own"
            )
        for module in self.network.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = attention == "sdpa"
        self._layer_names, self._unit_names = self._blocks_met(num_classes)

    @property
    def head_name(self) -> str:
        """Qualified name of the final linear layer."""
        return f"network.{self.network.default_cfg['classifier']}"

    @property
    def first_conv_name(self) -> str | None:
        """Qualified name of the one layer that sees the image, if there is one."""
        found = self.network.default_cfg.get("first_conv")
        return f"network.{found}" if isinstance(found, str) else None

    @property
    def has_fused_attention(self) -> bool:
        """Whether `attention` changes anything."""
        return any(hasattr(module, "fused_attn") for module in self.network.modules())

    def embedding_names(self) -> set[str]:
        """Parameters that timm keeps out of weight decay by name: tokens and positions."""
        exempt = getattr(self.network, "no_weight_decay", set)
        # As timm matches them (`timm.optim.param_groups_weight_decay`): XCiT has "pos_embed.*".
        patterns = [f"network.{pattern}" for pattern in exempt()]
        return {name for name, _ in self.named_parameters() if any(fnmatch(name, pattern) for pattern in patterns)}

    def scale_names(self) -> set[str]:
        """Layer scales, norms of timm's own classes and biases under other names.

        timm decays nothing with one dimension (`timm.optim.param_groups_weight_decay`), because these three cannot be
        recognised by type.
        """
        return {name for name, p in self.named_parameters() if p.ndim <= 1 and name.rpartition(".")[2] != "bias"}

    def values(self) -> dict[str, Tensor]:
        """What timm's constructor draws, which is the whole model, on the CPU."""
        with torch.device("cpu"):
            return dict(named_tensors(self._create()))

    def takes(self, image_size: Size) -> bool:
        """Whether the model accepts images of this size, whatever size it was built for."""
        try:
            run_without_memory(meta_copy(self.network).eval(), image_size)
        except (AssertionError, RuntimeError, ValueError):
            return False
        return True

    def _head(self) -> nn.Module | None:
        name = self.network.default_cfg.get("classifier")
        return dict(self.network.named_modules(remove_duplicate=False)).get(name) if isinstance(name, str) else None

    def _create(self) -> Any:
        import timm

        try:
            return timm.create_model(self.name, pretrained=False, **self.arguments)
        except Exception as error:
            # timm passes unknown arguments to the model's constructor, and checks little of the known ones.
            raise self._refusal(f"refuses {self.arguments}", error) from error

    def _blocks_met(self, num_classes: int) -> tuple[list[str], list[str]]:
        """Names of layers and units, from a forward pass, which also shows whether the model takes the images."""
        try:
            return find_blocks(self.network, num_classes, self.image_size)
        except Exception as error:
            known = self.network.default_cfg.get("input_size")
            made_for = Size.of(known[-2:]) if known else None
            hint = f", and was made for {made_for}" if made_for not in (None, self.image_size) else ""
            what = f"does not take images of {self.image_size} pixels{hint}"
            raise self._refusal(what, error) from error

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
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "python -c 'import timm; print(timm.list_models())'"
        raise UserError(
            f"model.name: timm {timm.__version__} has no model {name}; {hint}; if it is your own, name the module that "
            "registers it: imports=[MODULE] (in Python: import it first)"
        )
    with refusing(f"model.name: {name} has a tag that timm does not know", RuntimeError, use="leave out the tag"):
        config = timm.get_pretrained_cfg(name)
    return bool(config is not None and config.fixed_input_size)
