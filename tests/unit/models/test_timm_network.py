"""timm's models under our contract: their blocks, their mistakes, what of our switches reaches them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import timm.optim
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.models.external import TimmNetwork
from pycls_fast.optim.groups import parameter_groups
from tests.factories import config_of

CPU = torch.device("cpu")


def make(name: str, **kwargs: Any) -> TimmNetwork:
    return TimmNetwork(**{"name": name, "num_classes": 5, "image_size": 64, **kwargs})


def configured(name: str, *overrides: str, experiment: str = "vit_ti16") -> RunConfig:
    own = ("data.root=/nowhere", "model=timm", "model.drop_path=0.0", f"model.name={name}")
    return config_of(*own, *overrides, name=experiment)


def built(config: RunConfig) -> Any:
    """Without values."""
    with torch.device("meta"):
        return build.model(config, 5, build.switches(config, CPU))


_SLOW_BLOCKS = [
    ("resnet18", 8, "layer1.0", "layer4.1"),
    ("regnety_002", 13, "s1.b1", "s4.b7"),
    ("efficientnet_b0", 16, "blocks.0.0", "blocks.6.0"),
    ("convnext_atto", 12, "stages.0.blocks.0", "stages.3.blocks.1"),
    ("swin_tiny_patch4_window7_224", 12, "layers.0.blocks.0", "layers.3.blocks.1"),
    ("vit_tiny_patch16_224", 12, "blocks.0", "blocks.11"),
    ("coat_lite_tiny", 0, "serial_blocks1.0", "serial_blocks4.1"),
]


@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        # Members of a block see all features before them: no block takes one tensor. Stems are no layers.
        ("densenet121", 0, "features.denseblock1.denselayer1", "features.denseblock4.denselayer16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW_BLOCKS),
    ],
)
def test_blocks_are_found_in_forward_order(name: str, count: int, first: str, last: str) -> None:
    with torch.device("meta"):
        model = make(name, image_size=224 if name.startswith(("swin", "coat")) else 64)
    units = model.units()
    assert len(units) == count
    layers = units or model.layers()
    assert [layers[0][0], layers[-1][0]] == [f"network.{first}", f"network.{last}"]
    assert all(model.get_submodule(key) is unit for key, unit in units)
    head = model.get_submodule(model.head_name)
    assert isinstance(head, nn.Linear)
    assert head.out_features == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("eva02_tiny_patch14_224", 12),
        ("beit_base_patch16_224", 12),
        ("vit_small_patch16_dinov3", 12),
        ("mvitv2_tiny", 4),
        # Its first blocks take the size of the maps, its last two only one tensor.
        ("xcit_nano_12_p16_224", 14),
    ],
)
def test_blocks_of_several_arguments_are_layers_with_the_rates_that_timm_gives_them(name: str, count: int) -> None:
    config = configured(name, "optim.layer_decay=0.75", "optim.layer_decay_groups=14", experiment="finetune")
    model = built(config)
    assert len(model.layers()) == count > len(model.units())
    name_of = {parameter: key.removeprefix("network.") for key, parameter in model.named_parameters()}
    ours, theirs = (
        {name_of[p]: group["lr_scale"] for group in groups for p in group["params"]}
        for groups in (
            parameter_groups(model, config.optim),
            timm.optim.param_groups_layer_decay(model.network, layer_decay=0.75),
        )
    )
    assert ours.keys() == theirs.keys()
    # timm gives the final norm the rate of the last block; BEiT and MAE, and so we, that of the head.
    differing = {key for key, scale in ours.items() if scale != pytest.approx(theirs[key])}
    assert {key.partition(".")[0] for key in differing} <= {"norm"}


@pytest.mark.parametrize(
    ("name", "kwargs", "line"),
    [
        ("resnet51x", {}, r"model.name: timm .* has no model resnet51x; did you mean "),
        ("resnet18.nowhere", {}, r"model.name: .* \(Invalid pretrained tag .*\); leave out the tag"),
        (
            "deit_tiny_distilled_patch16_224",
            {},
            r"has no single linear classifier .*, or name the last layer in your own: ",
        ),
        ("vgg11", {"drop_path": 0.1}, r"timm's vgg11 refuses .*'drop_path_rate'\); correct model\.drop_path$"),
        ("resnet18", {"options": {"depth": 3}}, r"'depth'\); correct model\.options\.depth or data\.image_size$"),
        ("resnet18", {"options": {"act_layer": "nope"}}, r"timm's resnet18 refuses .*KeyError: 'nope'"),
        ("vit_tiny_patch16_224", {"options": {"num_heads": 0}}, "refuses .*ZeroDivisionError"),
        ("vit_tiny_patch16_224", {"options": {"img_size": 32}}, r"does not take images of 64 pixels, and was made for"),
        ("vit_tiny_patch16_224", {"options": {"global_pool": ""}}, r"has shape \(17, 5\), not \(5,\)\); correct model"),
        ("convnext_atto", {"image_size": 16}, r"of 16 pixels, and was made for 224 .*; correct data\.image_size$"),
    ],
)
def test_mistakes(name: str, kwargs: dict[str, Any], line: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=line):
        make(name, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "line"),
    [
        ("resnet18", "sdpa", r"speed.attention: resnet18 \(timm\) has no attention"),
        ("vit_tiny_patch16_224", "sdpa_math", "choose between reference and sdpa"),
    ],
)
def test_attention_that_a_model_does_not_have(name: str, attention: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        built(configured(name, f"speed.attention={attention}"))


def test_arguments_of_any_kind() -> None:
    """timm alone knows which it takes."""
    given = "model.options={layers: [1,1,1,1], block_args: {attn_layer: %s}}"
    assert built(configured("resnet18", given % "se")).network.layer1[0].se is not None
    with pytest.raises(UserError, match=r"refuses .*Invalid attn module .*; correct model.options.layers or model.opt"):
        built(configured("resnet18", given % "xx"))


def test_sizes_that_change() -> None:
    """A model that has positions can be asked to fit them."""
    schedule = "data.image_size_schedule=[[0,160]]"
    for model in (["resnet18"], ["vit_tiny_patch16_224", "model.options={dynamic_img_size: true}"]):
        assert built(configured(*model, schedule)).image_size == (224, 224)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "attention"), [("amp_bf16", "reference"), ("fp32", "sdpa")])
def test_the_attention_in_force_is_what_the_blocks_have(precision: str, attention: str) -> None:
    """The preset's products for 16 bits on a CPU are ours alone."""
    config = configured("vit_tiny_patch16_224", f"precision={precision}")
    assert build.switches(config, CPU).attention == attention
    assert {block.attn.fused_attn for block in built(config).network.blocks} == {attention == "sdpa"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["convnext_atto", "convnext_atto_rms", "beit_base_patch16_224", "deit3_small_patch16_224", "swinv2_cr_tiny_ns_224",
     "poolformer_s12", "efficientnet_b0", "xcit_nano_12_p16_224"],
)  # fmt: skip
def test_what_is_decayed_is_what_timm_decays(name: str) -> None:
    """Layer scales, and biases that are not called so, are in no module of their own."""
    config = configured(name)
    model = built(config)
    network = model.network
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    exempt = network.no_weight_decay() if hasattr(network, "no_weight_decay") else ()
    theirs = param_groups_weight_decay(network, 0.1, no_weight_decay_list=exempt)
    ours, expected = (
        {name_of[p] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
        for groups in (parameter_groups(model, config.optim), theirs)
    )
    assert ours == expected
    assert ours
