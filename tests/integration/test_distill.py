"""Distillation: the loss with a teacher, and the teacher that a run gets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pycls_fast
from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.parallel.world import ALONE
from pycls_fast.train.distill import Distillation, distillation
from tests.integration.runs import TINY, records


@pytest.mark.parametrize("hard", [False, True])
def test_the_loss_is_that_of_the_papers(hard: bool) -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    images, logits = torch.randn(7, 3, 2, 2).double(), torch.randn(7, 5).double().requires_grad_()
    factor, shift = torch.rand(2, 3, 1, 1).double()
    loss = Distillation(teacher, nullcontext, 0.3, 4.0, hard, factor, shift, 5)
    found = loss(torch.tensor(2.0).double(), logits, images)
    taught = teacher(images * factor + shift).detach()
    # Hinton et al. write cross-entropy with the soft targets: the same but for the teacher's entropy, a constant.
    soft = (taught / 4).softmax(1)
    entropy = -(soft * soft.log()).sum(1).mean()
    one_hot = F.one_hot(taught.argmax(1), 5).double()
    own = 16 * (F.cross_entropy(logits / 4, soft) - entropy) if not hard else F.cross_entropy(logits, one_hot)
    torch.testing.assert_close(found, 0.7 * 2.0 + 0.3 * own)
    (gradient,) = torch.autograd.grad(found, logits)
    (expected,) = torch.autograd.grad(0.3 * own, logits)
    torch.testing.assert_close(gradient, expected)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    # Spare outputs of either network change nothing.
    spare = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)).double()
    spare[1].load_state_dict({name: torch.cat([v, v[:3]]) for name, v in teacher[1].state_dict().items()})
    more = Distillation(spare, nullcontext, 0.3, 4.0, hard, factor, shift, 5)
    assert torch.equal(more(torch.tensor(2.0).double(), F.pad(logits, (0, 2), value=9.0), images), found)


@pytest.mark.slow
def test_a_run_with_a_teacher(digits: Path, tmp_path: Path) -> None:
    words = [*TINY, f"data.root={digits}", "data.num_workers=0", "runtime.device=cpu"]
    teacher = pycls_fast.train_net("vit_digits", words, run_dir=tmp_path / "teacher", optim__lr=0.002)
    # A network with the teacher's weights says the same about augmented and mixed images.
    words += ["augment.mixup_alpha=0.8", "optim.lr=1e-12", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    distill = {"teacher": teacher.run_dir, "share": 1.0}
    same = pycls_fast.train_net(
        "vit_digits", words, run_dir=tmp_path / "same", weights=teacher.run_dir, distill=distill
    )
    assert records(same.run_dir, "train")[0]["loss"] == pytest.approx(0.0, abs=1e-5)
    # Another network, which gets images of another normalisation.
    other = ["model.width=16", "data.mean=[0.4,0.5,0.6]", "data.std=[0.3,0.2,0.25]"]
    config = load_config("vit_digits", [*words, *other, f"distill.teacher={teacher.run_dir}"])
    world = ALONE
    switches = build.switches(config, world.device)
    loss = distillation(config, build.sources(config, world)["train"], world, switches)
    pixels = torch.rand(4, 3, 8, 8)
    own, its = (
        (pixels - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[:, None, None]
        for data in (config.data, teacher.classifier.config.data)
    )
    torch.testing.assert_close(loss.target(own), teacher.classifier.network(its), rtol=1e-4, atol=1e-5)
