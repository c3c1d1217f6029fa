"""Configured values arrive in what is built from them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from pycls_fast import build, speed
from pycls_fast.build import data as build_data
from pycls_fast.config import RunConfig, load_config
from pycls_fast.data.mix import Mixer
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.errors import UserError
from pycls_fast.losses import BinaryCrossEntropy, CrossEntropy, FusedLoss, LossFunction, Targets
from pycls_fast.models import DropPath
from pycls_fast.models import resnet as resnet_module
from pycls_fast.models import vit as vit_module
from pycls_fast.optim.weights import ModelWeights
from pycls_fast.parallel import World
from pycls_fast.speed import Speed, resolve
from pycls_fast.train.assemble import make_step

CPU = torch.device("cpu")
REFERENCE = Speed()
FAST = resolve(Speed(preset="fast"), "cpu")
SYNTHETIC = (
    "data=synthetic",
    "data.image_size=16",
    "data.num_workers=0",
    "data.synthetic_train_images=24",
    "data.synthetic_val_images=10",
    "data.synthetic_classes=3",
    "data.global_batch_size=8",
)


def world(rank: int = 0, size: int = 1, device: torch.device = CPU) -> World:
    return World(rank=rank, size=size, device=device)


def vit(*overrides: str) -> RunConfig:
    return load_config("vit_digits", overrides)


def drop_rates(model: nn.Module) -> list[float]:
    return [module.rate for module in model.modules() if isinstance(module, DropPath)]


class Recorder:
    """Stands in for a constructor and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append({**{str(i): value for i, value in enumerate(arguments)}, **named})
        return object()


def record(monkeypatch: pytest.MonkeyPatch, name: str, where: ModuleType = build_data) -> list[dict[str, Any]]:
    recorder = Recorder()
    monkeypatch.setattr(where, name, recorder)
    return recorder.calls


class TestModel:
    def test_each_value_of_a_vit_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = record(monkeypatch, "VisionTransformer", vit_module)
        config = vit(
            "data.image_size=48", "model.patch_size=8", "model.width=24", "model.depth=3", "model.heads=3",
            "model.mlp_width=20", "model.stem=conv", "model.stem_widths=[4,8]", "model.stem_strides=[2,4]",
            "model.class_token=true", "model.registers=2", "model.classifier=pooled",
            "model.classifier_norm=before_pool", "model.pre_logits=12", "model.positions=sincos2d",
            "model.position_tokens=patches", "model.layer_scale=0.1", "model.qk_norm=true", "model.norm_eps=1e-4",
            "model.drop_path=0.3", "model.drop_path_rule=constant", "model.init=trunc_normal",
        )  # fmt: skip
        switches = {
            "attention": "sdpa_math", "layout": "batch_second", "qkv": "fused",
            "sequence_padding": "64", "linear": "products", "gelu": "polynomial",
            "patches": "product", "drop_path_compute": "skip",
        }  # fmt: skip
        build.model(config, 7, REFERENCE.replace(**switches))
        assert calls == [
            {
                "image_size": 48, "patch_size": 8, "width": 24, "depth": 3, "heads": 3, "mlp_width": 20,
                "num_classes": 7, "stem": "conv", "stem_widths": (4, 8), "stem_strides": (2, 4), "class_token": True,
                "registers": 2, "classifier": "pooled", "classifier_norm": "before_pool", "pre_logits": 12,
                "positions": "sincos2d", "position_tokens": "patches", "layer_scale": 0.1, "qk_norm": True,
                "norm_eps": 1e-4, "init": "trunc_normal", "drop_path": 0.3, "drop_path_rule": "constant",
                "attention": "sdpa_math",
                "layout": "batch_second", "qkv": "fused", "sequence_padding": 64, "linear": "products",
                "gelu": "polynomial", "patches": "product", "drop_path_compute": "skip",
            }
        ]  # fmt: skip

    def test_each_value_of_a_resnet_arrives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = record(monkeypatch, "ResNet", resnet_module)
        config = load_config(
            "resnet_digits",
            [
                "data.image_size=32", "model.depth=101", "model.stem=deep", "model.shortcut=pool", "model.groups=2",
                "model.width_per_group=8", "model.zero_init_last_gamma=false", "model.drop_path=0.2",
            ],
        )  # fmt: skip
        build.model(config, 7, REFERENCE.replace(convolution="products"))
        assert calls == [
            {
                "depth": 101, "num_classes": 7, "stem": "deep", "shortcut": "pool", "groups": 2, "width_per_group": 8,
                "zero_init_last_gamma": False, "drop_path": 0.2, "convolution": "products",
            }
        ]  # fmt: skip

    def test_initial_weights_are_the_seeds(self) -> None:
        states = [build.model(vit(f"seed={seed}"), 10, REFERENCE).state_dict() for seed in (1, 1, 2)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])

    def test_number_of_classes(self) -> None:
        source = SyntheticImages(4, 8, 6, 0)
        assert build.num_classes(vit(), source) == 6
        assert build.num_classes(vit("model.num_classes=9"), source) == 9
        with pytest.raises(UserError, match=r"^model\.num_classes: 5 outputs for data with 6 classes; use"):
            build.num_classes(vit("model.num_classes=5"), source)


class TestData:
    def test_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transforms, samplers, datasets, loaders = (
            record(monkeypatch, name) for name in ("TrainTransform", "TrainSampler", "ImageDataset", "make_loader")
        )
        config = vit(
            *SYNTHETIC, "seed=11", "augment.crop=pad", "data.mean=[0.1,0.5,1.0]",
            "optim.accumulation_steps=2", "data.num_workers=3", "data.prefetch_factor=5",
        )  # fmt: skip
        build.train_loader(config, SyntheticImages(24, 16, 3, 0), world(1, 2), FAST, start_step=4, steps=9)
        assert transforms == [{"0": config.augment, "image_size": 16, "mean": (0.1, 0.5, 1.0)}]
        assert samplers == [
            {
                "0": 24, "seed": 11, "global_batch_size": 8, "rank": 1, "world_size": 2, "start_step": 4,
                "total_steps": 9, "accumulation_steps": 2, "order": None, "repeats": 1,
            }
        ]  # fmt: skip
        assert (datasets[0]["seed"], datasets[0]["training"]) == (11, True)
        assert {k: loaders[0][k] for k in ("num_workers", "pin_memory", "prefetch_factor")} == {
            "num_workers": 3, "pin_memory": False, "prefetch_factor": 5,
        }  # fmt: skip

    def test_evaluation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transforms, samplers, datasets = (
            record(monkeypatch, name) for name in ("EvalTransform", "EvalSampler", "ImageDataset")
        )
        record(monkeypatch, "make_loader")
        config = vit(
            *SYNTHETIC,
            "augment.eval_crop=border",
            "data.mean=[0.1,0.5,1.0]",
            "data.eval_batch_size=6",
        )
        build.eval_loader(config, SyntheticImages(10, 16, 3, 0), world(1, 4), FAST)
        assert transforms == [{"0": config.augment, "image_size": 16, "mean": (0.1, 0.5, 1.0)}]
        assert samplers == [{"0": 10, "batch_size": 6, "rank": 1, "world_size": 4}]
        assert datasets[0]["training"] is False
        # Without one of its own: as many as in a microbatch of training.
        config = vit(*SYNTHETIC, "data.eval_batch_size=null", "optim.accumulation_steps=2")
        build.eval_loader(config, SyntheticImages(10, 16, 3, 0), world(1, 2), FAST)
        assert samplers[1]["batch_size"] == 2

    def test_steps_of_an_epoch(self) -> None:
        assert [build.steps_per_epoch(vit("data.global_batch_size=8"), images) for images in (8, 15, 16)] == [1, 1, 2]
        with pytest.raises(UserError, match=r"^data.global_batch_size: 8 is larger than the training set of 7 images"):
            build.steps_per_epoch(vit("data.global_batch_size=8"), 7)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("ranks", "overrides", "says"),
        [
            (8, ["augment.mixup_alpha=0.2"], r"^augment.mixup_alpha: mixing needs at least 2 images .* each of 8 ra"),
            (4, ["augment.cutmix_alpha=1", "optim.accumulation_steps=2"], r"^augment.cutmix_alpha: .*=16, fewer parts"),
            (2, ["augment.mixup_alpha=0.2", "augment.mix_mode=pair", "data.global_batch_size=6"],
             r"^augment.mix_mode: pair needs an even number .*=6 leaves 3 to each of 2 ranks x optim.acc"),
        ],
    )  # fmt: skip
    def test_mixing_of_what_a_rank_has(self, ranks: int, overrides: list[str], says: str) -> None:
        with pytest.raises(UserError, match=says):
            build.check_mixing(vit(*SYNTHETIC, *overrides), world(size=ranks))
        build.check_mixing(vit(*SYNTHETIC, *overrides, "augment.mix_probability=0"), world(size=ranks))
        build.check_mixing(vit(*SYNTHETIC, *overrides, "data.global_batch_size=32"), world(size=ranks))

    def test_preparing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = record(monkeypatch, "Prepare")
        config = vit("data.mean=[0.1,0.2,0.3]", "data.std=[0.4,0.5,0.6]", "augment.erase_value=noise")
        build.prepare(config, CPU, build.switches(config, CPU))
        assert calls == [
            {
                "0": (0.1, 0.2, 0.3),
                "1": (0.4, 0.5, 0.6),
                "dtype": torch.float32,
                "erase_value": "noise",
                "memory_format": "channels_last",
                "device": CPU,
            }
        ]

    def test_mixing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert build.mixer(vit()) is None
        assert build.mixer(vit("augment.mixup_alpha=0.2")) is not None
        assert build.mixer(vit("augment.mixup_alpha=0.2", "augment.mix_probability=0")) is None
        batches, elements = (record(monkeypatch, name) for name in ("Mixer", "ElementMixer"))
        for mode in ("batch", "pair", "elem"):
            build.mixer(
                vit(
                    "augment.mixup_alpha=0.3", "augment.cutmix_alpha=0.7", "augment.mix_probability=0.9",
                    "augment.mix_switch_probability=0.4", f"augment.mix_mode={mode}",
                )
            )  # fmt: skip
        values = {"mixup_alpha": 0.3, "cutmix_alpha": 0.7, "probability": 0.9, "switch_probability": 0.4}
        assert batches == [values]
        assert elements == [{**values, "mode": "pair"}, {**values, "mode": "elem"}]

    @pytest.mark.parametrize(("ranks", "accumulation", "images"), [(1, 1, 64), (2, 1, 32), (2, 4, 8), (1, 64, 1)])
    def test_the_size_of_a_microbatch(self, ranks: int, accumulation: int, images: int) -> None:
        config = vit(f"optim.accumulation_steps={accumulation}")
        assert build.microbatch_size(config, world(0, ranks)) == images

    def test_a_batch_that_the_ranks_cannot_share(self) -> None:
        with pytest.raises(UserError) as caught:
            build.microbatch_size(vit("optim.accumulation_steps=2"), world(0, 3))
        assert caught.value.lines == (
            "data.global_batch_size: 64 is not divisible by 3 ranks x optim.accumulation_steps=2; use 60 or 66",
        )

    @pytest.mark.parametrize(
        ("batch", "accumulation", "ranks", "way_out"),
        [
            (4096, 8, 24, "run it on 16 or 32 ranks"),
            (72, 8, 4, "use optim.accumulation_steps=9"),
            (16, 1, 24, "run it on 16 ranks"),
        ],
    )
    def test_a_resumed_run_keeps_its_batch(self, batch: int, accumulation: int, ranks: int, way_out: str) -> None:
        config = vit(f"data.global_batch_size={batch}", f"optim.accumulation_steps={accumulation}")
        with pytest.raises(UserError) as caught:
            build.microbatch_size(config, world(0, ranks), resumes=True)
        assert str(caught.value).endswith(way_out)
        with pytest.raises(UserError, match=r"; use \d+ or \d+$"):
            build.microbatch_size(config, world(0, ranks))


class TestOptimizing:
    @pytest.mark.parametrize(
        ("overrides", "loss"),
        [
            (["loss.label_smoothing=0.25"], CrossEntropy(0.25)),
            (["loss=bce", "loss.label_smoothing=0.25"], BinaryCrossEntropy(0.25, "mean")),
            (["loss=bce", "loss.label_smoothing=0", "loss.bce_reduction=sum"], BinaryCrossEntropy(0.0, "sum")),
        ],
    )
    def test_the_loss(self, overrides: list[str], loss: LossFunction) -> None:
        assert build.loss(vit(*overrides), REFERENCE, CPU, 10) == loss
        fused = build.loss(vit(*overrides), REFERENCE.replace(cross_entropy="fused"), CPU, 10)
        assert isinstance(fused, FusedLoss)
        assert fused.plain == loss

    @pytest.mark.parametrize(
        ("smoothing", "threshold", "classes", "every"),
        [(0.1, 0.0, 1000, "1"), (0.1, 0.005, 10, "1"), (0.9, 0.2, 1000, "0"), (0.1, 0.2, 1000, ""), (0.0, 0.0, 10, "")],
    )
    def test_a_threshold_that_tells_no_class_from_another(
        self, smoothing: float, threshold: float, classes: int, every: str
    ) -> None:
        config = vit("loss=bce", f"loss.label_smoothing={smoothing}", f"loss.bce_threshold={threshold}")
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
        config = vit("speed.compile=blocks")
        line = rf"needs a {compiler} and Python's headers on .* and did not find both; install g.* or use speed\."
        with pytest.raises(UserError, match=rf"^speed\.compile: blocks {line}compile=off$"):
            build.wrap(config, build.model(config, 10, switches), world(device=there), switches)
        with pytest.raises(UserError, match=rf"^speed\.cross_entropy: fused {line}cross_entropy=plain$"):
            build.loss(vit(), REFERENCE.replace(cross_entropy="fused"), there, 10)

    @pytest.mark.parametrize(
        ("variables", "there", "found"),
        [
            ({}, {"gcc"}, ["cuda"]),
            ({"CC": "cc-13"}, {"gcc"}, []),
            ({"CXX": "c++ -O2"}, {"c++"}, ["cpu"]),
            ({}, set(), []),
        ],
    )
    def test_where_compilers_are_looked_for(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        variables: dict[str, str],
        there: set[str],
        found: list[str],
    ) -> None:
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "Python.h").touch()
        monkeypatch.setattr("sysconfig.get_path", lambda name, scheme=None: str(tmp_path))
        monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
        kinds: tuple[speed.Device, ...] = ("cpu", "cuda")
        assert [kind for kind in kinds if build.device.has_compiler(kind)] == found

    @pytest.mark.parametrize("implementation", ["foreach", "fused"])
    def test_adamw(self, implementation: str) -> None:
        config = vit("optim.lr=0.5", "optim.betas=[0.7,0.8]", "optim.eps=1e-5", "optim.weight_decay=0.4")
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
        config = vit("optim=adamw")
        network = build.model(config, 10, REFERENCE)
        groups = [{"params": list(network.parameters())[:count], "weight_decay": 0.1} for count in owned]
        switches = REFERENCE.replace(optimizer="foreach", optimizer_compile="on")
        made = build.optimizer(config, network, switches, groups=groups)
        assert [len(group["params"]) for group in made.param_groups] == list(owned)

    def test_sgd(self) -> None:
        config = load_config("resnet_digits", ["optim.momentum=0.6", "optim.nesterov=false", "optim.lr=0.25"])
        made = build.optimizer(config, build.model(config, 10, REFERENCE), REFERENCE)
        assert isinstance(made, torch.optim.SGD)
        for group in made.param_groups:
            assert (group["lr"], group["momentum"], group["nesterov"]) == (0.25, 0.6, False)

    def test_the_learning_rate_follows_the_batch(self) -> None:
        scaled = vit("optim.lr=0.3", "optim.lr_batch_size=256", "data.global_batch_size=64")
        assert build.schedule(scaled, 7).lr == pytest.approx(0.3 * 64 / 256)
        groups = build.optimizer(scaled, build.model(scaled, 10, REFERENCE), REFERENCE).param_groups
        assert groups[0]["lr"] == build.schedule(scaled, 7).lr
        assert build.schedule(vit("optim.lr=0.3"), 7).lr == 0.3

    def test_the_schedule(self) -> None:
        made = build.schedule(vit("schedule.epochs=20", "schedule.warmup_epochs=2.5", "schedule.max_steps=3"), 10)
        # max_steps stops early and leaves the curve as it is.
        assert (made.total_steps, made.warmup_steps) == (200, 25)

    def test_the_average(self) -> None:
        weights = ModelWeights(nn.Linear(2, 2))
        assert build.ema(vit(), weights, REFERENCE) is None
        made = build.ema(
            vit("optim.ema_decay=0.75", "optim.ema_warmup=false"), weights, REFERENCE.replace(ema="foreach")
        )
        assert made is not None
        assert (made.decay, made.warmup, made.implementation) == (0.75, False, "foreach")

    @pytest.mark.parametrize(
        ("name", "dtype"), [("fp32", torch.float32), ("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)]
    )
    def test_the_precision(self, name: str, dtype: torch.dtype) -> None:
        scales = [
            "precision.loss_scale_start=1024", "precision.loss_scale_growth=3", "precision.loss_scale_backoff=0.25",
            "precision.loss_scale_interval=17",
        ]  # fmt: skip
        config = vit(f"precision={name}", *(scales if name == "amp_fp16" else []))
        layer = nn.Linear(3, 3)
        with build.autocast(config, CPU)():
            assert layer(torch.ones(1, 3)).dtype == dtype
        assert layer.weight.dtype == torch.float32
        scaler = build.loss_scaler(config, CPU)
        assert scaler.is_enabled() == (name == "amp_fp16")
        if scaler.is_enabled():
            assert scaler.get_scale() == 1024
            assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
                3,
                0.25,
                17,
            )

    def test_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the second of two ranks has it, without their exchange."""
        alone = build.wrap
        monkeypatch.setattr(build, "wrap", lambda config, network, _, *rest: alone(config, network, world(), *rest))
        for clip, foreach in (("loop", False), ("foreach", True)):
            config = vit(
                "seed=9", "optim.clip_norm=0.25", "optim.ema_decay=0.75", "schedule.epochs=20",
                "loss.label_smoothing=0.25", "augment.mixup_alpha=0.2",
            )  # fmt: skip
            switches = REFERENCE.replace(clip=clip)
            step = make_step(config, build.model(config, 10, switches), world(1, 2), switches, steps_per_epoch=7)
            assert (step.seed, step.rank, step.clip_norm, step.clip_foreach) == (9, 1, 0.25, foreach)
            assert step.schedule == build.schedule(config, 7)
            assert step.ema is not None
            assert step.ema.decay == 0.75
            assert step.loss == CrossEntropy(0.25)
            assert isinstance(step.mixer, Mixer)

    def test_a_step_knows_its_number_of_classes(self) -> None:
        """A threshold may make every class the right one."""
        config = vit("loss=bce", "loss.label_smoothing=0.1", "loss.bce_threshold=0.0")
        network = build.model(config, 10, REFERENCE)
        with pytest.raises(UserError, match=r"^loss\.bce_threshold: .* makes every class a 1: with 10 classes"):
            make_step(config, network, world(), REFERENCE, steps_per_epoch=7)
