"""Load weights into a network: ours as they are, each rank its part; all others adapted to its names and sizes.

Settings that tensors do not reveal (same names and shapes, different function) are compared for weights of our runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.keys import text_override
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError, one_of, refusing
from pycls_fast.models import pretrained
from pycls_fast.models.choices import Model
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.vit import VisionTransformer, default_classifier_norm
from pycls_fast.network import Network
from pycls_fast.optim.owned_weights import OwnedWeights, assign
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.speed import Speed
from pycls_fast.train.checkpoint import Spec
from pycls_fast.train.saved_weights import Weights, open_weights
from pycls_fast.values import Size

# The standard deviation of a new head's weights.
_SMALL = 0.01
_TIMM_SIZES = ("num_classes", "in_chans", "img_size")
_OF_ANOTHER = "weights: {} belongs to another model; model=of_weights without model.KEY=VALUE builds it"


def load_weights(
    network: Network,
    source: str | Path,
    *,
    classes: tuple[str, ...],
    model: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    for_training: bool = True,
    new_head: Literal["zero", "small"] = "small",
    world: World = ALONE,
    into: OwnedWeights | None = None,
) -> tuple[Weights, pretrained.Fitted]:
    """Load weights into the network, the average (EMA) if there is one; all ranks call this. Returns where they came
    from, and what was done to make them fit.

    From our checkpoints and safetensors files that fit as they are, each rank reads only its part. Everything else is
    read completely by every rank, and adapted.

    Args:
        classes: of the data, in the order of the outputs.
        model: the section of the configuration that the network is built from; None: not compared with the weights'.
        allow: see `pretrained.fit`.
        for_training: if the source's classes differ, the head is newly initialised; otherwise that is an error.
        into: the flat shards that hold the weights; `network`, perhaps on the meta device, then only gives the shapes.
    """
    weights = open_weights(source, world)
    # A repository's name says more than the place of its copy on this machine.
    name = str(source if str(source).startswith(pretrained.HUGGING_FACE) else weights.path)
    state = network.state_dict() if into is None else into.state_dict()
    same_classes = first_other_class(weights.classes, classes) is None
    image_size = trained_size(weights)
    # 9 x 4 patches have as many positions as 6 x 6.
    has_positions = isinstance(network, VisionTransformer) or "network.pos_embed" in state
    same_grid = not has_positions or image_size in (None, network.image_size)
    if model is not None and weights.config is not None:
        head = weights.specs.get(f"{network.head_name}.weight")
        has_head = same_classes and head is not None and head.shape[0] == network.last_layer().out_features
        if not is_same_model(model, weights.config["model"], name, fresh_head=not has_head):
            raise UserError(_OF_ANOTHER.format(name))
    if same_classes and same_grid and _shapes(weights.specs) == _shapes(state):
        with torch.no_grad():
            weights.fill(state)
        fitted = pretrained.Fitted(name, pretrained.OURS, weights.kind, loaded=list(weights.specs))
    else:
        fitted = _read_to_fit(weights, name, network, classes, image_size, allow=allow, for_training=for_training)
        weights = replace(weights, kind="ema") if "ema" in fitted.part else weights
        for key, tensor in fitted.tensors.items():
            assign(state[key], tensor)
        if for_training:
            _initialise_head(network, state, fitted, new_head)
    if into is not None:
        # `into.state_dict()` returned copies.
        into.load_state_dict(state)
    return weights, fitted


def load_network(
    config: RunConfig, data: Images, world: World, switches: Speed, *, for_training: bool
) -> tuple[Network, Weights, pretrained.Fitted]:
    """The network with the weights that `weights` names, on its device and in the precision's format; and what
    `load_weights` returns."""
    assert config.weights is not None
    network = build.model(config, build.num_classes(config, data), switches)
    weights, fitted = load_weights(
        network,
        config.weights,
        classes=data.classes,
        model=config.model.model_dump(mode="json"),
        allow=config.weights_allow,
        for_training=for_training,
        world=world,
    )
    network = place_model(network, world, memory_format=switches.memory_format)
    build.apply_precision(config, network, world.device)
    return network, weights, fitted


def open_trained(source: str | Path, *, kind: str = "auto") -> Weights:
    """Weights that say their model, classes and preprocessing: those of `open_weights`, or of timm, torchvision or a
    folder of timm's, with their own head, which are read here and given as if a run had saved them.

    Raises:
        UserError: as `open_weights`, and for weights of another project that say no model, or have no head.
    """
    weights = open_weights(source, kind=kind)
    if weights.config is not None:
        return weights
    about = weights.description()
    if about is None or not about.classes:
        weights.require_model()
    assert about is not None
    one_of("which", kind, ("auto", weights.kind), more=f" for {source}")
    named = about.weights if weights.hub else str(source)
    given = [text_override("weights", named), "data.normalization=configured"]
    config = build.with_preprocessing(load_config("finetune", given, needs_data=False), about)
    # Do not advance the caller's generator.
    with torch.random.fork_rng(devices=[]):
        network = build.model(config, len(about.classes), build.switches(config, torch.device("cpu")))
        load_weights(network, source, classes=about.classes, for_training=False)
    tensors = network.state_dict()

    def fill(given: Mapping[str, Tensor]) -> None:
        for name, tensor in given.items():
            tensor.copy_(tensors[name])

    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return replace(weights, specs=specs, classes=about.classes, config=config.model_dump(mode="json"), fill=fill)


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _initialise_head(
    network: Network, state: Mapping[str, Tensor], fitted: pretrained.Fitted, how: Literal["zero", "small"]
) -> None:
    """Give a head that was left without values small random ones, or zeros.

    Constructors draw for training from scratch: timm's EfficientNet has a first loss of 5 to 6 for ten classes. Our
    ViTs begin as their recipes say.
    """
    weight, bias = f"{network.head_name}.weight", f"{network.head_name}.bias"
    if weight not in fitted.fresh or (how == "small" and isinstance(network, VisionTransformer)):
        return
    drawn = torch.randn(tuple(state[weight].shape), generator=torch.Generator().manual_seed(0))
    assign(state[weight], drawn * (_SMALL if how == "small" else 0.0))
    if bias in state:
        assign(state[bias], torch.zeros(tuple(state[bias].shape)))


def trained_size(weights: Weights) -> Size | None:
    """The size of the images that weights are for, if they say it."""
    if weights.config is not None:
        return Size.of(weights.config["data"]["image_size"])
    about = weights.said()
    return None if about is None else about.trained_size


def _read_to_fit(
    weights: Weights,
    name: str,
    network: Network,
    classes: tuple[str, ...],
    image_size: Size | None,
    *,
    allow: Sequence[str],
    for_training: bool,
) -> pretrained.Fitted:
    """Tensors with the network's names and shapes; tensors of different sizes are adapted or left out."""
    found, before, about = weights.path, weights.classes or (), weights.said()
    place = first_other_class(weights.classes, classes)
    if place is not None and not for_training:
        raise UserError(
            f"weights: {name} was trained on different classes than data.root has: output {place} was "
            f"{_named(before, place)} and is {_named(classes, place)}"
        )
    if Path(found).is_dir():
        tensors = weights.read()
        read = pretrained.ReadWeights(name, pretrained.OURS, tensors, part=weights.kind, plain=tensors)
    else:
        read = replace(pretrained.read_weights(str(found), about), source=name)
    if weights.config is not None and "classifier" in weights.config["model"]:
        norm = _classifier_norm(weights.config["model"]) or "before_pool"
        read = replace(read, traits=replace(read.traits, classifier_norm=norm))
    other_classes = 0 if place is None else len(before)
    try:
        fitted = pretrained.fit(read, network, allow=allow, image_size=image_size, other_classes=other_classes)
    except pretrained.Mismatch as error:
        of_another = [] if weights.config is None else [_OF_ANOTHER.format(name)]
        raise UserError(*of_another, *_mismatch_lines(error, network, about, name)) from error
    if fitted.fresh and not for_training:
        fresh, reason = next(iter(fitted.fresh.items()))
        raise UserError(
            f"weights: {name} leaves {len(fitted.fresh)} tensors of the model without values ({fresh}: {reason}), so "
            "it cannot be scored; train first, or choose the model that it belongs to"
        )
    return fitted


def _mismatch_lines(
    error: pretrained.Mismatch, network: Network, about: pretrained.Description | None, source: str
) -> Sequence[str]:
    """The lines of a mismatch, and timm's model that the weights belong to, if they say it and it is another."""
    name = "" if about is None else about.architecture
    if not name or (isinstance(network, TimmNetwork) and _without_tag(network.name) == name):
        return error.lines
    use = f"use model=timm model.name={name}"
    if isinstance(error, pretrained.UnknownKind):
        return [f"weights: {source} belongs to timm's {name}; {use}"]
    *lines, last = error.lines
    return [*lines, f"weights: {use}, or {last.removeprefix('weights: ')}"]


def _without_tag(name: str) -> str:
    return name.partition(".")[0]


def first_other_class(saved: Sequence[str] | None, now: Sequence[str]) -> int | None:
    """The first output whose class differs from when the weights were saved; None if there is none."""
    if saved is None or tuple(saved[: len(now)]) == tuple(now):
        return None
    pairs = enumerate(zip(saved, now, strict=False))
    return next((place for place, (before, after) in pairs if before != after), len(saved))


def _named(classes: Sequence[str], place: int) -> str:
    return classes[place] if place < len(classes) else "none"


def is_same_model(model: Mapping[str, Any], trained: Mapping[str, Any], source: str, *, fresh_head: bool) -> bool:
    """Whether a network computes what saved weights were trained to compute: the same names and shapes of tensors may
    stand for another function. Both are sections `model`; missing keys are not compared."""
    with refusing(f"weights: {source}: the model it was trained as cannot be read", LookupError, TypeError, ValueError):
        before, now = (_settings_of_function(section, fresh_head=fresh_head) for section in (trained, model))
    return all(before[key] == now[key] for key in now.keys() & before.keys())


def _settings_of_function(model: Mapping[str, Any], *, fresh_head: bool) -> dict[str, Any]:
    """The settings that change what is computed with the same names and shapes of tensors."""
    kind = model.get("kind")
    if kind == "timm":
        # Without the name's tag (it selects weights) and dropout (active only in training).
        left_out = (*_TIMM_SIZES, "global_pool") if fresh_head else _TIMM_SIZES
        options = {k: v for k, v in model.get("options", {}).items() if "drop" not in k and k not in left_out}
        return {"name": _without_tag(model["name"]), "options": options}
    family = Model.choices().get(str(kind))
    found = {key: model[key] for key in (() if family is None else family.function_keys) if key in model}
    if kind == "vit" and "classifier" in model and not fresh_head:
        found["classifier"] = model["classifier"]
        found["classifier_norm"] = _classifier_norm(model)
    return found


def _classifier_norm(model: Mapping[str, Any]) -> str | None:
    """The place of the norm; None for the class token, where both places give the same function."""
    classifier = model["classifier"]
    return None if classifier == "token" else model.get("classifier_norm") or default_classifier_norm(classifier)
