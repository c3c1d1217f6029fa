"""Configured values arrive in the loaders: how images are decoded, their sizes, their order, their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.build import data as build_data
from pycls_fast.config import load_config
from pycls_fast.data.decoders import DECODERS, Upright, open_scaled_region
from pycls_fast.data.sampling import block_order, class_order, order_of
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.base import Images
from pycls_fast.speed import Speed
from tests.unit.test_build import CPU, FAST, SYNTHETIC, record, vit, world

SOURCE = SyntheticImages(24, 16, 3, 0)


def decoders(monkeypatch: pytest.MonkeyPatch, switches: Speed, *overrides: str) -> tuple[Any, Any]:
    """Those of the training images and of the validation images."""
    # What this machine has is not the point.
    monkeypatch.setattr(build_data.native, "library", lambda: None)
    monkeypatch.setattr(build_data, "find_spec", lambda name: name)
    datasets = record(monkeypatch, "ImageDataset")
    record(monkeypatch, "make_loader")
    config = vit(*SYNTHETIC, *overrides)
    build.train_loader(config, SOURCE, world(), switches, start_step=0, steps=1)
    build.eval_loader(config, SOURCE, world(), switches)
    training, evaluation = (call["open_picture"] for call in datasets)
    return training, evaluation


@pytest.mark.parametrize("name", DECODERS)
def test_the_decoder_of_both_splits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    switches = FAST.replace(decode=name, decode_scale="full")
    assert decoders(monkeypatch, switches) == (DECODERS[name], DECODERS[name])
    turned = Upright(DECODERS[name])
    assert decoders(monkeypatch, switches, "data.exif_orientation=true") == (turned, turned)


def test_training_images_may_be_decoded_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are of images in full size."""
    switches = FAST.replace(decode="region", decode_scale="dct")
    assert decoders(monkeypatch, switches) == (open_scaled_region, DECODERS["region"])


@pytest.mark.parametrize(
    ("schedule", "sides"),
    [("[[0,8],[2,12]]", [8] * 6 + [12] * 3), ("[[1,8]]", [16] * 3 + [8] * 6), ("[]", [16] * 9)],
)
def test_the_size_of_training_images_by_epoch(schedule: str, sides: list[int]) -> None:
    """Three steps are an epoch."""
    config = load_config("resnet_digits", [*SYNTHETIC, "data.image_size=16", f"data.image_size_schedule={schedule}"])
    switches = build.switches(config, CPU)
    loader = build.train_loader(config, SOURCE, world(), switches, start_step=0, steps=9)
    assert [tuple(batch.images_BHWC.shape[1:3]) for batch in loader] == [(side, side) for side in sides]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_for_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    loaders = record(monkeypatch, "make_loader")
    config, there = vit(*SYNTHETIC), world(device=torch.device(device))
    build.train_loader(config, SOURCE, there, FAST, start_step=0, steps=1)
    build.eval_loader(config, SOURCE, there, FAST)
    assert [call["pin_memory"] for call in loaders] == [device == "cuda"] * 2


class Labelled(Images):
    """Four images of two classes."""

    classes = ("a", "b")
    labels = np.array([0, 1, 1, 1])
    block_ends = np.array([1, 4])


def ordered(*overrides: str) -> Any:
    config = vit("data.global_batch_size=12", *overrides)
    return order_of(Labelled(), config.data, config.augment.repeats)


@pytest.mark.parametrize(("sampling", "power"), [("balanced", 0.0), ("square_root", 0.5)])
def test_the_order_that_samples_classes(sampling: str, power: float) -> None:
    order = ordered(f"data.sampling={sampling}", "augment.repeats=3")
    named = dict(order.keywords)
    assert order.func is class_order
    assert named.pop("labels").tolist() == Labelled.labels.tolist()
    assert named == {"power": power, "repeats": 3}


@pytest.mark.parametrize(("repeats", "batch"), [(1, 12), (3, 4), (5, 12)])
def test_the_order_by_blocks(repeats: int, batch: int) -> None:
    """A batch takes as many images of it as it has different ones."""
    order = ordered("data.shuffle=blocks", f"augment.repeats={repeats}", "data.shuffle_buffer=8")
    named = dict(order.keywords)
    assert order.func is block_order
    assert named.pop("block_ends").tolist() == Labelled.block_ends.tolist()
    assert named == {"buffer": 8, "global_batch_size": batch}
