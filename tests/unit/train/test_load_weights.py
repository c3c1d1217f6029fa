"""Loading other projects' weights for training and for scoring, and the preprocessing that they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import Tensor, nn

import pycls_fast
from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.models.choices import Model
from pycls_fast.models.export_formats import About, timm_form, to_timm
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.pretrained import to_timm_vit
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network
from pycls_fast.parallel.world import ALONE
from pycls_fast.speed import Speed
from pycls_fast.train.assemble import InitialWeights
from pycls_fast.train.display import Display
from pycls_fast.train.load_weights import is_same_model, load_weights
from pycls_fast.train.resolving import pixel_statistics, resolve_normalization
from pycls_fast.train.saved_weights import Weights, about_weights, find_weights, open_weights, preprocessing
from tests.factories import config_of, randomise, small_vit


def vit(classes: int) -> VisionTransformer:
    model = small_vit(image_size=16, depth=1, num_classes=classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def test_a_fresh_head_is_for_training_only(tmp_path: Path) -> None:
    theirs = vit(3)
    torch.save({"model": to_timm_vit(theirs.state_dict(), norm="norm")[0]}, tmp_path / "timm.pth")
    network = vit(2)
    before = network.head.weight.clone()
    weights, _ = load_weights(network, tmp_path / "timm.pth", classes=("a", "b"))
    assert (weights.kind, weights.step) == ("model", None)
    assert torch.equal(network.head.weight, before)
    assert torch.equal(network.positions.value, theirs.positions.value)
    with pytest.raises(UserError, match=r"leaves 2 tensors of the model without values \(head.weight: 2 classes, 3"):
        load_weights(vit(2), tmp_path / "timm.pth", classes=("a", "b"), for_training=False)
    same = vit(3)
    load_weights(same, tmp_path / "timm.pth", classes=("a", "b", "c"), for_training=False)
    assert torch.equal(same.head.weight, theirs.head.weight)


def test_other_class_names_get_a_fresh_head(tmp_path: Path) -> None:
    theirs = vit(2)
    file = tmp_path / "ours.safetensors"
    save_file(theirs.state_dict(), file, {"classes": '["cat", "dog"]', "step": "9"})
    network = vit(2)
    weights, _ = load_weights(network, file, classes=("cat", "dog"))
    assert (weights.step, weights.path) == (9, file)
    assert torch.equal(network.head.weight, theirs.head.weight)
    network = vit(2)
    before = network.head.weight.clone()
    _, fitted = load_weights(network, file, classes=("cat", "fox"))
    assert fitted.fresh.keys() == {"head.weight", "head.bias"}
    assert torch.equal(network.head.weight, before)
    with pytest.raises(UserError, match=r"on different classes than data\.root has: output 1 was dog and is fox"):
        load_weights(vit(2), file, classes=("cat", "fox"), for_training=False)
    # A folder of timm's form that was exported from a run.
    save_file(timm.create_model("test_resnet", num_classes=2).state_dict(), file, {"classes": '["cat", "dog"]'})
    _, fitted = load_weights(TimmNetwork(name="test_resnet", num_classes=2), file, classes=("cat", "fox"))
    assert fitted.fresh == dict.fromkeys(
        ("network.fc.weight", "network.fc.bias"), "2 classes, 2 different ones in the file"
    )


@pytest.mark.parametrize(
    ("theirs", "network", "line"),
    [
        ("test_convnext", lambda: vit(2),
         r"^weights: .*/timm/model\.safetensors belongs to timm's test_convnext; use model=timm model\.name=test_con"),
        ("test_vit", lambda: vit(2), r"\nweights: use model=timm model\.name=test_vit, or choose .* in weights_allow$"),
        ("test_convnext", lambda: TimmNetwork(name="test_resnet", num_classes=2, image_size=64),
         r"\nweights: use model=timm model\.name=test_convnext, or choose the model"),
        # It is that model, only with other options.
        ("test_resnet", lambda: TimmNetwork(name="test_resnet.r160_in1k", num_classes=2, image_size=64,
                                          options={"layers": [1, 1, 1, 2]}),
         r"\nweights: choose the model that they belong to, or"),
    ],
)  # fmt: skip
def test_weights_of_another_model_of_timm(
    tmp_path: Path, theirs: str, network: Callable[[], Network], line: str
) -> None:
    """Skipping tensors would mean training from scratch."""
    folder = tmp_path / "timm"
    folder.mkdir()
    save_file(timm.create_model(theirs).state_dict(), folder / "model.safetensors")
    about = {"architecture": theirs, "pretrained_cfg": {"tag": "r160_in1k"}}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=line):
        load_weights(network(), folder, classes=AB)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"choose the model|of an unknown kind"):
        load_weights(network(), folder, classes=AB)


def test_the_names_of_timm_need_no_other_word(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(timm.create_model("test_efficientnet").state_dict(), file)
    network = TimmNetwork(name="test_efficientnet", num_classes=2, image_size=64)
    _, fitted = load_weights(network, file, classes=AB)
    assert fitted.table()[0] == ("file", str(file))


@pytest.mark.parametrize("size", [(96, 64), (96, 96), (64, 32)])
def test_positions_of_timms_model_that_is_for_other_rectangles(tmp_path: Path, size: tuple[int, int]) -> None:
    """Also where both have as many patches."""
    config = config_of("model=vit_tiny_patch16_224", "model.options.depth=1", "data.image_size=[64,96]")
    name, options = "vit_tiny_patch16_224", {"depth": 1}
    theirs = TimmNetwork(name=name, num_classes=2, image_size=(64, 96), options=options)
    torch.nn.init.normal_(theirs.network.pos_embed)
    about = {"classes": '["a", "b"]', "step": "9", "config": config.model_dump_json()}
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors", about)
    ours = TimmNetwork(name=name, num_classes=2, image_size=size, options=options)
    _, fitted = load_weights(ours, tmp_path / "theirs.safetensors", classes=AB)
    grid = [side // 16 for side in size]
    assert fitted.adapted == {"network.pos_embed": f"interpolated from 4 x 6 to {grid[0]} x {grid[1]}"}
    expected = resample_abs_pos_embed(theirs.network.pos_embed, grid, [4, 6])
    assert torch.equal(ours.network.pos_embed, expected)
    assert torch.equal(ours.network.head.weight, theirs.network.head.weight)


AB, AC, ABC = ("a", "b"), ("a", "c"), ("a", "b", "c")
VIT = {"stem": "conv", "stem_widths": (4, 4), "stem_strides": (2, 4), "class_token": True, "classifier": "pooled"}
SIZES = {"patch_size": 8, "width": 12, "depth": 1, "heads": 3, "mlp_width": 20}
TIMM = {"name": "test_resnet", "options": {"act_layer": "relu"}}
# What the weights are of, and what the model has instead.
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "shortcut": ("resnet", {"depth": 18, "shortcut": "pool"}, {"shortcut": "conv"}),
    "heads": ("vit", {**SIZES, **VIT}, {"heads": 2}),
    "norm_eps": ("vit", {**SIZES, **VIT}, {"norm_eps": 1e-2}),
    "stem_strides": ("vit", {**SIZES, **VIT}, {"stem_strides": (4, 2)}),
    "experts_per_token": ("vit", {**SIZES, "depth": 2, "experts": 3}, {"experts_per_token": 1}),
    "name": ("timm", TIMM, {"name": "resnet10t"}),
    "options": ("timm", TIMM, {"name": "test_resnet.r160_in1k", "options": {}}),
    "classifier": ("vit", {**SIZES, **VIT}, {"classifier": "token"}),
    "classifier_norm": ("vit", {**SIZES, **VIT}, {"classifier_norm": "before_pool"}),
}


def of_kind(kind: str, settings: dict[str, Any], classes: int) -> tuple[Network, RunConfig]:
    """The network of a configuration, and that configuration."""
    model: dict[str, Any] = {"kind": kind, **settings}
    config = config_of("data.image_size=16" if kind == "vit" else "data.image_size=64")
    parsed = TypeAdapter(RunConfig.model_fields["model"].rebuild_annotation()).validate_python(model)
    config = config.model_copy(update={"model": parsed})
    return build.model(config, classes, build.switches(config, torch.device("cpu"))), config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "classes"),
    [*((key, AB) for key in OTHERS), *((key, other) for key in ("heads", "classifier_norm") for other in (AC, ABC))],
)
def test_settings_that_no_tensor_shows(tmp_path: Path, key: str, classes: tuple[str, ...]) -> None:
    """The names and shapes are the same. A fresh head may stand on something else, but not the trunk."""
    kind, theirs, changed = OTHERS[key]
    saved, config = of_kind(kind, theirs, 2)
    file = tmp_path / "theirs.safetensors"
    about = {"classes": '["a", "b"]', "step": "9", "config": config.model_dump_json()}
    save_file({name: value + 1 for name, value in saved.state_dict().items()}, file, about)
    network, same = of_kind(kind, theirs, len(classes))
    load_weights(network, file, classes=classes, model=same.model.model_dump(mode="json"))
    network, other = of_kind(kind, {**theirs, **changed}, len(classes))
    section = other.model.model_dump(mode="json")
    if classes != AB and key.startswith("classifier"):
        _, fitted = load_weights(network, file, classes=classes, model=section)
        assert fitted.fresh.keys() == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
        assert torch.equal(network.get_parameter("norm.weight"), torch.ones(12))
    else:
        with pytest.raises(UserError, match=r"^weights: .*theirs.* belongs to another model; model=.* builds it"):
            load_weights(network, file, classes=classes, model=section)


def test_a_model_of_ones_own_says_which_settings_no_tensor_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Model):
        function_keys = ("slope",)

    monkeypatch.setitem(Model._members, "own", Own)
    trained = {"kind": "own", "slope": 0.1, "dropout": 0.1}
    for slope, same in ((0.1, True), (0.2, False)):
        model = {"kind": "own", "slope": slope, "dropout": 0.0}
        assert is_same_model(model, trained, "run", fresh_head=False) is same


@pytest.mark.parametrize(("head", "deviation"), [("small", 0.01), ("zero", 0.0)])
def test_training_begins_as_configured(tmp_path: Path, head: str, deviation: float) -> None:
    saved, config = of_kind("timm", TIMM, 2)
    file = tmp_path / "theirs.safetensors"
    save_file(saved.state_dict(), file, {"classes": '["a", "b"]', "config": config.model_dump_json()})

    def initial(config: RunConfig) -> InitialWeights:
        given = config.model_copy(update={"weights": str(file), "head": head})
        resolved: Any = SimpleNamespace(config=given, sources={"train": SimpleNamespace(classes=ABC)})
        return InitialWeights(resolved, ALONE, Display(speaks=False, mode="plain"))

    network, same = of_kind("timm", TIMM, 3)
    weights = initial(same)
    weights.load(network)
    assert weights.new_head
    assert network.last_layer().weight.std().item() == pytest.approx(deviation, rel=0.1)
    network, other = of_kind("timm", {**TIMM, "options": {}}, 3)
    with pytest.raises(UserError, match=r"theirs\.safetensors belongs to another model"):
        initial(other).load(network)


@pytest.mark.parametrize("other", [{"width": 24, "heads": 2}, VIT], ids=["width", "stem"])
def test_weights_of_another_size_belong_to_another_model(tmp_path: Path, other: dict[str, Any]) -> None:
    saved, config = of_kind("vit", {**SIZES, "classifier": "pooled"}, 2)
    file = tmp_path / "theirs.safetensors"
    save_file(saved.state_dict(), file, {"classes": '["a", "b"]', "step": "9", "config": config.model_dump_json()})
    network, mine = of_kind("vit", {**SIZES, **other}, 2)
    with pytest.raises(UserError, match=r"theirs\.safetensors belongs to another model; model=of_weights "):
        load_weights(network, file, classes=AB, model=mine.model.model_dump(mode="json"))
    chosen = config_of(f"weights={file}", "model=of_weights").model
    assert chosen == config.model.model_copy(update={"num_classes": None})


class Toy(Network):
    """An architecture of a contributor's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.head(images_BCHW.flatten(1))


def test_a_new_architecture_loads_its_own_weights_and_has_no_form_of_timm(tmp_path: Path) -> None:
    theirs, ours = Toy(), Toy()
    config = {"model": {"kind": "toy"}, "data": {}, "speed": {}}
    save_file(theirs.state_dict(), tmp_path / "toy.safetensors", {"config": json.dumps(config)})
    load_weights(ours, tmp_path / "toy.safetensors", classes=("cat", "dog"))
    assert torch.equal(ours.head.weight, theirs.head.weight)
    with pytest.raises(UserError, match="format: timm has no Toy; export as safetensors, onnx or program"):
        timm_form(ours)


def test_a_repository_of_the_hugging_face_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set[tuple[str, ...]]()

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.add((name, str(revision), *allow_patterns))
        if name != "me/cats":
            raise OSError("no such repository")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    theirs = vit(3)
    with pytest.raises(UserError, match=r"hf:me/cats has no model\.safetensors; download another of its files"):
        find_weights("hf:me/cats")
    file = tmp_path / "model.safetensors"
    save_file(to_timm_vit(theirs.state_dict(), norm="norm")[0], file)
    kept = {"architecture": "vit", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (file.parent / "config.json").write_text(json.dumps(kept))
    ours = vit(3)
    weights, fitted = load_weights(ours, "hf:me/cats", classes=("a", "b", "c"))
    # The place of the copy says less than the name.
    assert (weights.path, fitted.source) == (file, "hf:me/cats")
    assert torch.equal(ours.head.weight, theirs.head.weight)
    assert pixel_statistics("hf:me/cats") == ((0.5,) * 3, (0.5,) * 3)
    assert asked == {("me/cats", "None", "model.safetensors", "config.json")}
    with pytest.raises(UserError, match=r"hf:me/nothing could not be downloaded \(no such repository\)"):
        find_weights("hf:me/nothing")
    with pytest.raises(UserError, match="does not say which model and classes"):
        pycls_fast.load("hf:me/cats")


def test_a_config_json_chooses_the_model_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: str(tmp_path))
    options = {"patch_size": 4, "depth": 1, "global_pool": "avg", "class_token": False}
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2, **options).eval()
    theirs.pretrained_cfg |= {"tag": "mine", "crop_pct": 1.0}
    nn.init.normal_(theirs.head.weight)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    batch_BCHW = (torch.from_numpy(image).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
    named = {"hf:me/cats": ["cat", "dog"], str(tmp_path): {1: "dog", 0: "cat"}, f"{tmp_path}/": ["cat", "dog"]}
    for source, names in named.items():
        save_for_hf(theirs, tmp_path, model_config={"label_names": names}, safe_serialization=True)
        if source.endswith("/"):
            # As of 2022, in one object.
            kept = json.loads((tmp_path / "config.json").read_text())
            flat = {"labels": kept.pop("label_names"), **kept.pop("pretrained_cfg"), **kept}
            (tmp_path / "config.json").write_text(json.dumps(flat))
        config = load_config("finetune", [f"weights={source}", "data.image_size=16"], needs_data=False)
        assert config.model.own().items() >= {"name": "vit_tiny_patch16_224"}.items()
        assert config.model.own()["options"].items() >= options.items()
        with torch.no_grad():
            assert torch.allclose(pycls_fast.load(source).logits([image]), theirs(batch_BCHW), atol=1e-5)
        # By which test finds the images' classes, in any order.
        assert open_weights(source).classes == ("cat", "dog")
        fitted = [
            load_weights(build.model(config, 2, Speed()), source, classes=classes)[1]
            for classes in (("cat", "dog"), ("dog", "cat"))
        ]
        assert [list(each.fresh) for each in fitted] == [[], ["network.head.weight", "network.head.bias"]]


@pytest.mark.parametrize(
    "model",
    [
        ("model=resnet18", "model.stem=deep", "model.shortcut=pool"),
        ("model=vit_s16", "model.patch_size=8", "model.width=24", "model.depth=1", "model.heads=3"),
        ("model=vit_s16_gap", "model.pre_logits=null", "model.patch_size=8", "model.width=24", "model.depth=1"),
    ],
)
def test_a_folder_for_timm_is_read_again(model: tuple[str, ...], tmp_path: Path) -> None:
    """With the arguments that timm's model needs, of which one of a ResNet is a list."""
    config = config_of(*model, "data.image_size=32", "augment.eval_crop_ratio=1.0")
    network = randomise(build.model(config, 2, Speed())).float().eval()
    values = config.model_dump(mode="json")
    weights = Weights(tmp_path, classes=AB, config=values)
    to_timm(network, tmp_path / "made", About(AB, preprocessing(values), about_weights(weights)))
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    classifier = pycls_fast.load(tmp_path / "made")
    batch = next(classifier.batches(classifier.given([image])))
    with torch.no_grad():
        torch.testing.assert_close(classifier.logits([image]), network(classifier.inputs(batch)), atol=1e-4, rtol=1e-4)
    # As that model, with fixed positions, which timm takes for learned ones, and not with others.
    again = build.model(config, 2, Speed())
    assert not load_weights(again, tmp_path / "made", classes=AB)[1].fresh
    torch.testing.assert_close(again.state_dict(), network.state_dict(), check_dtype=False)


def test_a_run_counts_more_than_the_name_of_its_file(tmp_path: Path) -> None:
    saved, config = of_kind("vit", {**SIZES, "heads": 2, "classifier": "pooled"}, 2)
    file = tmp_path / "vit_small_patch16_224.augreg_in1k.safetensors"
    save_file(saved.state_dict(), file, {"classes": '["a", "b"]', "config": config.model_dump_json()})
    network, _ = of_kind("vit", {**SIZES, "heads": 2, "classifier": "pooled"}, 3)
    assert load_weights(network, file, classes=ABC)[1].fresh.keys() == {"head.weight", "head.bias"}
    assert open_weights(file).description() is None


def test_a_file_in_place_of_timms_weights_is_known_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are those of efficientnet_lite0, but for their padding and epsilon."""
    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("tf_efficientnet_lite0").state_dict(), "tf_efficientnet_lite0.safetensors")
    ours = TimmNetwork(name="efficientnet_lite0", num_classes=2, image_size=32)
    with pytest.raises(UserError, match=r"computes conv_stem otherwise than .*model\.name=tf_efficientnet_lite0"):
        load_weights(ours, "timm:tf_efficientnet_lite0", classes=("cat", "dog"))
    assert pixel_statistics("timm:tf_efficientnet_lite0") == HALF


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_hubs_say_it_without_a_download() -> None:
    assert pixel_statistics("timm:vit_base_patch16_224.augreg_in21k_ft_in1k") == HALF
    assert pixel_statistics("timm:deit_small_patch16_224.fb_in1k") == IMAGENET
    clip = pixel_statistics("timm:vit_base_patch16_clip_224.openai_ft_in1k")
    assert clip[0] == tuple(timm.get_pretrained_cfg("vit_base_patch16_clip_224.openai_ft_in1k").mean)
    assert clip not in (HALF, IMAGENET)
    assert pixel_statistics("torchvision:resnet50.IMAGENET1K_V2") == IMAGENET
    assert pixel_statistics("torchvision:resnet50") == IMAGENET
    # Squashed, not cut out, which matters for scoring alone.
    assert pixel_statistics("timm:vit_base_patch16_siglip_224.webli") == HALF
    for wrong in ("timm:no_such_model", "torchvision:resnet50.NO_SUCH_WEIGHTS"):
        with pytest.raises(UserError, match="has no weights"):
            pixel_statistics(wrong)


def test_files_say_it_where_they_can(tmp_path: Path) -> None:
    np.savez(tmp_path / "google.npz", a=np.zeros(1))
    assert pixel_statistics(tmp_path / "google.npz") == HALF
    config = config_of("data.mean=[0.1,0.2,0.3]", "data.std=[0.4,0.5,0.6]").model_dump(mode="json")
    save_file({"a": torch.ones(1)}, tmp_path / "ours.safetensors", metadata={"config": json.dumps(config)})
    assert pixel_statistics(tmp_path / "ours.safetensors") == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_file({"a": torch.ones(1)}, tmp_path / "mute.safetensors")
    assert pixel_statistics(tmp_path / "mute.safetensors") is None
    (tmp_path / "timm").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "timm/model.safetensors")
    kept = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "timm/config.json").write_text(json.dumps(kept))
    assert pixel_statistics(tmp_path / "timm/model.safetensors") == HALF
    # A link in another folder, of whatever name; one beside a config.json of its own.
    (tmp_path / "links").mkdir()
    for link in ("links/my.safetensors", "links/latest.v1", "timm/latest.v1"):
        (tmp_path / link).symlink_to(tmp_path / "timm/model.safetensors")
        assert pixel_statistics(tmp_path / link) == HALF, link
    own = {**kept, "pretrained_cfg": {"mean": [0.25] * 3, "std": [0.5] * 3}}
    (tmp_path / "links/config.json").write_text(json.dumps(own))
    assert pixel_statistics(tmp_path / "links/my.safetensors") == ((0.25,) * 3, (0.5,) * 3)
    # The same as links to files without a suffix, as in the Hugging Face cache.
    (tmp_path / "snapshot").mkdir()
    for number, name in enumerate(("model.safetensors", "config.json")):
        (tmp_path / f"timm/{name}").rename(tmp_path / f"blob{number}")
        (tmp_path / f"snapshot/{name}").symlink_to(tmp_path / f"blob{number}")
    assert pixel_statistics(tmp_path / "snapshot") == HALF
    assert pixel_statistics(tmp_path / "snapshot/model.safetensors") == HALF
    torch.save({"a": torch.ones(1)}, tmp_path / "mute.pth")
    assert pixel_statistics(tmp_path / "mute.pth") is None
    # The name with a tag; the model's own default weights have other statistics.
    model = "vit_base_patch16_224"
    for name, expected in ((f"{model}.mae", IMAGENET), (f"{model}.mine", HALF), (model, HALF)):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
        assert pixel_statistics(tmp_path / f"{name}.safetensors", model=model) == expected


@pytest.mark.parametrize("ask", [True, False])
def test_the_configuration_takes_it_where_it_asks(tmp_path: Path, ask: bool) -> None:
    np.savez(tmp_path / "google.npz", a=np.zeros(1))
    own = [] if ask else ["data.normalization=configured"]
    config = config_of("data.root=/nowhere", f"weights={tmp_path / 'google.npz'}", *own, name="finetune")
    said: list[str] = []
    found = resolve_normalization(config, ALONE, note=said.append)
    assert (found.data.mean, found.data.std) == (HALF if ask else IMAGENET)
    assert found.data.normalization == "configured"
    assert resolve_normalization(found, ALONE, note=said.append) == found
    told = f"normalization: mean 0.5 0.5 0.5, std 0.5 0.5 0.5, those of {tmp_path / 'google.npz'}"
    assert said == [told] * ask


def test_what_timm_knows_of_the_model_alone_is_not_said_to_be_of_the_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "mute.safetensors")
    given = ("data.root=/nowhere", f"weights={tmp_path / 'mute.safetensors'}", "model=vit_base_patch16_224")
    said: list[str] = []
    assert resolve_normalization(config_of(*given, name="finetune"), ALONE, note=said.append).data.mean == HALF[0]
    assert said == ["normalization: mean 0.5 0.5 0.5, std 0.5 0.5 0.5, those of timm's vit_base_patch16_224"]


def test_weights_that_do_not_say_it_are_reported(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "mute.safetensors")
    given = ["data.root=/nowhere", f"weights={tmp_path / 'mute.safetensors'}"]
    for own, reported in (
        ((), True),
        (("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"), False),
        (("data.normalization=configured",), False),
    ):
        said: list[str] = []
        resolve_normalization(config_of(*given, *own, name="finetune"), ALONE, note=said.append)
        assert [line.partition(" does not say how its images were normalised")[0] for line in said] == [
            f"data.normalization: {tmp_path / 'mute.safetensors'}"
        ] * reported
