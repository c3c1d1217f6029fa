"""The configuration of a run that was: read back from its folder, with overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.speed import Speed, resolve
from pycls_fast.strategies import Parallel
from pycls_fast.values import Size
from tests.factories import load_run_config


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(
        "vit_digits", ["seed=5", "data.source=folder", "optim.betas=[0.8,0.95]", "augment.policy=rand_augment"]
    )


@pytest.fixture
def run_dir(tmp_path: Path, config: RunConfig) -> Path:
    values = config.model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path


def test_a_saved_configuration_comes_back_equal(run_dir: Path, config: RunConfig) -> None:
    read = load_run_config(run_dir)
    assert read.speed == Speed(preset=config.speed.preset)
    assert read == config.model_copy(update={"speed": read.speed})


@pytest.mark.parametrize("kind", ["digits", "packed"])
def test_other_images_are_seen_as_the_saved_ones(run_dir: Path, config: RunConfig, tmp_path: Path, kind: str) -> None:
    """A folder, and another kind of source, for which only the old kind's own keys go."""
    values = yaml.safe_load((run_dir / "config.yaml").read_text())
    values["data"] |= {"source": "manifest", "label_column": "kind"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(values))
    overrides = [f"data={tmp_path}", f"data.source={kind}"]
    read = load_run_config(run_dir, overrides).data
    assert (read.root, read.source) == (str(tmp_path), kind)
    assert (read.image_size, read.mean, read.val_fraction) == (Size(16, 16), config.data.mean, config.data.val_fraction)
    assert load_run_config(run_dir, overrides[:1]).data.own()["label_column"] == "kind"


def test_a_value_that_was_edited_names_the_file(run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("seed: 5", "seed: five"))
    with pytest.raises(UserError) as caught:
        load_run_config(run_dir)
    assert caught.value.lines == (f'seed: must be a valid integer; got "five" ({file})',)


@pytest.mark.parametrize(
    "override",
    [
        "speed.compile=off", "data.root=/photos (2024)", "augment={policy: {name: rand_augment, num_ops: 1}}",
        "~optim.clip_norm", "seed=${data.image_size}", "model=resnet_digits",
    ],
)  # fmt: skip
def test_an_override_means_the_same_as_where_hydra_composes(tmp_path: Path, override: str) -> None:
    # No switch is set by hand, which reading back would leave out.
    base = ["data.source=folder", "data.root=x", "speed.compile=null"]
    values = load_config("vit_digits", base).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    overrides = ["data.wnids=null", override]
    composed = load_config("vit_digits", [*base, *overrides])
    assert load_run_config(tmp_path, overrides) == composed


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vit_digits", ["data=synthetic", "precision=amp_bf16", "speed.compile=model"]),
        ("vit_digits", ["data=synthetic", "speed=reference", "speed.recompute=full", "runtime.watchdog=true"]),
        ("resnet50", ["data=synthetic", "optim=muon"]),
    ],
)
def test_a_run_of_any_device_is_read_anywhere(
    tmp_path: Path, name: str, overrides: list[str], device: Literal["cpu", "cuda"]
) -> None:
    """The file has the switches that were in force, which nobody has set by hand."""
    config = load_config(name, overrides)
    formats = build.level(config)
    in_force = resolve(config.speed, device, config.optim, in_16_bits=formats.compute != "float32")
    values = config.model_dump(mode="json")
    values["speed"] = in_force.model_dump()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    read = load_run_config(tmp_path)
    assert (read.speed.preset, read.speed.by_hand) == (config.speed.preset, {})
    build.switches(read, torch.device("cpu"))
    assert load_run_config(tmp_path, ["speed.ema=loop"]).speed.by_hand == {"ema": "loop"}


@pytest.mark.parametrize(
    "overrides",
    [["parallel=hsdp", "parallel.shard_degree=4", "parallel.replicate_degree=8"], ["parallel=fairscale_fsdp"]],
)
def test_a_run_of_any_strategy_is_scored_by_any_number_of_ranks(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(
        "vit_digits", ["data.source=folder", *overrides, "parallel.backend=gloo", "parallel.timeout_seconds=77"]
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_run_config(tmp_path).parallel == Parallel(backend="gloo", timeout_seconds=77)
    assert load_run_config(tmp_path, ["parallel=ddp"]).parallel.name == "ddp"
