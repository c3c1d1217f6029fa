"""Errors of Hydra, YAML and pydantic as one line each: the key, what is wrong, the way out, where it was set."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pycls_fast.choice import FAMILIES, Choice, Section
from pycls_fast.config.keys import shown_path
from pycls_fast.config.run import options
from pycls_fast.errors import UserError, did_you_mean, nearest

# Raised by composing when a file or an override is wrong, or cannot be read.
_COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError)

Where = Callable[[str], str]

# Keys under the names of other projects, for which neither their words nor their spelling would be near.
USUAL_KEYS = {
    "batch_size": "data.global_batch_size",
    "bs": "data.global_batch_size",
    "batch": "data.global_batch_size",
    "validation_batch_size": "data.eval_batch_size",
    "workers": "data.num_workers",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "resolution": "data.image_size",
    "data_dir": "data.root",
    "data_path": "data.root",
    "csv": "data.root",
    "train_split": "data.train",
    "val_split": "data.val_fraction",
    "n_splits": "data.folds",
    "fold_column": "data.group_by",
    "group_column": "data.group_by",
    "target": "data.label_column",
    "sampler": "data.sampling",
    "oversample": "data.sampling",
    "opt": "optim",
    "optimizer": "optim",
    "learning_rate": "optim.lr",
    "wd": "optim.weight_decay",
    "norm_weight_decay": "optim.decay_norms",
    "llrd": "optim.layer_decay",
    "freeze": "optim.trainable",
    "accumulate_grad_batches": "optim.accumulation_steps",
    "clip_grad": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "ema": "optim.ema_decay",
    "model_ema": "optim.ema_decay",
    "aa": "augment.policy",
    "randaug": "augment.policy",
    "auto_augment": "augment.policy",
    "trivial_augment": "augment.policy",
    "three_augment": "augment.policy",
    "reprob": "augment.erase_probability",
    "crop_pct": "augment.eval_crop_ratio",
    "num_epochs": "schedule.epochs",
    "max_epochs": "schedule.epochs",
    "num_train_epochs": "schedule.epochs",
    "lr_scheduler_type": "schedule",
    "steps": "schedule.max_steps",
    "warmup_steps": "schedule.warmup_epochs",
    "warmup_ratio": "schedule.warmup_epochs",
    "warmup_lr": "schedule.warmup_start_factor",
    "min_lr": "schedule.final_factor",
    "eta_min": "schedule.final_factor",
    "lr_step_size": "schedule.step_epochs",
    "decay_epochs": "schedule.step_epochs",
    "lr_gamma": "schedule.step_factor",
    "decay_rate": "schedule.step_factor",
    "patience": "schedule.early_stopping_evals",
    "monitor": "schedule.best_metric",
    "eval_metric": "schedule.best_metric",
    "criterion": "loss",
    "arch": "model",
    "backbone": "model",
    "stochastic_depth": "model.drop_path",
    "drop_rate": "model.options",
    "dropout": "model.options",
    "distillation_type": "distill.targets",
    "distillation_alpha": "distill.share",
    "distillation_tau": "distill.temperature",
    "amp": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "strategy": "parallel",
    "gpu": "runtime.device",
    "print_freq": "runtime.log_every_steps",
    "log_interval": "runtime.log_every_steps",
    "save_every": "runtime.checkpoint_every_steps",
    "channels_last": "speed.memory_format",
    "grad_checkpointing": "speed.recompute",
    "wandb": "trackers",
    "logger": "trackers",
    "pretrained": "weights",
    "checkpoint": "weights",
    "initial_checkpoint": "weights",
    "output_dir": "run_dir",
    "save_dir": "run_dir",
    "output": "run_dir",
    "experiment": "run_dir",
}


def section_keys(schema: type[Section]) -> dict[str, tuple[type[Section], ...]]:
    """Field name -> the section types that it may hold (none for a plain value, several for a family)."""
    return {name: tuple(_sections(field.annotation)) for name, field in schema.model_fields.items()}


def _sections(annotation: Any) -> Iterable[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        family = annotation if issubclass(annotation, Choice) and annotation in FAMILIES.values() else None
        yield from (annotation,) if family is None else family.choices().values()
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from _sections(part)


def known_keys(schema: type[Section], prefix: str = "") -> set[str]:
    """Every dotted key that the schema accepts, including those of all members of a tagged union."""
    keys = set()
    for name, sections in section_keys(schema).items():
        keys.add(prefix + name)
        for section in sections:
            keys |= known_keys(section, f"{prefix}{name}.")
    return keys


@contextmanager
def explaining(folders: Sequence[Path]) -> Iterator[None]:
    """Within the block, which composes, an error of Hydra or of a file is one line of a `UserError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except _COMPOSE_ERRORS as error:
        raise UserError(_explained(error, folders)) from error


def _explained(error: Exception, folders: Sequence[Path]) -> str:
    """Hydra's own words in one line, and the nearest name that exists in `folders`."""
    if not str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        missing = str(error.missing_cfg_file).removesuffix(".yaml")
        group, _, name = missing.rpartition("/")
        if str(error).startswith("Cannot find primary config"):
            return f"--config-name {missing or repr('')}: no such experiment{_near(name, '', folders)}"
        where = re.match(r"In '(.*?)'", str(error))
        if not group and where:
            return f"{name}: no such file in configs/{_near(name, '', folders)} (the defaults of {where[1]})"
        return f"{group}={name}: no such option{_near(name, group, folders)}"
    if isinstance(error, OverrideParseException):
        return unreadable(error.override.removeprefix("++"), folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{shown_path(Path(mark.name))}: line {mark.line + 1} is not valid YAML: {error.problem}"
    if isinstance(error, RecursionError):
        return "the defaults of a configuration file lead back to it; give it a name that none of them has"
    if isinstance(error, UnicodeDecodeError):
        return f"a configuration file is not written in UTF-8 ({error}); save it as UTF-8"
    return _one_line(error)


def unreadable(override: str, folders: Sequence[Path] = ()) -> str:
    way_out = "write key=value, quoting lists and spaces"
    if override in _available("", folders):
        way_out = f"did you mean --config-name {override}?"
    elif Path(override).is_dir():
        way_out = f"did you mean data={override}?"
    return f"cannot read '{override}' on the command line; {way_out}"


def _one_line(error: Exception) -> str:
    """An error's message on one line, without the `++` that we add to keys and OmegaConf's remarks about itself."""
    text = re.sub(r"(argument '|override |parameters ')\+\+", r"\1", re.split(r"\n\s*full_key:", str(error))[0])
    inner = re.match(r"\w+ raised while resolving interpolation: (.*)", text, re.DOTALL)
    return " ".join((inner[1].strip("\"'") if inner else text).split()) or type(error).__name__


def interpolation_mistake(error: OmegaConfBaseException, where: Where) -> UserError:
    """One line for a value that refers to what is not there, or that a file leaves open (`???`)."""
    key, what = str(error.full_key or ""), _one_line(error)
    if "Missing mandatory value" in what:
        what = f"left open as ???; set it with {key}=VALUE"
    return UserError(f"{key}: {what} ({where(key)})" if key else what)


def _available(group: str, folders: Sequence[Path]) -> list[str]:
    # `base` is what experiments begin with.
    return [name for name in options(group, folders) if group or name != "base"]


def _near(name: str, group: str, folders: Sequence[Path]) -> str:
    available = _available(group, folders)
    there = f"; there is {', '.join(available)}" if available else ""
    return did_you_mean(Path(name).stem, available, cutoff=0.5) or there


def lines(error: ValidationError, schema: type[Section], where: Where, also: Iterable[str] = ()) -> list[str]:
    """One line per bad value, in the order of the schema. `also`: further keys that exist at the top level."""
    return [_line(one, schema, where, tuple(also)) for one in error.errors(include_url=False)]


def _line(found: Mapping[str, Any], schema: type[Section], where: Where, also: tuple[str, ...]) -> str:
    """The key, pydantic's message (or ours, if another name may have been meant), and where the value was set."""
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    if kind == "json_invalid":
        return f"a value cannot be read ({context['error']}); paths must be valid UTF-8"
    key, section = _key(found["loc"], schema)
    if kind.startswith("union_tag"):
        key = f"{key}.{context['discriminator'].strip(chr(39))}"
    origin = where(key)
    if kind == "extra_forbidden":
        what = _unknown(key, section, schema, also, origin)
    elif kind == "union_tag_not_found" or (kind == "missing" and not isinstance(value, list)):
        what = f"missing; set it with {key}=VALUE"
    elif kind == "union_tag_invalid":
        what = _no_choice(context["tag"], context["expected_tags"])
        if "did you mean" not in what:
            if key == "data.source":
                # data=NAME usually means a folder.
                what = f"there is no folder {context['tag']} here; data=PATH takes its path, or a source, which {what}"
            what += "; one of your own needs imports=[MODULE]"
    elif kind == "literal_error":
        what = _no_choice(value, context["expected"])
    else:
        message = str(found["msg"]).removeprefix("Value error, ").replace("Input should be ", "must be ")
        message = message.replace("a valid array", "a list in brackets, [A,B]")
        field = None if section is None else section.model_fields.get(key.rpartition(".")[2])
        if field is not None and types.NoneType in typing.get_args(field.annotation) and "_than" in kind:
            # What 0 does not switch off, null does.
            message += ", or null"
        what = f"{message[0].lower()}{message[1:]}; got {_shown(value)}"
    if kind == "string_type" and isinstance(value, int | float):
        what += f"; quotes within quotes make it text: '{key}=\"{value}\"'"
    # A whole file has no key.
    return f"{key}: {what} ({origin})".removeprefix(": ")


def _no_choice(value: Any, expected: str) -> str:
    """`must be one of ...`, from pydantic's `'a', 'b' or 'c'`."""
    allowed = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    # A number is not a misspelling of a different number.
    near = did_you_mean(value, allowed) if isinstance(value, str) else ""
    return f"must be one of {', '.join(allowed)}; got {_shown(value)}{near}"


def _unknown(key: str, section: type[Section] | None, schema: type[Section], also: tuple[str, ...], origin: str) -> str:
    """The message for an unknown key, with the nearest one that exists."""
    parent, _, name = key.rpartition(".")
    others = [kind for kind in section_keys(schema).get(parent, ()) if name in kind.model_fields]
    if section is not None and issubclass(section, Choice) and others:
        remedy = "" if origin.endswith(("command line", "call")) else f"; leave it out with ~{key}"
        owners = " or ".join(kind.member for kind in others if issubclass(kind, Choice))
        return f"unknown key for {parent}={section.member}; it belongs to {parent}={owners}{remedy}"
    siblings = [*(section.model_fields if section is not None else ()), *(() if parent else also)]
    if found := meant(key, known_keys(schema).union(() if parent else also) - {key}):
        return f"unknown key; did you mean {', '.join(found)}?"
    if near := nearest(name, siblings):
        return f"unknown key; did you mean {f'{parent}.{near}'.lstrip('.')}?"
    return f"unknown key; {parent or 'the run'} has {', '.join(siblings)}"


def meant(key: str, known: Iterable[str]) -> list[str]:
    """The known keys that were probably meant: by a usual name, but for a letter or two, by words that few keys share,
    or of other groups."""
    group, _, name = key.rpartition(".")
    known = sorted(known)
    if USUAL_KEYS.get(name) in known:
        return [USUAL_KEYS[name]]
    last = {each: each.rpartition(".")[2] for each in known}
    # Without a group, the key may be of any; some have a short name at the top, too (`epochs`).
    here = [each for each in known if not group or each.startswith(f"{group}.")]
    if spelled := nearest(name, [last[each] for each in here], cutoff=0.85):
        return [spelled] if spelled in here else [each for each in here if last[each] == spelled]
    names = [(each, _words(each)) for each in known]
    names += [(each, _words(usual)) for usual, each in USUAL_KEYS.items() if each in known]
    rarity = {}
    for word in _words(name):
        having = {each for each, words in names if any(_alike(word, other) for other in words)}
        rarity[word] = len(having) ** -0.5 if having else 0.0
    best: dict[str, tuple[float, bool, int, int]] = {}
    for each, words in names:
        shared = sum(rarity[word] for word in rarity if any(_alike(word, other) for other in words))
        near = bool(group) and each.startswith(f"{group}.")
        likeness = round(shared, 6), near, len({*rarity} & {*words}), -len(words)
        best[each] = max(likeness, best.get(each, likeness))
    likest = [each for each in known if best[each] == max(best.values())]
    if best[likest[0]][0] > 0.5 and len(likest) <= 3:
        return likest
    return [each for each in known if last[each] == name]


def _words(key: str) -> list[str]:
    words = [word.lower() for word in re.findall("[A-Z]?[a-z0-9]+|[A-Z]+", key)]
    return [word for word in words if word not in ("n", "no", "num", "off", "on", "use")]


def _alike(word: str, other: str) -> bool:
    """Whether `word` is the other one, or one of them begins with the other (`accum`, `checkpointing`)."""
    return word == other or (len(word) >= 3 and other.startswith(word)) or (len(other) >= 4 and word.startswith(other))


def _shown(value: Any) -> str:
    # Not JSON's Infinity and NaN, but as written in YAML and on the command line.
    text = str(value) if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _key(location: tuple[int | str, ...], schema: type[Section]) -> tuple[str, type[Section] | None]:
    """The dotted key of a pydantic location, without the names of choices in it (`optim.adamw.lr`), and its section."""
    key, section, inside = "", schema, tuple[type[Section], ...]()
    for part in location:
        chosen = [each for each in inside if issubclass(each, Choice) and part == each.member]
        if isinstance(part, int):
            key += f"[{part}]"
        elif chosen:
            section, inside = chosen[0], ()
        else:
            section = inside[0] if inside else section
            key = f"{key}.{part}".lstrip(".")
            inside = section_keys(section).get(part, ())
    return key, section
