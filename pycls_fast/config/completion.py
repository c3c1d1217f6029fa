"""Tab completion of the shell: `eval "$(pycls-fast -sc install=bash)"`, also for zsh and fish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from pycls_fast.choice import Section
from pycls_fast.config.compose import ALIASES
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import known_keys
from pycls_fast.config.presets import groups, options
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import DONE, UserError

FLAGS = {"--cfg", "--config-dir", "--config-name", "--help", "--multirun"}


def shell_completion(
    arguments: Sequence[str], verbs: Iterable[str], find: Callable[[str], type[Section]], verb: str | None = None
) -> int:
    """Print the script of a shell (`install=bash`), which then asks what may be typed (`query=bash`)."""
    asked, _, shell = (arguments[0] if arguments else "").partition("=")
    if asked == "query":
        words = os.environ.get("COMP_LINE", "").split(" ")
        words = words[2 if words[0].rpartition("/")[2].startswith("python") else 1 :]
        print(*_completions([word for word in words[:-1] if word] + words[-1:], verbs, find, verb), sep="\n")
        return DONE
    plugins = Plugins.instance().discover(CompletionPlugin)
    shells = {plugin.provides(): plugin for plugin in plugins if issubclass(plugin, CompletionPlugin)}
    if asked not in ("install", "uninstall") or shell not in shells:
        raise UserError(f"-sc: write install=SHELL or uninstall=SHELL, of {', '.join(sorted(shells))}")
    plugin = shells[shell](ConfigLoaderImpl(create_config_search_path(None)))
    (plugin.install if asked == "install" else plugin.uninstall)()
    return DONE


def _completions(
    words: Sequence[str], verbs: Iterable[str], find: Callable[[str], type[Section]], verb: str | None
) -> Iterator[str]:
    """What the last word may become: a verb, an experiment, `group=name`, a key with its values."""
    *before, word = words or [""]
    if verb is None and not before:
        yield from (each for each in verbs if each.startswith(word))
        return
    if before and before[-1] == "--config-name":
        found = {file.stem for file in CONFIGS.glob("*.yaml")}
    elif "=" in word:
        group = word.partition("=")[0]
        found = {f"{group}={name}" for name in options(group, [CONFIGS])}
    else:
        verb = verb or before[0]
        own = find(verb).model_fields if verb in verbs else ()
        keys = [f"{key}=" for key in {*ALIASES, *own, *groups([CONFIGS]), *known_keys(RunConfig)}]
        dots = word.count(".") + 1
        # `optim.` stands for all its keys until it is typed.
        found = {key if key.count(".") < dots else ".".join([*key.split(".")[:dots], ""]) for key in keys} | FLAGS
    yield from sorted(each for each in found if each.startswith(word))
