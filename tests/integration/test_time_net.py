"""`time_net.py`: numbers of every mode agree with one another, variants take turns, mistakes are one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure import variant as timed_variant
from pycls_fast.ledger.measure.timing import time_variants
from pycls_fast.train import resolving
from tests.factories import compiles
from tests.integration.runs import TINY, command, run_process, under_torchrun

KEYS: dict[str, Any] = {"mode": "all", "steps": 2, "warmup_steps": 1, "repeats": 2, "matmul_size": 64}
QUICK = tuple(f"{key}={value}" for key, value in KEYS.items())

NEEDED = (
    *("images_per_second", "step_seconds_p50", "memory_peak_bytes", "parameters", "forward_flops_per_image", "matmul"),
    *("versions", "device", "world_size", "command", "environment", "switches", "precision", "config"),
)


def check_part(
    record: dict[str, Any], part: str, *, batch: int, samples: int, forward_passes: int, world_size: int = 1
) -> None:
    """The numbers of a part follow from its seconds and from the record's own counts."""
    found = record[part]
    assert found["images_per_step"] == batch
    assert found["images_per_second"] * found["step_seconds_p50"] == pytest.approx(batch)
    assert 0 < found["step_seconds_p10"] <= found["step_seconds_p50"] <= found["step_seconds_p90"]
    assert found["samples"] == samples
    turns, steps = sum(found["turn_seconds"]) * KEYS["steps"], sum(map(sum, found["step_seconds_each"]))
    # The slowest rank of each step need not be the slowest of the turn.
    assert turns == pytest.approx(steps) if world_size == 1 else turns <= steps
    if forward_passes:
        flops = forward_passes * record["forward_flops_per_image"] * found["images_per_second"]
        assert found["flops_per_second"] == pytest.approx(flops)
        assert found["share_of_matmul"] == pytest.approx(flops / record["matmul"]["flops_per_second"])


def check_stages(found: dict[str, Any]) -> None:
    """Of the input pipeline."""
    assert list(found["stages"]) == ["read", "decode", "augment", "collate", "copy"]
    for stage in found["stages"].values():
        assert stage["images_per_second"] * stage["seconds_per_image"] == pytest.approx(1)
    by_worker = {name: stage["seconds_per_image"] for name, stage in found["stages"].items() if name != "copy"}
    assert found["images_per_second_per_core"] == pytest.approx(1 / sum(by_worker.values()))
    assert found["limit"] in {max(by_worker, key=by_worker.__getitem__), "copy"}
    assert sum(stage["share"] for stage in found["stages"].values()) == pytest.approx(1)
    assert found["images"] == KEYS["repeats"] * 64


@compiles
def test_a_compiled_loss_is_timed(tmp_path: Path, digits: Path) -> None:
    """The memory of the first steps is counted, but not in compiled code."""
    keys = [f"data.root={digits}", f"run_dir={tmp_path}", "precision=fp32", "speed.cross_entropy=fused"]
    config = load_config("vit_digits", [*TINY, *keys])
    assert time_variants([("fused", config)], **{**KEYS, "mode": "train"}) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "parts"),
    [("train", {"train"}), ("model", {"train", "inference"}), ("loader", {"loader"}), ("both", {"both"})],
)
def test_numbers_of_a_mode_agree(tmp_path: Path, digits: Path, mode: Any, parts: set[str]) -> None:
    config = load_config("vit_digits", [*TINY, f"data.root={digits}", f"run_dir={tmp_path}"])
    settings = {**KEYS, "mode": mode}
    assert time_variants([("vit_digits", config)], **settings) == 0
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    absent = {"matmul"} if mode == "loader" else set()
    # A CPU's memory is that of the tensors alive in a training step.
    absent |= set() if "train" in parts else {"memory_peak_bytes"}
    assert {key for key in NEEDED if record[key] is None} == absent
    assert parts == {"train", "inference", "loader", "both"} & record.keys()
    # 1,797 images, a fifth held out; the head has ten outputs.
    assert record["num_classes"] == 10
    steps = KEYS["steps"] * KEYS["repeats"]
    if "train" in parts:
        check_part(record, "train", batch=64, samples=steps, forward_passes=3)
    if "inference" in parts:
        batch = config.data.eval_batch_size or 64
        check_part(record, "inference", batch=batch, samples=steps, forward_passes=1)
    if "loader" in parts:
        check_part(record, "loader", batch=64, samples=KEYS["repeats"], forward_passes=0)
    if mode == "loader":
        check_stages(record["input_pipeline"])
    if "both" in parts:
        check_part(record, "both", batch=64, samples=KEYS["repeats"], forward_passes=3)
        assert 0 <= record["both"]["data_wait_fraction"] <= 1
    assert record["images_per_second"] == record[record["headline"]]["images_per_second"]


def test_a_sharded_network_is_never_built_whole(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def place(config: Any, network: Any, *more: Any) -> Any:
        built.append(all(parameter.is_meta for parameter in network.parameters()))
        return placed(config, network, *more)

    placed = timed_variant.build.place
    monkeypatch.setattr(timed_variant.build, "place", place)
    config = load_config("vit_digits", [*TINY, f"data.root={digits}", f"run_dir={tmp_path}", "parallel=fsdp"])
    assert time_variants([("vit_digits", config)], **{**KEYS, "mode": "model"}) == 0
    assert built == [True]


def test_steps_are_compiled_as_those_of_a_long_training(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_if_it_pays(config: Any, switches: Any, world: Any, *, images: float, flops: float) -> Any:
        assert images == math.inf
        assert flops > 0
        return switches.replace(clip="loop")

    monkeypatch.setattr(resolving, "compile_if_it_pays", compile_if_it_pays)
    config = load_config("vit_digits", [*TINY, f"data.root={digits}", "speed=fast"])
    file = tmp_path / "timing.json"
    assert time_variants([("vit_digits", config)], **{**KEYS, "mode": "train"}, output=str(file)) == 0
    assert json.loads(file.read_text())["switches"]["clip"] == "loop"


def test_a_teacher_is_a_part_of_the_step(tmp_path: Path, digits: Path) -> None:
    config = load_config("vit_digits", [*TINY, f"data.root={digits}", f"distill.teacher={tmp_path / 'none'}"])
    with pytest.raises(UserError, match=r"^distill\.teacher: .*none"):
        time_variants([("vit_digits", config)], **{**KEYS, "mode": "train"}, output=str(tmp_path / "timing.json"))


@pytest.mark.slow
def test_compares_variants_in_turns(tmp_path: Path, digits: Path) -> None:
    file = tmp_path / "folder" / "timing.json"
    names = [
        "speed=reference model.depth=2",
        "speed=reference model.depth=2 speed.attention=sdpa optim.betas=[0.9,0.95]",
        "model=resnet_digits",
    ]
    arguments = [f"data.root={digits}", "data.image_size=8", "data.global_batch_size=8", *QUICK]
    arguments += ["data.eval_batch_size=8", "mode=model", f"output={file}"]
    compared = f"compare=[{','.join(names)}]"
    done = run_process(command(*arguments, compared, tool="time_net"), cwd=tmp_path)
    record = json.loads(file.read_text())
    assert [v["name"] for v in record["variants"]] == names
    first, second, third = record["variants"]
    assert first["switches"]["attention"] == "reference"
    assert {k: v for k, v in second["switches"].items() if v != first["switches"][k]} == {"attention": "sdpa"}
    assert second["config"]["optim"]["betas"] == [0.9, 0.95]
    assert third["model"] == "resnet"
    assert third["parameters"] != first["parameters"] == second["parameters"]
    assert third["config"]["speed"]["preset"] == "fast"
    for variant in record["variants"]:
        check_part(variant, "train", batch=8, samples=4, forward_passes=3)
    assert [(c["part"], c["variant"]) for c in record["comparisons"]] == [
        (part, name) for part in ("train", "inference") for name in names[1:]
    ]
    for each in record["comparisons"]:
        variant = record["variants"][names.index(each["variant"])][each["part"]]["turn_seconds"]
        reference = first[each["part"]]["turn_seconds"]
        assert each["speedup"]["ratio"] == pytest.approx(math.sqrt(math.prod(reference) / math.prod(variant)))
    assert done.stderr == ""
    assert names[1] in done.stdout
    assert "speed-up" in done.stdout


@pytest.mark.slow
def test_model_is_timed_without_data(tmp_path: Path) -> None:
    small = ("model.width=32", "model.depth=1", "model.heads=2", "model.mlp_width=32", "data.image_size=32")
    arguments = [*small, "data.global_batch_size=4", *QUICK, "mode=model", "precision=amp_bf16"]
    arguments += ["output=timing.json"]
    run_process(command(*arguments, tool="time_net", config_name="vit_b16"), cwd=tmp_path)
    record = json.loads((tmp_path / "timing.json").read_text())
    check_part(record, "train", batch=4, samples=4, forward_passes=3)
    assert "synthetic" in record["data"]
    assert record["num_classes"] == 1000
    assert record["matmul"]["dtype"] == "bfloat16"
    assert record["command"].endswith("output=timing.json")


@pytest.mark.parametrize(
    ("overrides", "output", "words"),
    [
        (["runtime.threads=2"], None, "compare: 'b' changes runtime"),
        (["data.global_batch_size=2048"], None, "larger than the training set of 1438 images"),
        ([], ".", r"output: . cannot be written .it is a folder"),
        ([], "/proc/timing.json", "output: /proc/timing.json cannot be written"),
    ],
)
def test_what_cannot_be_timed_is_told(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], output: str | None, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (load_config("vit_digits", [*TINY, f"data.root={digits}", *o]) for o in ([], overrides))
    with pytest.raises(UserError, match=words):
        time_variants([("a", one), ("b", other)], **{**KEYS, "mode": "both"}, output=output)


@pytest.mark.slow
def test_training_is_timed_and_counted_at_its_own_size(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images grow over the epochs of some recipes; evaluation has the last size."""
    overrides = ["data.image_size=16", "data.image_size_schedule=[[0,8],[1,16]]", "data.global_batch_size=8"]
    more = [f"data.root={digits}", "data.num_workers=0", "schedule.epochs=2", "speed.compile=off", "precision=fp32"]
    config = load_config("resnet_digits", [*overrides, *more])
    file = tmp_path / "t.json"
    assert time_variants([("growing", config)], **KEYS, output=str(file)) == 0
    record = json.loads(file.read_text())
    assert (record["image_size"], record["train_image_size"]) == (16, 8)
    assert 3 * record["train_forward_flops_per_image"] < record["forward_flops_per_image"]
    in_training = record | {"forward_flops_per_image": record["train_forward_flops_per_image"]}
    check_part(in_training, "train", batch=8, samples=4, forward_passes=3)
    check_part(in_training, "both", batch=8, samples=2, forward_passes=3)
    check_part(record, "inference", batch=config.data.eval_batch_size or 8, samples=4, forward_passes=1)
    assert "16 px" in (shown := capsys.readouterr().out)
    assert "in training 8 px" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "divided",
    [
        (),
        ("parallel.pipeline_degree=2", "optim.accumulation_steps=2"),
        ("parallel=fsdp", "parallel.pipeline_degree=2", "optim.accumulation_steps=2"),
    ],
)
def test_ranks_are_timed_together(tmp_path: Path, digits: Path, divided: tuple[str, ...]) -> None:
    arguments = [f"data.root={digits}", *TINY, *QUICK, *divided, "output=timing.json"]
    done = run_process(under_torchrun(command(*arguments, tool="time_net"), 2), cwd=tmp_path)
    record = json.loads((tmp_path / "timing.json").read_text())
    assert record["world_size"] == 2
    check_part(record, "train", batch=64, samples=4, forward_passes=3, world_size=2)
    check_part(record, "both", batch=64, samples=2, forward_passes=3, world_size=2)
    assert done.stdout.count("written to") == 1
