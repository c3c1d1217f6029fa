"""The configuration of a run that was: read back from its folder, with overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pycls_fast.config import RunConfig, load_config, load_run_config
from pycls_fast.errors import UserError


@pytest.fixture
def config() -> RunConfig:
    return load_config("vit_digits", ["seed=5", "optim.betas=[0.8,0.95]", "augment.rand_augment={magnitude: 3}"])


@pytest.fixture
def run_dir(tmp_path: Path, config: RunConfig) -> Path:
    values = config.model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return tmp_path


def test_a_saved_configuration_comes_back_equal(run_dir: Path, config: RunConfig) -> None:
    assert load_run_config(run_dir) == config


def test_overrides_change_values_and_groups(run_dir: Path, config: RunConfig) -> None:
    changed = load_run_config(run_dir, ["++seed=6", "optim=sgd", "optim.lr=1e-3", "data.mean=[0.1,0.2,0.3]"])
    assert (changed.seed, changed.optim.name, changed.optim.lr) == (6, "sgd", 1e-3)
    assert changed.data.mean == (0.1, 0.2, 0.3)
    assert changed.model == config.model


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["sed=1"], ["sed: unknown key; did you mean seed? (the command line)"]),
        (["optim=adam"], ["optim=adam: no such file in configs/optim; did you mean adamw?"]),
        (
            ["optim.lr=-1", "seed=x"],
            [
                'seed: must be a whole number; got "x" (the command line)',
                "optim.lr: must be greater than 0; got -1 (the command line)",
            ],
        ),
        (["optim.lr"], ["cannot read 'optim.lr' on the command line; write key=value, quoting lists and spaces"]),
        (
            ["data.image_size=18"],
            ["data.image_size: 18 is not divisible by model.patch_size=4; use 16 or 20 (the command line)"],
        ),
        (
            ["schedule.epochs=2"],
            [
                "schedule.warmup_epochs: 5 is longer than the training of schedule.epochs=2; "
                "use schedule.warmup_epochs=2 or less ({file})"
            ],
        ),
        (["optim.lr=${nope}"], ["optim.lr: Interpolation key 'nope' not found (the command line)"]),
        (
            ["config_name=mine"],
            ["config_name: the name of the experiment's file; choose it with --config-name (the command line)"],
        ),
        (
            ["data=folder"],
            [
                "data.root: not set; give the folder that holds train/ "
                "and val/ (or one folder per class) as data.root=PATH "
                "(configs/data/folder.yaml or the command line)"
            ],
        ),
    ],
)
def test_mistakes_in_overrides(run_dir: Path, overrides: list[str], lines: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_run_config(run_dir, overrides)
    assert list(caught.value.lines) == [line.format(file=run_dir / "config.yaml") for line in lines]


def test_a_value_that_was_edited_names_the_file(run_dir: Path) -> None:
    file = run_dir / "config.yaml"
    file.write_text(file.read_text().replace("seed: 5", "seed: five"))
    with pytest.raises(UserError) as caught:
        load_run_config(run_dir)
    assert caught.value.lines == (f'seed: must be a whole number; got "five" ({file})',)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        load_run_config(tmp_path)
