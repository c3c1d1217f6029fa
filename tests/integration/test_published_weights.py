"""`tools/test_net.py` on weights of other projects: their own preprocessing, and the published number beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config

from pycls_fast import build, published
from pycls_fast.config import load_config
from pycls_fast.data.decoders import PillowPicture
from pycls_fast.data.sources.eval_sets import imagenet_wnids
from pycls_fast.data.transforms import EvalTransform
from pycls_fast.errors import UserError
from pycls_fast.models import pretrained
from pycls_fast.train.tasks import score as scoring
from pycls_fast.train.tasks.score import score, score_neighbours
from tests.factories import photographs
from tests.integration.runs import scored

CLASSES = ("n01440764", "n01443537", "n01484850", "n01491361", "n01494475")
NAME = "deit_small_patch16_224.fb_in1k"
# DeiT's small model with two narrow blocks.
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": len(CLASSES)}
OURS = ("model.width=48", "model.depth=2", "model.heads=3", "model.mlp_width=192")
MACHINE = ("data.num_workers=0", "runtime.progress=plain", "runtime.device=cpu", "precision=fp32")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images", CLASSES, 20, sides=(90, 240))


def timm_folder(path: Path, **about: Any) -> torch.nn.Module:
    """Random weights as timm's hub keeps them."""
    torch.manual_seed(3)
    model = timm.create_model("vit_small_patch16_224", **SMALL, img_size=96).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    kept = {
        "tag": "fb_in1k",
        "input_size": [3, 96, 96],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.25, 0.3],
    }
    config = {"architecture": "deit_small_patch16_224", "num_classes": len(CLASSES), "model_args": SMALL}
    (path / "config.json").write_text(json.dumps(config | {"pretrained_cfg": kept | about}))
    return model


def timm_top1(model: torch.nn.Module, root: Path, about: dict[str, Any]) -> tuple[float, float]:
    """What timm's own transform and a plain loop score: top-1 in percent, and the loss."""
    transform = create_transform(**resolve_data_config({k: v for k, v in about.items() if k != "tag"}))
    pictures, labels_list = [], []
    for label, name in enumerate(CLASSES):
        for path in sorted((root / "val" / name).iterdir()):
            with Image.open(path) as image:
                pictures.append(transform(image.convert("RGB")))
            labels_list.append(label)
    batch, labels = torch.stack(pictures), torch.tensor(labels_list)
    with torch.no_grad():
        logits = model(batch)
    right = (logits.argmax(1) == labels).double().mean().item() * 100
    return right, torch.nn.functional.cross_entropy(logits, labels).item()


@pytest.mark.slow
def test_a_timm_folder_is_scored_as_timm_scores_it(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = timm_folder(tmp_path / "deit")
    about = json.loads((tmp_path / "deit" / "config.json").read_text())["pretrained_cfg"]
    settings = (f"data.root={images}", f"weights={tmp_path / 'deit'}", *OURS, *MACHINE)
    config = load_config("deit_s16", settings)
    told = scored(config)
    top1, loss = timm_top1(model, images, about)
    assert told["top1"] == pytest.approx(top1)
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert 0 < top1 < 100
    assert told["preprocessing"] == "covering 106 x 106 (bicubic), centre 96 x 96, mean 0.5 0.4 0.3, std 0.2 0.25 0.3"
    assert told["published"] == {
        "weights": f"timm:{NAME}", "top1": 79.856, "size": 224, "source": "timm, results/results-imagenet.csv",
    }  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    assert "published 79.86% on ImageNet-1k's validation images at 224 px" in printed
    assert f"ours {top1 - 79.856:+.2f}" in printed
    assert f"preprocessed as for timm:{NAME}" in printed
    # The configuration's own preprocessing is another one, and has no published number.
    other = load_config("deit_s16", [*settings, "data.image_size=96"])
    told = scored(other, preprocessing="config")
    assert told["preprocessing"].startswith("covering 110 x 110 (bicubic), centre 96 x 96, mean 0.485")
    assert "published" not in told
    assert told["loss"] != pytest.approx(loss, rel=1e-3)


@pytest.mark.slow
def test_a_published_file_is_compared_under_its_experiment(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not under another name or experiment, and not on another split."""
    model = timm.create_model("vit_small_patch16_224", global_pool="avg", **SMALL)
    for name in ("mae_finetuned_vit_base.pth", "other.pth"):
        torch.save({"model": model.state_dict()}, tmp_path / name)

    def published_number(experiment: str, name: str, split: str = "val") -> dict[str, Any] | None:
        given = (f"data.root={images}", f"weights={tmp_path / name}", "data.image_size=96", *OURS, *MACHINE)
        config = load_config(experiment, [*given, "model.class_token=true", "model.classifier=pooled"])
        found: dict[str, Any] | None = scored(config, split).get("published")
        return found

    assert published_number("mae_finetune_b16", "mae_finetuned_vit_base.pth") == {
        "weights": "mae_finetuned_vit_base.pth", "top1": 83.664, "size": 224, "source": "MAE, FINETUNE.md",
    }  # fmt: skip
    assert "published 83.66% on ImageNet-1k's" in " ".join(capsys.readouterr().out.split())
    assert published_number("mae_finetune_b16", "other.pth") is None
    assert published_number("deit_b16", "mae_finetuned_vit_base.pth") is None
    assert published_number("mae_finetune_b16", "mae_finetuned_vit_base.pth", split="train") is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "known"), [("test_vit.r160_in1k", True), ("mine", False)])
def test_a_file_without_timms_name_has_no_published_number(
    tmp_path: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    known: bool,
) -> None:
    monkeypatch.setitem(published.WEIGHTS, "timm:test_vit.r160_in1k", published.Score(50.0, 160, "timm"))
    file = tmp_path / f"{name}.safetensors"
    save_file(timm.create_model("test_vit", num_classes=len(CLASSES)).state_dict(), file)
    model = ("model=timm", "model.name=test_vit")
    told = scored(load_config("finetune", [f"data.root={images}", f"weights={file}", *model, *MACHINE]))
    assert ("published" in told) == known
    assert "preprocessed as for timm:test_vit.r160_in1k" in " ".join(capsys.readouterr().out.split())
    assert told["preprocessing"].endswith("centre 160 x 160, mean 0.5 0.5 0.5, std 0.5 0.5 0.5")


@pytest.mark.slow
def test_neighbours_by_the_weights_own_preprocessing(tmp_path: Path, images: Path) -> None:
    timm_folder(tmp_path / "deit")
    own_size = ["data.image_size=64", "data.exif_orientation=false"]
    given = [f"data.root={images}", f"weights={tmp_path / 'deit'}", *MACHINE, *own_size]
    told = {}
    typed = ["data.image_size", "augment.eval_crop_ratio"]
    for name, whose, keys in (("weights", "weights", []), ("typed", "weights", typed), ("config", "config", typed)):
        output, config = tmp_path / f"{name}.json", load_config("finetune", given)
        score_neighbours(config, k=3, temperature=0.1, split="val", output=str(output), preprocessing=whose, typed=keys)
        told[name] = json.loads(output.read_text())["preprocessing"]
    assert told["weights"] == "covering 106 x 106 (bicubic), centre 96 x 96, mean 0.5 0.4 0.3, std 0.2 0.25 0.3"
    assert told["typed"] == "covering 73 x 73 (bicubic), centre 64 x 64, mean 0.5 0.4 0.3, std 0.2 0.25 0.3"
    assert told["config"].startswith("covering 73 x 73 (bicubic), centre 64 x 64, mean 0.5 0.4 0.3")


@pytest.mark.slow
def test_a_further_set_goes_by_imagenets_ids_where_weights_name_none(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm_folder(tmp_path / "deit")
    monkeypatch.setattr(scoring, "imagenet_wnids", lambda: CLASSES)
    settings = (f"weights={tmp_path / 'deit'}", f"data.eval_root={images / 'val'}", *OURS, *MACHINE)
    sketch = scored(load_config("deit_s16", [*settings, "data.eval_set=sketch"]))
    val = scored(load_config("deit_s16", [*settings, f"data.root={images}"]))
    assert (sketch["top1"], sketch["loss"], sketch["count"]) == (val["top1"], pytest.approx(val["loss"]), 20)
    # That number is not the validation images'.
    assert "published" not in sketch
    config = load_config("deit_s16", [*settings, "data.eval_set=sketch", "model.num_classes=7"])
    with pytest.raises(UserError, match=r"does not name its classes, which data.eval_set needs"):
        score(config, "val", None)


def test_imagenets_ids() -> None:
    ids = imagenet_wnids()
    assert (len(ids), ids[0], ids[999]) == (1000, "n01440764", "n15075141")
    assert list(ids) == sorted(ids)


def test_a_preprocessing_that_is_not_here_is_told(tmp_path: Path) -> None:
    def described(name: str, **about: Any) -> Any:
        timm_folder(tmp_path / name, **about)
        return pretrained.description_of(tmp_path / name / "model.safetensors")

    with pytest.raises(UserError, match=r"asks for crop_mode=center with crop_pct=1.15, .*preprocessing=config"):
        described("larger", crop_pct=1.15)
    with pytest.raises(UserError, match=r"interpolation=lanczos, but only bilinear and bicubic are supported"):
        described("lanczos", interpolation="lanczos")
    assert described("without_channels", input_size=[100, 100]).image_size == (100, 100)
    odd = described("odd", input_size=[3, 100, 100])
    with pytest.raises(UserError, match=r"image_size: 100 is not divisible by .*\nweights: timm:deit"):
        build.with_preprocessing(load_config("deit_s16", needs_data=False), odd)


def test_weights_without_a_description(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"")
    assert pretrained.description_of(tmp_path / "weights.pth") is None
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert pretrained.description_of(tmp_path / "weights.pth") is None
    assert pretrained.description_of(tmp_path) is None
    for source, line in (
        ("timm:resnet50.a1_in1kk", r"has no weights resnet50.a1_in1kk; did you mean resnet50\.a1_in1k"),
        ("torchvision:resnet50.V9", "has no weights resnet50.V9"),
    ):
        with pytest.raises(UserError, match=line):
            pretrained.description_of(source)


@pytest.mark.parametrize(
    "source",
    [*(name for name in published.WEIGHTS if ":" in name), "timm:deit_tiny_patch16_224", "torchvision:resnet50"],
)
def test_published_weights_describe_themselves(source: str) -> None:
    """By name, at the size of the published number; resized and cropped to the very pixels of the library."""
    about = pretrained.description_of(source)
    assert about.weights.startswith(source)
    known = published.WEIGHTS[about.weights]
    assert about.image_size == (known.size, known.size)
    random = np.random.default_rng(1)
    photo = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((517, 389))
    if source.startswith("timm:"):
        kept = timm.models.get_pretrained_cfg(source.removeprefix("timm:"))
        options = resolve_data_config(pretrained_cfg=kept.to_dict(), use_test_size=True)
        theirs = create_transform(**options)
    else:
        model, tag = about.weights.removeprefix("torchvision:").split(".")
        theirs = torchvision.models.get_model_weights(model)[tag].transforms()
    expected = theirs(photo)
    config = build.with_preprocessing(load_config("resnet50", needs_data=False), about)
    ours = EvalTransform(config.augment, image_size=config.data.image_size)
    image_HWC = ours(PillowPicture(photo), 0).image_HWC
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    batch = (torch.from_numpy(image_HWC.copy()).permute(2, 0, 1) / 255 - mean) / std
    torch.testing.assert_close(batch, expected, rtol=0, atol=1e-5)
