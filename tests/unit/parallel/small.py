"""Small networks with random values in every tensor, and their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.saved_activations import save_activation_memory
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.speed import Speed
from tests.factories import randomise


def vit(**arguments: Any) -> VisionTransformer:
    """Four blocks of width 32, 16 tokens and a class token."""
    sizes: dict[str, Any] = {"width": 32, "depth": 4, "heads": 2, "mlp_width": 128, "drop_path": 0.4}
    torch.manual_seed(0)
    model = VisionTransformer(image_size=16, patch_size=4, num_classes=5, **{**sizes, **arguments})
    return randomise(model).float()


def resnet(**arguments: Any) -> ResNet:
    """The 18 layers on small images."""
    torch.manual_seed(0)
    model = ResNet(depth=18, num_classes=5, stem="small", **{"drop_path": 0.4, **arguments})
    return randomise(model).float()


MODELS: dict[str, Callable[..., Any]] = {"vit": vit, "resnet": resnet}


def saving(model: Any, **way: Any) -> Any:
    """The model, keeping less."""
    save_activation_memory(model, model.units(), Speed(**way))
    return model


def batch(count: int = 8, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    images_BCHW = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
    return images_BCHW, torch.randint(5, (count,), generator=generator)


def train(model: nn.Module, steps: int, *, amp: bool = False, lr: float = 0.02) -> dict[str, Tensor]:
    """SGD with momentum; the state afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(100 + step)
        images_BCHW, labels_B = batch(seed=step)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits_BK = model(images_BCHW)
        F.cross_entropy(logits_BK.float(), labels_B).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def gradients(model: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 7) -> dict[str, Tensor]:
    """Of one batch, and the logits, in the model's format."""
    torch.manual_seed(seed)
    images_BCHW, labels_B = batch(dtype=dtype)
    logits_BK = model(images_BCHW)
    F.cross_entropy(logits_BK, labels_B).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"logits": logits_BK.detach(), **found}


def held(model: nn.Module, *, amp: bool = False) -> int:
    """Bytes alive between forward and backward pass."""
    images_BCHW, labels_B = batch(64)
    with LiveMemory([*model.parameters(), *model.buffers(), images_BCHW, labels_B]) as memory:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(images_BCHW).float(), labels_B)
        bytes_held = memory.live
        loss.backward()
    return bytes_held


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """|left - right| / |right| over all tensors as one vector."""
    assert left.keys() == right.keys()
    difference = sum(((left[name].double() - right[name].double()) ** 2).sum().item() for name in right)
    return float((difference / sum((value.double() ** 2).sum().item() for value in right.values())) ** 0.5)
