"""A loaded run says of an image what its network says, written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import ExifTags, Image, ImageOps
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor

import pycls_fast
from pycls_fast.errors import UserError
from pycls_fast.inference import predict
from pycls_fast.inference.classifier import Guess
from pycls_fast.inference.export import export
from pycls_fast.inference.images import given_images
from pycls_fast.inference.maps import maps_of
from pycls_fast.train.contact_sheet import Cell
from tests.factories import config_of
from tests.unit.inference.conftest import CLASSES, SMALL, VIT, make_network, make_run, metadata


def by_hand(pixels: np.ndarray, *overrides: str, sign: int = 1, config_name: str = "vit_digits") -> Tensor:
    """float64 logits of bytes, without any of the package's preprocessing."""
    config = config_of(*(VIT if config_name == "vit_digits" else SMALL), *overrides, name=config_name)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (config.data.mean, config.data.std))
    network = make_network(config).double()
    if sign < 0:
        network.load_state_dict({name: -value for name, value in network.state_dict().items()})
    with torch.no_grad():
        return network(((torch.from_numpy(pixels).double() / 255 - mean) / std).permute(0, 3, 1, 2))


@pytest.mark.parametrize("config_name", ["vit_digits", "resnet_digits"])
def test_predictions(tmp_path: Path, pixels: np.ndarray, folder: Path, config_name: str) -> None:
    wanted = by_hand(pixels, config_name=config_name)
    classifier = pycls_fast.load(make_run(tmp_path / "run", config_name=config_name))
    torch.testing.assert_close(classifier.logits(folder).double(), wanted, rtol=1e-4, atol=1e-4)
    found = classifier.predict(folder, topk=3, batch_size=2)
    assert [Path(each.image).name for each in found] == [f"{i}.png" for i in range(5)]
    for each, scores in zip(found, wanted, strict=True):
        probabilities, labels = scores.softmax(dim=0).topk(3)
        assert [guess.label for guess in each.top] == labels.tolist()
        assert [guess.class_name for guess in each.top] == [CLASSES[label] for label in labels]
        assert [guess.probability for guess in each.top] == pytest.approx(probabilities.tolist(), rel=1e-3)
        assert Guess(each.label, each.class_name, each.probability) == each.top[0]
    assert len({each.label for each in found}) > 1


def test_each_rank_of_a_launch_has_its_own(monkeypatch: pytest.MonkeyPatch, run_dir: Path, pixels: np.ndarray) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    torch.testing.assert_close(pycls_fast.load(run_dir).logits(pixels).double(), by_hand(pixels), rtol=1e-4, atol=1e-4)


def test_convolutions_are_in_float32_whatever_the_process_has_set(run_dir: Path, pixels: np.ndarray) -> None:
    """cuDNN would compute them in TF32."""
    convolution: Any = torch.backends.cudnn.conv
    before = convolution.fp32_precision
    classifier, seen = pycls_fast.load(run_dir), []
    hook = classifier.network.register_forward_hook(lambda *_: seen.append(convolution.fp32_precision))
    try:
        for outside in ("tf32", "ieee"):
            convolution.fp32_precision = outside
            classifier.logits(pixels)
            assert (seen.pop(), convolution.fp32_precision) == ("ieee", outside)
            (batch,) = classifier.batches(given_images(pixels))
            for kind in ("attention", "rollout", "features"):
                maps_of(classifier, batch, kind)
            assert set(seen) == {"ieee"}
            seen.clear()
    finally:
        convolution.fp32_precision = before
        hook.remove()


def test_files_arrays_and_workers_agree(run_dir: Path, pixels: np.ndarray, folder: Path) -> None:
    classifier = pycls_fast.load(run_dir)
    one = classifier.logits(pixels)
    assert torch.equal(classifier.logits(folder, num_workers=2, batch_size=5), one)
    assert torch.equal(classifier.logits([Image.fromarray(image) for image in pixels]), one)
    torch.testing.assert_close(classifier.logits(torch.from_numpy(pixels), batch_size=2), one)


@pytest.mark.parametrize("decode", ["pillow", "simplejpeg", "region"])
def test_an_opened_image_is_seen_as_its_file(tmp_path: Path, decode: str) -> None:
    classifier = pycls_fast.load(make_run(tmp_path / "run", f"speed.decode={decode}"))
    drawn = Image.fromarray(np.random.default_rng(1).integers(0, 256, (97, 31, 3), dtype=np.uint8))
    for file in (tmp_path / "image.png", tmp_path / "image.jpg"):
        drawn.save(file)
        with Image.open(file) as opened:
            alone, beside = (next(classifier.batches(given_images(each))) for each in (opened, [file, opened]))
        assert torch.equal(beside.images_BHWC, alone.images_BHWC.expand(2, -1, -1, -1))


def test_features_are_what_the_head_sees(run_dir: Path, pixels: np.ndarray) -> None:
    classifier = pycls_fast.load(run_dir)
    features = classifier.features(pixels, batch_size=2)
    assert features.shape == (5, 24)
    head: Any = classifier.network.head
    torch.testing.assert_close(head(features), classifier.logits(pixels))


def test_the_eval_transform_of_the_run(tmp_path: Path) -> None:
    """12 x 16 pixels, of which crop_ratio 0.8 leaves the inner 8 x 8 of 10 x 13."""
    classifier = pycls_fast.load(make_run(tmp_path / "run", "augment.eval_crop_ratio=0.8"))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (12, 16, 3), dtype=np.uint8))
    # torchvision's Resize and CenterCrop
    cut = image.resize((13, 10), Image.Resampling.BILINEAR).crop((2, 1, 10, 9))
    wanted = by_hand(np.array(cut)[None])
    torch.testing.assert_close(classifier.logits(image).double(), wanted, rtol=1e-4, atol=1e-4)
    image.save(tmp_path / "image.png")
    assert torch.equal(classifier.logits(tmp_path / "image.png"), classifier.logits(image))
    assert classifier.preprocessing.startswith("covering 10 x 10 (bilinear), centre 8 x 8")


@pytest.mark.slow
@pytest.mark.parametrize("follows", [False, True])
def test_photographs_are_turned_as_in_training(
    tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """Files and Pillow's images, and on the sheet; arrays have no orientation."""
    drawn: list[Cell] = []
    monkeypatch.setattr(predict, "write_sheets", lambda cells, path: drawn.extend(cells) or [])
    weights = make_run(tmp_path / "run", f"data.exif_orientation={follows}".lower())
    classifier = pycls_fast.load(weights)
    assert classifier.preprocessing.startswith("EXIF orientation, covering" if follows else "covering")
    (tmp_path / "photos").mkdir()
    opened, seen = [], []
    for kind in ("jpg", "png"):
        for orientation in range(1, 9):
            file = tmp_path / "photos" / f"{orientation}.{kind}"
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = orientation
            Image.fromarray(pixels[orientation % 5]).save(file, exif=exif)
            image = Image.open(file)
            opened.append(image)
            seen.append(np.asarray((ImageOps.exif_transpose(image) if follows else image).convert("RGB")))
    files = [Path(image.filename) for image in opened]
    wanted = classifier.logits(np.stack(seen))
    assert torch.equal(classifier.logits(opened), wanted)
    assert torch.equal(classifier.logits([Image.open(file).convert("RGB") for file in files]), wanted)
    torch.testing.assert_close(classifier.logits(files), wanted, rtol=1e-4, atol=1e-4)
    assert predict.predict(str(weights), list(map(str, files)), format="sheet", output=str(tmp_path / "x.png")) == 0
    assert all(np.array_equal(cell.picture, image_HWC) for cell, image_HWC in zip(drawn, seen, strict=True))


def test_the_average_is_taken_unless_the_weights_are_asked_for(tmp_path: Path, pixels: np.ndarray) -> None:
    run = make_run(tmp_path / "run", "optim.ema_decay=0.9", ema=True)
    for which, sign in (("auto", -1), ("ema", -1), ("model", 1)):
        found = pycls_fast.load(run, which=which).logits(pixels)
        torch.testing.assert_close(found.double(), by_hand(pixels, sign=sign), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("loss", "several"), [("bce", False), ("cross_entropy", True)])
def test_a_network_trained_class_by_class_has_sigmoids(
    tmp_path: Path, pixels: np.ndarray, loss: str, several: bool
) -> None:
    """So has one for images with several labels, in place of whose own loss an exported file has the default one."""
    classifier = pycls_fast.load(make_run(tmp_path / "run", f"loss={loss}"))
    classifier.several |= several
    (each, *_) = classifier.predict(pixels, topk=99)
    assert len(each.top) == 10
    wanted = by_hand(pixels)[0].sigmoid().sort(descending=True).values
    assert [guess.probability for guess in each.top] == pytest.approx(wanted.tolist(), rel=1e-3)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_an_image_and_its_mirror_image_are_averaged(tmp_path: Path, pixels: np.ndarray, loss: str) -> None:
    classifier = pycls_fast.load(make_run(tmp_path / "run", f"loss={loss}"))
    mirrored = np.ascontiguousarray(pixels[:, :, ::-1])
    both = [classifier.probabilities(classifier.logits(images).double()) for images in (pixels, mirrored)]
    found = classifier.predict(pixels, topk=99, tta="flip")
    for each, mean in zip(found, (both[0] + both[1]) / 2, strict=True):
        assert [guess.probability for guess in each.top] == pytest.approx(mean.sort(descending=True).values.tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("amp_bf16", 0.1), ("fp16", 0.02)])
def test_precision(run_dir: Path, pixels: np.ndarray, precision: str, tolerance: float) -> None:
    classifier = pycls_fast.load(run_dir, precision=precision)
    found, wanted = classifier.logits(pixels).double(), by_hand(pixels)
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-6 < error < tolerance


def test_an_image_that_cannot_be_read(run_dir: Path, folder: Path) -> None:
    (folder / "2.png").write_bytes(b"no image")
    classifier = pycls_fast.load(run_dir)
    with pytest.raises(UserError, match=r"2\.png: not an image of a known format"):
        classifier.predict(folder)
    skipped: list[str] = []
    done: list[int] = []
    found = classifier.predict(
        folder, batch_size=2, skip=lambda name, reason: skipped.append(Path(name).name), advance=done.append
    )
    assert [each.position for each in found] == [0, 1, 3, 4]
    assert skipped == ["2.png"]
    assert sum(done) == 5
    gone = Image.open(folder / "1.png")
    gone.fp.close()  # type: ignore[union-attr]
    with pytest.raises(UserError, match="image 0: "):
        classifier.predict(gone)


def test_loading_moves_no_generator(run_dir: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    network = pycls_fast.load(run_dir).network
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_mistakes(run_dir: Path, tmp_path: Path, pixels: np.ndarray) -> None:
    save_file({"stem.x": torch.zeros(2)}, tmp_path / "other.safetensors")
    for source, settings, line in (
        (tmp_path / "nowhere", {}, "is neither a weights file nor a run folder"),
        ("timm:vit_small_patch14_dinov2.lvd142m", {}, "does not say which model and classes it belongs to"),
        ("timm:test_vit", {"which": "ema"}, "which: must be one of auto, model for timm:test_vit; got ema"),
        (tmp_path / "other.safetensors", {}, "does not say which model and classes it belongs to"),
        (run_dir, {"which": "ema"}, "which: must be one of auto, model for .*; got ema"),
        (run_dir, {"device": "tpu"}, "device: must be one of auto, cpu, cuda; got tpu"),
        (run_dir, {"precision": "int8"}, "precision: must be one of fp32"),
    ):
        with pytest.raises(UserError, match=line):
            pycls_fast.load(source, **settings)  # type: ignore[arg-type]
    classifier = pycls_fast.load(run_dir)
    with pytest.raises(UserError, match=r"tta: must be one of none, flip; got mirror"):
        classifier.predict(pixels, tta="mirror")
    with pytest.raises(UserError, match=r"threshold: must be from 0 to 1; got 70"):
        classifier.predict(pixels, threshold=70)


@pytest.mark.parametrize("name", ["timm:test_vit.r160_in1k", "torchvision:resnet18.IMAGENET1K_V1"])
def test_published_weights_classify_as_their_library_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With its own head, names and preprocessing; so does what is exported."""
    monkeypatch.chdir(tmp_path)
    project, _, what = name.partition(":")
    torch.manual_seed(0)
    if project == "timm":
        model = timm.create_model(what).eval()
        transform = create_transform(**resolve_data_config(model=model, use_test_size=True))
    else:
        model = torchvision.models.resnet18().eval()
        transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    torch.save(model.state_dict(), f"{what}.pth")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (240, 300, 3), dtype=np.uint8))
    image.save("image.png")
    with torch.no_grad():
        wanted = model(transform(image)[None])
    export(name, "exported.safetensors")
    for source in (name, "exported.safetensors"):
        classifier = pycls_fast.load(source)
        torch.testing.assert_close(classifier.logits("image.png"), wanted, rtol=1e-4, atol=1e-4)
        assert (len(set(classifier.classes)), classifier.classes[2]) == (1000, "great white shark")


def test_weights_of_another_model_than_is_written_there(run_dir: Path, tmp_path: Path) -> None:
    export(str(run_dir), str(file := tmp_path / "net.safetensors"))
    about, tensors = metadata(file), load_file(file)
    del tensors["norm.bias"]
    save_file(tensors, file, about)
    with pytest.raises(UserError, match=r"1 tensors differ, the first is norm\.bias with shape None there and \(24,\)"):
        pycls_fast.load(file)
    config = json.loads(about["config"]) | {"seeed": 1}
    save_file(tensors, file, about | {"config": json.dumps(config)})
    with pytest.raises(UserError, match=r"seeed: unknown key; did you mean seed\? \(.*net\.safetensors\)"):
        pycls_fast.load(file)
