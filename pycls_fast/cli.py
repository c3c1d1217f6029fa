"""The command `pycls-fast VERB ...`; `python -m pycls_fast VERB ...` and the files of `tools/` are the same."""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from pycls_fast import __version__
from pycls_fast.errors import DONE, MISTAKE, did_you_mean, end_imports_at_ctrl_c, reporting

if TYPE_CHECKING:
    from pycls_fast.config import Verb

VERBS = {
    "train": ("train", "data=my_images weights=timm:resnet50.a1_in1k epochs=10"),
    "test": ("weights", "RUN output=scores.json"),
    "predict": ("weights", "RUN more_images format=csv"),
    "export": ("weights", "RUN model.onnx"),
    "prepare": ("train", "verify data=my_images"),
    "time": ("measure", "--config-name vit_s16 'compare=[speed=reference,speed=fast]'"),
    "ledger": ("measure", "--config-name vit_digits ladder=modern"),
    "compare": ("measure", "RUN OTHER_RUN"),
    "runs": ("measure", "runs/finetune"),
    "knn": ("weights", "timm:resnet50.a1_in1k data=my_images"),
    "soup": ("weights", "RUN RUN RUN output=soup.safetensors"),
    "calibrate": ("weights", "RUN output=calibrated.safetensors"),
    "lr-find": ("train", "data=my_images weights=timm:resnet50.a1_in1k"),
    "maps": ("weights", "RUN cat.jpg"),
    "plan": ("train", "--config-name vit_h16 cluster=h100x64"),
}
"""The verbs: their files in `commands/`, and the words of one call, for the list of verbs and a call without a key."""


def main(verb: str | None = None) -> NoReturn:
    """Run a verb from `sys.argv`, and exit with its status; without an argument, the first word is the verb."""
    # Before anything that takes time to import; and not in the processes that a command starts.
    end_imports_at_ctrl_c()
    # What is imported is hundreds of thousands of objects, no garbage: to look for it took a tenth of a short command.
    gc.set_threshold(10_000, 10, 10)
    if "--version" in sys.argv[1:]:
        print(f"pycls-fast {__version__}")
        raise SystemExit(DONE)
    if sys.argv[1:2] in (["-sc"], ["--shell-completion"]):
        from pycls_fast.config.help import shell_completion

        raise SystemExit(reporting(lambda: shell_completion(sys.argv[2:], VERBS, find_verb, verb)))
    if verb is None and sys.argv[1:2] in ([], ["--help"], ["-h"], ["help"]):
        raise SystemExit(reporting(_print_verbs))
    if verb is None:
        verb = _first_word()
        del sys.argv[1]
    chosen = find_verb(verb)
    from pycls_fast.config import command_line

    command_line(chosen)


def find_verb(name: str) -> "type[Verb]":
    module = import_module(f"pycls_fast.commands.{VERBS[name][0]}")
    found: type[Verb] = getattr(module, f"{name.title().replace('-', '')}Verb")
    found.example = f"pycls-fast {name} {VERBS[name][1]}"
    return found


def _first_word() -> str:
    word = sys.argv[1]
    if word in VERBS:
        return word
    from pycls_fast.config.keys import CONFIGS

    way_out = did_you_mean(word, VERBS) or f"; the verbs are {', '.join(VERBS)}"
    if (CONFIGS / f"{word}.yaml").is_file():
        way_out = f", but an experiment: pycls-fast train --config-name {word}"
    print(f"error: {word}: no such verb{way_out}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def _print_verbs() -> int:
    print("pycls-fast VERB [--config-name EXPERIMENT] [key=value ...]\n")
    for each in VERBS:
        chosen = find_verb(each)
        print(f"{each:9} {(chosen.__doc__ or '').partition(':')[0]}\n          $ {chosen.example}")
    print('\npycls-fast VERB --help says more; eval "$(pycls-fast -sc install=bash)" makes Tab complete words.')
    return DONE
