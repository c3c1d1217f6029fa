"""Training from Python: an experiment by its name, as on the command line, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from pycls_fast.choice import Choice, give
from pycls_fast.config import overrides_name
from pycls_fast.config.compose import as_hydra_overrides, check, compose, default_experiment, long_name, notes
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.keys import CONFIGS, as_typed, quoted, text_override
from pycls_fast.data.sources.hub import is_of_hugging_face
from pycls_fast.errors import DONE, UserError, print_lines
from pycls_fast.files import user_path
from pycls_fast.inference.classifier import Classifier, Prediction, load
from pycls_fast.inference.export import export
from pycls_fast.train.environment import Call
from pycls_fast.train.loop import train


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        run_dir: the run's folder, which `pycls_fast.load` takes.
        status: 0 if it is done, 3 if a signal stopped it with everything saved; the same `run_dir` resumes it.
        model: the module that was given to be trained, if one was: later runs may be given others of its class.
    """

    run_dir: Path
    status: int
    model: nn.Module | None = None

    @property
    def best(self) -> Path:
        """The weights of the best checkpoint in one file, which is written when the training ends."""
        return self.run_dir / "best.safetensors"

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The scores of the best evaluation (`top1`, `top5`, `loss`, `step`, ...); None if there was none."""
        return None if self.summary is None else self.summary["best"]

    @cached_property
    def classifier(self) -> Classifier:
        """The best weights, ready for images: `pycls_fast.load(run_dir)`."""
        return load(self.run_dir, model=self.model)

    def predict(self, images: Any, **options: Any) -> list[Prediction]:
        """The likeliest classes of images in any form, with the options of `Classifier.stream` (`topk`, `tta`, ...)."""
        return self.classifier.predict(images, **options)

    def export(self, output: str | Path, **options: Any) -> Path:
        """Write the best weights for other programs; the options are the keys of `pycls-fast export`."""
        if self.model is not None:
            give(self.model)
        export(str(self.run_dir), str(output), **options)
        return user_path(str(output))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The values of `summary.json`, which rank 0 writes; None on another rank of a training that was stopped."""
        file = self.run_dir / "summary.json"
        return json.loads(file.read_text(encoding="utf-8")) if self.status == DONE or file.is_file() else None


def train_net(
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | Path | None = None,
    **values: Any,
) -> Trained:
    """Train as `pycls-fast train` does, in this process; `pycls_fast.train` is the same.

        run = pycls_fast.train(data="my_images", weights="timm:resnet50.a1_in1k", epochs=10)
        print(run.metrics["top1"], run.predict("more_images")[0].class_name)
        run.export("model.onnx", format="onnx")

    Args:
        experiment: what `--config-name` takes: a file of `configs/` or of `config_dir`, without `.yaml`; None: finetune
            for own images, weights or a module, else the digits.
        overrides: as on the command line, e.g. `["model=vit_s16", "optim.lr=1e-3"]`.
        config_dir: a folder of your own experiments and groups, as `--config-dir`.
        values: the same keys as arguments, with `__` for a dot (`optim__lr=1e-3`), or a section as a dictionary. `data`
            may be a `Dataset` of torch (`DatasetImages`) or Hugging Face, or a dictionary of them, `model` a torch
            module with a pretrained trunk (`models.external`), which is copied; `head="small"` keeps its head, too.
            `callbacks`, `trackers`, `optim`, `loss` and `schedule` may be objects.

    Raises:
        UserError: a mistake in the configuration or the data, one line each, or a loss that is not finite.
        SystemExit: other ranks were lost; the status is 1, so that torchrun restarts all of them.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides: must be a list of key=value; got the text {overrides}; write [{overrides!r}]")
    folders = [CONFIGS, *([] if config_dir is None else [user_path(config_dir)])]
    given = [_overrides(key.replace("__", "."), value, folders) for key, value in values.items()]
    typed = [*overrides, *chain.from_iterable(given)]
    experiment = experiment or default_experiment(typed, folders)
    composed = replace(compose(experiment, typed, folders), typed="the call")
    config = check(composed, Purpose(trains=True))
    print_lines("note", notes(config, composed))
    # Of a module or a data set only that it is given.
    settings = overrides_name(as_hydra_overrides([*overrides, *(first for first, *_ in given)], folders))
    run_dirs: list[Path] = []
    status = train(config, on_start=run_dirs.append, call=Call(_code(experiment, typed, config_dir), settings))
    model = values.get("model")
    return Trained(run_dirs[0], status, model if isinstance(model, nn.Module) else None)


def _overrides(key: str, value: object, folders: Sequence[Path]) -> list[str]:
    if isinstance(value, nn.Module):
        # It brings its weights, and nobody knows what they were normalised with.
        own = ["needs_weights=false", "data.normalization=configured"]
        outputs = [layer.out_features for layer in value.modules() if isinstance(layer, nn.Linear)][-1:]
        own += [f"{key}.num_classes={count}" for count in outputs]
        return [f"{key}=given", f"{key}.module={give(value)}", *own]
    several = value.values() if isinstance(value, Mapping) else [value]
    if any(isinstance(each, Dataset) or is_of_hugging_face(each) for each in several):
        return [f"{key}.source=given", f"{key}.dataset={give(value)}"]
    if getattr(value, "shape", ()):
        raise UserError(f"{key}: must not be an array; give a list of numbers, or images as a torch Dataset")
    if isinstance(value, Path):
        # Whatever its name looks like.
        return [f"{'data.root' if key == 'data' else key}={quoted(str(value))}"]
    if isinstance(value, str):
        key, _, value = long_name(f"{key}={value}", folders).partition("=")
        return [text_override(key, value)]
    if isinstance(value, Choice) and key != "model":
        # Of another choice no key stays. (A model's options are no names of classes.)
        return [f"{key}={value.member}", f"{key}={as_typed(value)}"]
    return [f"{key}={as_typed(value)}"]


def _code(experiment: str, overrides: Sequence[str], config_dir: str | Path | None) -> str:
    """The call as Python code. The process's command line would be that of a notebook's kernel."""
    arguments = [repr(experiment), repr(list(overrides))]
    if config_dir is not None:
        arguments.append(f"config_dir={str(config_dir)!r}")
    return f"pycls_fast.train_net({', '.join(arguments)})"
