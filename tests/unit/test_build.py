"""Configured values arrive in what is built from them."""

from __future__ import annotations

import multiprocessing
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from pycls_fast import build
from pycls_fast.choice import give
from pycls_fast.data.prepare import Mixer
from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.base import Images
from pycls_fast.data.to_rgb import Conversion
from pycls_fast.errors import UserError
from pycls_fast.losses import AsymmetricLoss, BinaryCrossEntropy, CrossEntropy, FusedLoss, LossFunction, Targets
from pycls_fast.models.external import named_tensors
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.speed import Speed
from pycls_fast.train.assemble import make_step
from tests.factories import assert_same_bits, config_of

CPU = torch.device("cpu")
REFERENCE = Speed()
SYNTHETIC = (
    "data=synthetic", "data.image_size=16", "data.num_workers=0", "data.synthetic_train_images=24",
    "data.synthetic_val_images=10", "data.synthetic_classes=3", "data.global_batch_size=8",
)  # fmt: skip


def world(rank: int = 0, size: int = 1, device: torch.device = CPU) -> World:
    return World(rank=rank, size=size, device=device)


class TestModel:
    def test_initial_weights_are_the_seeds(self) -> None:
        states = [build.model(config_of(f"seed={seed}"), 10, REFERENCE).state_dict() for seed in (1, 1, 2)]
        assert_same_bits(states[0], states[1])
        assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])

    def test_number_of_classes(self) -> None:
        source = SyntheticImages(4, 8, 6, 0)
        assert build.num_classes(config_of(), source) == 6
        assert build.num_classes(config_of("model.num_classes=9"), source) == 9
        with pytest.raises(UserError, match=r"^model\.num_classes: 5 outputs for 6 classes; use"):
            build.num_classes(config_of("model.num_classes=5"), source)
        source.classes = ("defect",)
        with pytest.raises(UserError, match=r"^data\.root: only one class \(defect\); .*, as folders or in a table"):
            build.num_classes(config_of(), source)
        source.label_sets = np.eye(1, dtype=bool)
        with pytest.raises(UserError, match=r"needed; of zeros and ones, .* data\.label_column=NAME makes two$"):
            build.num_classes(config_of(), source)


class TestData:
    def test_steps_of_an_epoch(self) -> None:
        config = config_of("data.global_batch_size=8")
        assert [build.steps_per_epoch(config, images) for images in (8, 15, 16)] == [1, 1, 2]
        with pytest.raises(UserError, match=r"^data.global_batch_size: 8 is larger than the training set of 7 images"):
            build.steps_per_epoch(config, 7)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("ranks", "overrides", "says"),
        [
            (8, ["augment.mixup_alpha=0.2"], r"^data.global_batch_size: mixing needs at least 2 .* each of 8 ranks"),
            (4, ["augment.cutmix_alpha=1", "optim.accumulation_steps=2"], r"^data.global_batch_size: .*, fewer parts"),
        ],
    )
    def test_mixing_of_what_a_rank_has(self, ranks: int, overrides: list[str], says: str) -> None:
        with pytest.raises(UserError, match=says):
            build.check_mixing(config_of(*SYNTHETIC, *overrides), world(size=ranks))
        build.check_mixing(config_of(*SYNTHETIC, *overrides, "augment.mix_probability=0"), world(size=ranks))
        build.check_mixing(config_of(*SYNTHETIC, *overrides, "data.global_batch_size=32"), world(size=ranks))

    @pytest.mark.parametrize(
        ("images", "keys", "workers"),
        [(200, (), 0), (200, ("data.num_workers=2",), 2), (300, (), build.cores())],
    )
    def test_a_cpu_reads_few_images_without_workers(self, images: int, keys: tuple[str, ...], workers: int) -> None:
        config = config_of(*SYNTHETIC[:2], "data.global_batch_size=8", *keys)
        batches = build.eval_batches(config, SyntheticImages(images, 8, 6, 0), ALONE, REFERENCE)
        with closing(batches):
            assert len(next(batches).labels_B) == 8
            assert len(multiprocessing.active_children()) == min(workers, 16)

    @pytest.mark.parametrize("training", [True, False])
    def test_a_loader(self, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        config = config_of(
            *SYNTHETIC, "seed=5", "data.num_workers=2", "data.prefetch_factor=7", "data.mean=[0.2,0.4,0.6]",
            "data.transparent=white", "parallel.timeout_seconds=9", "augment.repeats=3", "augment.erase_value=noise",
            "optim.accumulation_steps=2", "data.sampling=balanced",
        )  # fmt: skip
        rank = replace(world(1, 2), while_waiting=lambda: None)
        monkeypatch.setattr(build.data, "to_device", lambda loader, device, mode: loader)
        if training:
            loader = build.train_loader(config, SOURCE, rank, REFERENCE, start_step=1, steps=4)
        else:
            loader = build.eval_batches(config, SOURCE, rank, REFERENCE)
        assert (loader.num_workers, loader.prefetch_factor, loader.timeout_seconds) == (2, 7, 9)
        assert loader.while_waiting is rank.while_waiting
        dataset, sampler = loader.dataset, loader.batch_sampler
        assert (dataset.seed, dataset.training) == (5, training)
        assert dataset.open_picture.convert == Conversion(on_white=True)
        prepares = (dataset.host.prepare, build.prepare(config, CPU, REFERENCE))
        assert [each._erase_value for each in prepares] == ["noise"] * 2
        transform = dataset.transform[0] if training else dataset.transform
        assert transform._fill == (51, 102, 153)
        assert (sampler.rank, sampler.world_size) == (1, 2)
        if training:
            assert (sampler.start_step, sampler.total_steps, sampler.accumulation_steps) == (1, 4, 2)
            assert (sampler.seed, sampler.repeats) == (5, 3)
            # Without one all images would come equally often.
            assert sampler.order is not None

    def test_mixing(self) -> None:
        assert build.mixer(config_of()) is None
        assert build.mixer(config_of("augment.mixup_alpha=0.2", "augment.mix_probability=0")) is None
        config = config_of("augment.cutmix_alpha=0.7")
        assert build.mixer(config) == Mixer(config.augment)
        device = {"erase_on": "device", "mix_on": "device"}
        for switches, erases, mixer in (
            (REFERENCE, True, build.mixer(config)),
            (REFERENCE.replace(**device), False, None),
        ):
            host = build.prepare_on_host(config, switches)
            assert (host.erase, host.mixer) == (erases, mixer)

    def test_ranks_and_microbatches_share_the_batch(self) -> None:
        assert build.microbatch_size(config_of("optim.accumulation_steps=4"), world(0, 2)) == 8
        with pytest.raises(UserError) as caught:
            build.microbatch_size(config_of("optim.accumulation_steps=2"), world(0, 3))
        assert caught.value.lines == (
            "data.global_batch_size: 64 is not divisible by 3 ranks x optim.accumulation_steps=2; use 60 or 66, or, "
            "to keep the batch of a run that resumes, other ranks or accumulation steps",
        )


class TestOptimizing:
    @pytest.mark.parametrize(
        ("overrides", "loss"),
        [
            (["loss.label_smoothing=0.25"], CrossEntropy(0.25)),
            (["loss=bce", "loss.label_smoothing=0.25"], BinaryCrossEntropy(0.25, "mean")),
            (["loss=bce", "loss.label_smoothing=0", "loss.bce_reduction=sum"], BinaryCrossEntropy(0.0, "sum")),
            (
                ["loss=asymmetric", "loss.label_smoothing=0", "loss.gamma_negative=2", "loss.margin=0.1"],
                AsymmetricLoss(0.0, gamma_negative=2.0, margin=0.1),
            ),
        ],
    )
    def test_the_loss(self, overrides: list[str], loss: LossFunction) -> None:
        assert build.loss(config_of(*overrides), REFERENCE, CPU, 10) == loss
        fused = build.loss(config_of(*overrides), REFERENCE.replace(cross_entropy="fused"), CPU, 10)
        assert isinstance(fused, FusedLoss)
        assert fused.plain == loss

    @pytest.mark.parametrize(
        ("smoothing", "threshold", "classes", "every"),
        [(0.1, 0.0, 1000, "1"), (0.1, 0.005, 10, "1"), (0.9, 0.2, 1000, "0"), (0.1, 0.2, 1000, ""), (0.0, 0.0, 10, "")],
    )
    def test_a_threshold_that_tells_no_class_from_another(
        self, smoothing: float, threshold: float, classes: int, every: str
    ) -> None:
        config = config_of("loss=bce", f"loss.label_smoothing={smoothing}", f"loss.bce_threshold={threshold}")
        targets = Targets(torch.tensor([1, 2]))
        dense = BinaryCrossEntropy(smoothing).dense(targets, torch.zeros(2, classes)).gt(threshold).sum(dim=1)
        if every:
            assert dense.tolist() == [int(every) * classes] * 2
            line = rf"^loss\.bce_threshold: {threshold:g} with .* makes every class a {every}: .*label_smoothing=0,"
            with pytest.raises(UserError, match=line):
                build.loss(config, REFERENCE, CPU, classes)
        else:
            assert dense.tolist() == [1, 1]
            build.loss(config, REFERENCE, CPU, classes)

    @pytest.mark.parametrize(
        ("without", "device", "compiler"),
        [("compiler", "cpu", r"C\+\+ compiler"), ("header", "cuda", r"C compiler \(gcc or clang\)")],
    )
    def test_what_cannot_be_compiled(
        self, monkeypatch: pytest.MonkeyPatch, without: str, device: str, compiler: str
    ) -> None:
        """Not on CUDA either: Triton compiles what starts its kernels."""
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("shutil.which", lambda name: None if without == "compiler" else f"/{name}")
        if without == "header":
            monkeypatch.setattr("sysconfig.get_path", lambda name, scheme=None: "/there/is/none")
        there = torch.device(device)
        switches = REFERENCE.replace(compile="blocks")
        config = config_of("speed.compile=blocks")
        line = rf"needs a {compiler} and Python's headers on .* and did not find both; install g.* or use speed\."
        with pytest.raises(UserError, match=rf"^speed\.compile: blocks {line}compile=off$"):
            build.wrap(config, build.model(config, 10, switches), world(device=there), switches)
        with pytest.raises(UserError, match=rf"^speed\.cross_entropy: fused {line}cross_entropy=plain$"):
            build.loss(config_of(), REFERENCE.replace(cross_entropy="fused"), there, 10)

    def test_where_compilers_are_looked_for(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "Python.h").touch()
        monkeypatch.setattr("sysconfig.get_path", lambda name, scheme=None: str(tmp_path))

        def found(*there: str, **variables: str) -> list[str]:
            with monkeypatch.context() as patch:
                for name in ("CC", "CXX"):
                    patch.delenv(name, raising=False)
                for name, value in variables.items():
                    patch.setenv(name, value)
                patch.setattr("shutil.which", lambda name: name if name in there else None)
                return [kind for kind in ("cpu", "cuda") if build.device.has_compiler(kind)]

        assert found("gcc") == ["cuda"]
        assert found("c++", CXX="c++ -O2") == ["cpu"]
        assert found("gcc", CC="cc-13") == found("g++", CXX="") == found() == []

    @pytest.mark.parametrize("implementation", ["foreach", "fused"])
    def test_adamw(self, implementation: str) -> None:
        config = config_of("optim.lr=0.5", "optim.betas=[0.7,0.8]", "optim.eps=1e-5", "optim.weight_decay=0.4")
        model = build.model(config, 10, REFERENCE)
        made = build.optimizer(config, model, REFERENCE.replace(optimizer=implementation))
        assert isinstance(made, torch.optim.AdamW)
        for group in made.param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.7, 0.8), 1e-5)
            assert (group["foreach"], group["fused"]) == (implementation == "foreach", implementation == "fused")
        assert [group["weight_decay"] for group in made.param_groups] == [0.4, 0.0]
        held = sum(p.numel() for group in made.param_groups for p in group["params"])
        assert held == sum(p.numel() for p in model.parameters())

    @pytest.mark.parametrize("owned", [(0, 1), (1, 0), (0, 0)])
    def test_a_rank_that_owns_nothing_of_a_group(self, monkeypatch: pytest.MonkeyPatch, owned: tuple[int, int]) -> None:
        """FairScale's OSS gives such groups to what makes a rank's optimizer."""
        monkeypatch.setattr(build.device, "has_compiler", lambda kind: True)
        config = config_of("optim=adamw")
        network = build.model(config, 10, REFERENCE)
        groups = [{"params": list(network.parameters())[:count], "weight_decay": 0.1} for count in owned]
        switches = REFERENCE.replace(optimizer="foreach", optimizer_compile="on")
        made = build.optimizer(config, network, switches, groups=groups)
        assert [len(group["params"]) for group in made.param_groups] == list(owned)

    def test_the_learning_rate_follows_the_batch(self) -> None:
        scaled = config_of("optim.lr=0.3", "optim.lr_batch_size=256", "data.global_batch_size=64")
        assert build.schedule(scaled, 7).lr == pytest.approx(0.3 * 64 / 256)
        groups = build.optimizer(scaled, build.model(scaled, 10, REFERENCE), REFERENCE).param_groups
        assert groups[0]["lr"] == build.schedule(scaled, 7).lr
        assert build.schedule(config_of("optim.lr=0.3"), 7).lr == 0.3

    def test_the_schedule(self) -> None:
        made = build.schedule(config_of("schedule.epochs=20", "schedule.warmup_epochs=2.5", "schedule.max_steps=3"), 10)
        # max_steps stops early and leaves the curve as it is.
        assert (made.curve_steps, made.warmup_steps) == (200, 25)

    def test_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the second of two ranks has it, without their exchange. What it computes: tests/numerics."""
        alone = build.wrap
        monkeypatch.setattr(build, "wrap", lambda config, network, _, *rest: alone(config, network, world(), *rest))
        config = config_of("seed=9", "optim.ema_decay=0.75", "optim.ema_warmup=false", "augment.mixup_alpha=0.2")
        config = config.with_values(optim={"ema_every_steps": 3})
        for how in ("loop", "foreach"):
            switches = REFERENCE.replace(clip=how, ema=how)
            step = make_step(config, build.model(config, 10, switches), world(1, 2), switches, steps_per_epoch=7)
            assert (step.seed, step.rank, step.clip_foreach) == (9, 1, how == "foreach")
            assert (step.ema.decay, step.ema.warmup, step.ema.every, step.ema.implementation) == (0.75, False, 3, how)
            assert step.mixer == build.mixer(config)
            counted = {id(tensor) for tensor in step.persistent_tensors()}
            assert {id(average) for average in step.ema.values.values()} <= counted

    def test_a_step_knows_its_number_of_classes(self) -> None:
        """A threshold may make every class the right one."""
        config = config_of("loss=bce", "loss.label_smoothing=0.1", "loss.bce_threshold=0.0")
        network = build.model(config, 10, REFERENCE)
        with pytest.raises(UserError, match=r"^loss\.bce_threshold: .* makes every class a 1: with 10 classes"):
            make_step(config, network, world(), REFERENCE, steps_per_epoch=7)


SOURCE = SyntheticImages(24, 16, 3, 0)


@pytest.mark.parametrize(
    ("schedule", "sides"),
    [("[[0,8],[2,12]]", [8] * 6 + [12] * 3), ("[[1,8]]", [16] * 3 + [8] * 6), ("[]", [16] * 9)],
)
def test_the_size_of_training_images_by_epoch(schedule: str, sides: list[int]) -> None:
    """Three steps are an epoch."""
    config = config_of(*SYNTHETIC, "data.image_size=16", f"data.image_size_schedule={schedule}", name="resnet_digits")
    switches = build.switches(config, CPU)
    loader = build.train_loader(config, SOURCE, world(), switches, start_step=0, steps=9)
    assert [tuple(batch.images_BHWC.shape[1:3]) for batch in loader] == [(side, side) for side in sides]


class Seen(Source, name="seen"):
    """A source of a user's own file."""

    opened: ClassVar[list[tuple[str, Opening]]] = []

    def open(self, root: str, how: Opening) -> dict[str, Images]:
        self.opened.append((root, how))
        return {"all": SOURCE}


class TestSources:
    def opened(self, *overrides: str, **how: bool) -> tuple[str, Opening]:
        build.sources(config_of("data=seen", "seed=4", *overrides), ALONE, **how)
        return Seen.opened.pop()

    def test_a_dataset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert self.opened("data.root=s3://somebody/birds") == ("s3://somebody/birds", Opening(seed=4, processes=4))
        assert self.opened("data.root=/birds", index_all=True) == ("/birds", Opening(4, index_all=True, processes=4))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_given_module_begins_on_all_ranks_as_on_the_first(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose program made it with other values, as programs do that do not seed."""
    first, second = (nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.BatchNorm1d(10)) for _ in range(2))
    keys = ("model=given", f"model.module={give(second)}", "data.image_size=8", f"parallel={strategy}")
    sent = dict(named_tensors(first))
    monkeypatch.setattr(World, "from_main", lambda world, value: sent)
    network = build.trained_model(config_of(*keys), 10, Speed(), World(1, 2, CPU))
    if strategy == "fsdp":
        network.to_empty(device="cpu")
        network.initialise()
    assert_same_bits(network.get_submodule("network").state_dict(), first.state_dict())
