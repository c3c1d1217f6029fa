"""The vision transformer (Dosovitskiy et al., An Image Is Worth 16x16 Words, 2021, arXiv 2010.11929).

Shape letters as in `layers`: B batch, C channels, N tokens, D width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.drop_path import DropPath, drop_path_rates
from pycls_fast.models.layers import (
    PLAIN,
    Attention,
    ClassToken,
    Compute,
    LearnedPositions,
    Mlp,
    PatchStem,
    SinCos2dPositions,
)
from pycls_fast.models.moe import FACTS, Experts, ExpertsMlp
from pycls_fast.models.vit_parts import FILLS, LayerScale, MapPooling, RegisterTokens, TokenConvStem
from pycls_fast.network import Division, Network, Units
from pycls_fast.values import Size


class Block(nn.Module):
    """One pre-norm encoder block: attention, then an MLP or experts, each on a residual branch (equations 2 and 3).

    `keys` is the number of tokens that are attended to; None for all.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        compute: Compute = PLAIN,
        *,
        experts: Experts | None = None,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        qk_norm: bool = False,
        keys: int | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads, compute, keys=keys, qk_norm=qk_norm, norm_eps=norm_eps)
        self.scale1 = None if layer_scale is None else LayerScale(width, layer_scale)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp: Mlp | ExpertsMlp
        if experts is None:
            self.mlp = Mlp(width, mlp_width, compute)
        else:
            token_dim = 1 - compute.batch_dim
            self.mlp = ExpertsMlp(width, mlp_width, experts, gelu=compute.gelu, token_dim=token_dim, keys=keys)
        self.scale2 = None if layer_scale is None else LayerScale(width, layer_scale)
        self.drop_path = DropPath(drop_path, batch_dim=compute.batch_dim, compute=compute.drop_path_compute)

    def reset_parameters(self) -> None:
        self.norm1.reset_parameters()
        self.attention.reset_parameters()
        self.norm2.reset_parameters()
        self.mlp.reset_parameters()
        for scale in (self.scale1, self.scale2):
            if scale is not None:
                scale.reset_parameters()

    def forward(self, features_BND: Tensor) -> Tensor:
        features_BND = self.drop_path.residual(features_BND, self._attention_branch)
        return self.drop_path.residual(features_BND, self._mlp_branch)

    def _attention_branch(self, features_BND: Tensor) -> Tensor:
        branch_BND = self.attention(self.norm1(features_BND))
        return branch_BND if self.scale1 is None else self.scale1(branch_BND)

    def _mlp_branch(self, features_BND: Tensor) -> Tensor:
        branch_BND = self.mlp(self.norm2(features_BND))
        return branch_BND if self.scale2 is None else self.scale2(branch_BND)


class VisionTransformer(Network):
    """A vision transformer with a linear classifier.

    The arguments are the keys of `choices.ViTModel`, which describes them, and these:

    Args:
        image_size: side of the images in pixels, or height and width; multiples of patch_size.
        num_classes: K.
        experts: in place of the MLP of every second block, as in V-MoE; see `moe`. None for none.
        classifier_norm: "after_pool" is timm's `fc_norm` and MAE's; "before_pool" is on every token, as in the released
            JAX code and pycls. For classifier="token" the two are the same function.
        computation: the fields of `layers.Compute`.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    head_name = "head"

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_width: int,
        num_classes: int,
        experts: Experts | None = None,
        stem: str = "patch",
        stem_widths: Sequence[int] = (),
        stem_strides: Sequence[int] = (),
        class_token: bool | None = None,
        distillation_token: bool = False,
        registers: int = 0,
        classifier: str = "token",
        classifier_norm: str | None = None,
        pre_logits: int | None = None,
        positions: str = "learned",
        position_tokens: str = "all",
        layer_scale: float | None = None,
        qk_norm: bool = False,
        drop_path: float = 0.0,
        drop_path_rule: str = "linear",
        norm_eps: float = 1e-6,
        init: str = "jax",
        **computation: Any,
    ) -> None:
        super().__init__()
        self.image_size = size = Size.of(image_size)
        # A teacher gets the image size of the network that it teaches.
        if size.height % patch_size or size.width % patch_size or width % heads:
            raise ValueError("image_size has to be a multiple of patch_size, and width of heads")
        compute = Compute(**computation)
        has_token = classifier == "token" if class_token is None else class_token
        self.classifier = classifier
        self.classifier_norm = classifier_norm or default_classifier_norm(classifier)
        self.position_tokens = position_tokens
        self.init = init
        self.extra_tokens = has_token + distillation_token + registers
        self.batch_dim = compute.batch_dim
        self.grid = (size.height // patch_size, size.width // patch_size)
        self.tokens = math.prod(self.grid) + self.extra_tokens
        self.padding = -self.tokens % compute.sequence_padding

        # Built on the meta device and filled once, by `initialise`: torch's layers would first draw values that are
        # thrown away, and a model built on the meta device would not get the values of one built directly.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.stem = (
                PatchStem(patch_size, width, patches=compute.patches)
                if stem == "patch"
                else TokenConvStem(stem_widths, stem_strides, width)
            )
            self.class_token = ClassToken(width) if has_token else None
            self.distillation_token = ClassToken(width) if distillation_token else None
            self.registers = RegisterTokens(registers, width) if registers else None
            self.positions = self._positions(positions, width)
            keys = self.tokens if self.padding else None
            self.blocks = nn.ModuleList(
                Block(
                    width, heads, mlp_width, compute, experts=experts if index % 2 else None, drop_path=rate,
                    norm_eps=norm_eps, layer_scale=layer_scale, qk_norm=qk_norm, keys=keys,
                )
                for index, rate in enumerate(drop_path_rates(drop_path, depth, drop_path_rule))
            )  # fmt: skip
            self.mixtures = depth // 2 if experts else 0
            self.norm = nn.LayerNorm(width, eps=norm_eps)
            self.pooling: MapPooling | None = None
            if classifier == "map":
                self.pooling = MapPooling(width, heads, mlp_width, norm_eps=norm_eps)
            self.pre_logits = nn.Linear(width, pre_logits) if pre_logits else None
            self.head = nn.Linear((pre_logits or width) * (1 + distillation_token), num_classes)
        self.to_empty(device=device)
        self.initialise()

    def _positions(self, kind: str, width: int) -> LearnedPositions | SinCos2dPositions:
        placed = self.extra_tokens if self.position_tokens == "all" else 0
        if kind == "learned":
            return LearnedPositions(math.prod(self.grid) + placed, width)
        return SinCos2dPositions(*self.grid, width, extra_tokens=placed)

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Initial values by the scheme `init`; the parts of `vit_parts` follow the code that they come from.

        "jax", from the paper's released code (google-research/vision_transformer, `models_vit.py`): xavier-uniform
        matrices, with zero biases in attention and N(0, 1e-6) biases in MLPs; LeCun normal patches and `pre_logits`;
        positions N(0, 0.02); class token and head zero.

        "trunc_normal", from DeiT (`models_v2.py` of facebookresearch/deit; timm 0.3.2, which its `models.py` builds on,
        and `init_weights_vit_timm` since): matrices, the head's too, class token and positions N(0, 0.02); biases zero;
        patches and other convolutions as torch draws them by default. (The name says truncated because that code
        truncates at +-2, which is 100 standard deviations.) Registers are those of "jax", as in timm.
        """
        of_body, of_pre_logits, of_head = FILLS[self.init]
        tokens = (self.class_token, self.distillation_token, self.registers, self.positions)
        for module in (self.stem, *tokens, *self.blocks, self.norm, self.pooling):
            if module is not None:
                yield module, of_body
        if self.pre_logits is not None:
            yield self.pre_logits, of_pre_logits
        yield self.head, of_head

    @property
    def first_conv_name(self) -> str:
        return "stem.projection" if isinstance(self.stem, PatchStem) else "stem.convs.0"

    def units(self) -> Units:
        return [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]

    def divisions(self, unit: nn.Module) -> Mapping[str, Division]:
        """Attention by its heads, MLPs by their hidden width, the rest of a block by tokens; routers see all tokens."""
        kinds: dict[Division, str] = {
            "tokens": "norm1 scale1 norm2 scale2",
            "branch": "attention mlp",
            "outputs": "attention.query attention.key attention.value mlp.fc1",
            "heads": "attention.query_norm attention.key_norm",
            "inputs": "attention.projection mlp.fc2",
        }
        own = {name for name, _ in unit.named_modules()}
        found = {name: kind for kind, names in kinds.items() for name in names.split() if name in own}
        if "mlp.router" in own:
            found = {name: kind for name, kind in found.items() if not name.startswith("mlp")} | {"mlp": "whole"}
        return found

    def embedding_names(self) -> set[str]:
        kinds = (ClassToken, RegisterTokens, LearnedPositions, MapPooling)
        owners = ((path, module) for path, module in self.named_modules() if isinstance(module, kinds))
        return {f"{path}.{name}" for path, module in owners for name, _ in module.named_parameters(recurse=False)}

    def _expert_layers(self, units: Iterable[nn.Module] | None = None) -> list[ExpertsMlp]:
        if not self.mixtures:
            return []  # Every step asks.
        # FairScale's wrappers are around the blocks.
        modules = (module for unit in (self.blocks if units is None else units) for module in unit.modules())
        return [module for module in modules if isinstance(module, ExpertsMlp)]

    def experts(self) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
        return [(layer, layer.fc1, layer.fc2) for layer in self._expert_layers()]

    def auxiliary_loss(self, units: Iterable[nn.Module] | None = None) -> Tensor | None:
        losses = [layer.loss for layer in self._expert_layers(units) if layer.loss is not None]
        return torch.stack(losses).sum() if losses else None

    def facts(self) -> Mapping[str, Tensor]:
        """The experts' load and the dropped tokens (see `moe`), means over the blocks that are trained."""
        layers = self._expert_layers()
        facts = [layer.facts for layer in layers if layer.facts]
        # Frozen layers are in evaluation mode and have no facts; the layers of other pipeline stages count too.
        mixtures = self.mixtures - (len(layers) - len(facts))
        nothing = torch.zeros((), device=next(self.parameters()).device)
        return {
            name: torch.stack([nothing, *(each[name] for each in facts)]).sum() / mixtures
            for name in (FACTS if mixtures else ())
        }

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, C, *image_size), any memory format -> logits_BK.

        Raises:
            ValueError: images of a different size than the model was built for.
        """
        if tuple(images_BCHW.shape[-2:]) != self.image_size:
            made_for, found = (" x ".join(map(str, size)) for size in (self.image_size, images_BCHW.shape[-2:]))
            raise ValueError(f"built for images of {made_for} pixels; got {found}")
        features_BND = self.enter(images_BCHW)
        for block in self.blocks:
            features_BND = block(features_BND)
        return self.leave(features_BND)

    def enter(self, images_BCHW: Tensor) -> Tensor:
        """Images -> features_BND, the blocks' input; (N, B, D) in the layout batch_second."""
        features_BND = self._embed(self.stem(images_BCHW))
        if self.padding:
            features_BND = F.pad(features_BND, (0, 0, 0, self.padding))
        return features_BND.transpose(0, 1).contiguous() if self.batch_dim == 1 else features_BND

    def leave(self, features_BND: Tensor) -> Tensor:
        features_BD = self._pool(features_BND.transpose(0, 1) if self.batch_dim == 1 else features_BND)
        if self.pre_logits is not None:
            features_BD = torch.tanh(self.pre_logits(features_BD))
        return self.head(features_BD) if self.distillation_token is None else self._of_both(features_BD)

    def _of_both(self, features_B2D: Tensor) -> Tensor:
        """The logits of class and distillation token, (B, 2, K), or their mean (DeiT, section 4).

        The head's inputs are those of both tokens side by side; for the logits of one token, the other half is zeros.
        One bias serves both. After training only the mean matters, which is that of DeiT's two heads; and the network
        has one last layer with one input, which other code asks for.
        """
        # Modules do not know: a frozen head is in evaluation mode, and the network of a pipeline's stages never.
        if not (self.taught and torch.is_grad_enabled()):
            return self.head(features_B2D.flatten(1) / 2)
        own = torch.eye(2, dtype=features_B2D.dtype, device=features_B2D.device)[:, :, None]
        return self.head((features_B2D[:, None] * own).flatten(2))

    def draws(self) -> list[int]:
        # Of drop-path: one for each branch of a block.
        return [2 * block.drop_path.drops for block in self.blocks if isinstance(block, Block)]

    def ends(self) -> tuple[list[str], list[str]]:
        tokens = ("class_token", "distillation_token", "registers")
        ends = ("stem", *tokens, "positions"), ("norm", "pooling", "pre_logits", "head")
        before, after = ([name for name in names if getattr(self, name) is not None] for names in ends)
        return before, after

    def _embed(self, features_BND: Tensor) -> Tensor:
        """The patches, with positions, after class token, distillation token and registers; contiguous."""
        only_patches = self.position_tokens == "patches"
        if only_patches:
            features_BND = self.positions(features_BND)
        for token in (self.registers, self.distillation_token, self.class_token):
            if token is not None:
                features_BND = token(features_BND)
        # Prepending tokens makes the features contiguous. Without tokens it is done here: sums keep the strides of
        # their terms, so every block would copy otherwise.
        features_BND = features_BND.contiguous()
        return features_BND if only_patches else self.positions(features_BND)

    def _pool(self, features_BND: Tensor) -> Tensor:
        if self.classifier == "token":
            # The norm acts on each token separately, so it suffices to normalise what is read.
            return self.norm(features_BND[:, 0] if self.distillation_token is None else features_BND[:, :2])
        features_BND = features_BND[:, self.extra_tokens : self.tokens]
        before = self.classifier_norm == "before_pool"
        if before:
            features_BND = self.norm(features_BND)
        pooled_BD = features_BND.mean(dim=1) if self.pooling is None else self.pooling(features_BND)
        return pooled_BD if before else self.norm(pooled_BD)


def default_classifier_norm(classifier: str) -> str:
    return "before_pool" if classifier == "map" else "after_pool"
