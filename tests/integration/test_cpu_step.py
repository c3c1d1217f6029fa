"""`benchmarks/cpu_step.py`: the comparison with timm's plain loop, shrunk."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from tests.integration.runs import ROOT

# Scripts are no package; another project's `benchmarks` may be installed.
_SPEC = importlib.util.spec_from_file_location("cpu_step", ROOT / "benchmarks" / "cpu_step.py")
assert _SPEC is not None
assert _SPEC.loader is not None
cpu_step: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["cpu_step"] = cpu_step
_SPEC.loader.exec_module(cpu_step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_s16", "resnet50"])
def test_both_sides_have_the_same_network(name: str) -> None:
    """As many parameters as timm's; what is measured has no drop-path, smoothing or mixing."""
    import timm

    subject = cpu_step.SUBJECTS[name]
    with torch.device("meta"):
        theirs = sum(p.numel() for p in timm.create_model(subject.timm, num_classes=cpu_step.CLASSES).parameters())
    step, config = cpu_step.our_step(subject, cpu_step.OURS["speed=fast precision=amp_bf16"], 2, 32)
    ours = sum(p.numel() for p in trainer_of(step).step.parameters)
    if name == "vit_s16":
        # Positions of 4 tokens and the class token instead of 196.
        ours += 192 * 384
    assert ours == theirs
    assert config.model.drop_path == config.loss.label_smoothing == config.augment.erase_probability == 0
    assert config.augment.mixup_alpha == config.augment.cutmix_alpha == 0


def trainer_of(step: Any) -> Any:
    """The trainer that a step of ours calls."""
    return next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, cpu_step.Trainer))
