"""Knowledge distillation: a frozen network gives a second target for the images of each step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast import build
from pycls_fast.config import validate_saved
from pycls_fast.config.of_weights import of_weights
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError, refuse, refusing
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed
from pycls_fast.train.load_weights import load_network
from pycls_fast.train.resolving import pixel_statistics
from pycls_fast.train.saved_weights import open_weights


@dataclass(frozen=True)
class Distillation:
    """The loss with a teacher, which sees the images as the network does: augmented and mixed.

    Soft targets: the Kullback-Leibler divergence between both softmaxes at a temperature, times its square (Hinton et
    al. 2015, section 2), the mean over images, nats. Hard ones: cross-entropy with the teacher's class (Touvron et al.,
    DeiT, 2021, equation 3).

    Attributes:
        share: of the teacher's loss in the sum; the labels' has the rest.
        factor_C11, shift_C11: turn images as the network gets them into those of the teacher's normalisation.
        classes: the data's; either network may have more outputs, of which the teacher says nothing.
    """

    teacher: nn.Module
    autocast: Callable[[], AbstractContextManager[None]]
    share: float
    temperature: float
    hard: bool
    factor_C11: Tensor
    shift_C11: Tensor
    classes: int

    @torch.no_grad()
    def target(self, images_BCHW: Tensor) -> Tensor:
        """The teacher's logits of the classes (B, K), in float32 or wider."""
        with self.autocast():
            logits_BK = self.teacher(images_BCHW * self.factor_C11 + self.shift_C11)[:, : self.classes]
        return logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))

    def __call__(self, loss: Tensor, logits_BK: Tensor, images_BCHW: Tensor) -> Tensor:
        """The weighted sum of the loss of the labels, a mean over the images, and that of the teacher."""
        target_BK = self.target(images_BCHW)
        logits_BK = logits_BK[:, : self.classes].to(target_BK.dtype)
        if self.hard:
            taught = F.cross_entropy(logits_BK, target_BK.argmax(dim=1))
        else:
            own_BK, target_BK = (F.log_softmax(each / self.temperature, dim=1) for each in (logits_BK, target_BK))
            taught = self.temperature**2 * F.kl_div(own_BK, target_BK, reduction="batchmean", log_target=True)
        return (1.0 - self.share) * loss + self.share * taught


def build_distillation(config: RunConfig, data: Images, world: World, switches: Speed) -> Distillation | None:
    """The distillation that the configuration asks for, in the run's precision; None without a teacher."""
    if config.distill.teacher is None:
        return None
    try:
        return _build(config, config.distill.teacher, data, world, switches)
    except UserError as error:
        # Said of `weights`, which the run may have as well.
        refuse(re.sub("^weights: ", "distill.teacher: ", line) for line in error.lines)
        raise


def _build(config: RunConfig, source: str, data: Images, world: World, switches: Speed) -> Distillation:
    settings = config.distill
    saved = open_weights(source, world).config
    values = config.model_dump(mode="json") | {"weights": source, "weights_allow": []}
    values["model"] = of_weights(values, ())[0] if saved is None else saved["model"]
    its_own = pixel_statistics(source, world, model=values["model"].get("name"))
    mean, std = its_own or (config.data.mean, config.data.std)
    # No rank has only a part of it, and switches that were set for the other network need not suit it.
    its_config = validate_saved(values | {"parallel": {"name": "single"}, "speed": {}}, source)
    with refusing(f"distill.teacher: {source} does not take {config.data.image_size} px images", ValueError):
        teacher, _, _ = load_network(its_config, data, world, switches, for_training=False)
    like = next(teacher.parameters())
    channels = [config.data.mean, config.data.std, mean, std]
    own_mean, own_std, its_mean, its_std = torch.tensor(channels, device=world.device)[:, :, None, None]
    return Distillation(
        teacher=teacher.eval().requires_grad_(False),
        autocast=build.autocast(config, world.device),
        share=settings.share,
        temperature=settings.temperature,
        hard=settings.targets == "hard",
        factor_C11=(own_std / its_std).to(like.dtype),
        shift_C11=((own_mean - its_mean) / its_std).to(like.dtype),
        classes=len(data.classes),
    )
