"""Imports point one way, and no two public classes share a name.

tools -> cli -> commands -> ledger -> inference -> train -> plan -> build -> {config, parallel} -> {speed, precision,
strategies} -> {models, data, optim, losses} -> leaves.

A walk over the syntax trees, so that imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_LEAVES = {"errors", "reading", "choice", "values", "seeds", "network", "files"}
_BOTTOM = {"models", "data", "optim", "losses"}
_BUILD = _LEAVES | _BOTTOM | {"config", "loss_choices", "speed", "precision", "strategies", "parallel"}
_PLAN = _BUILD | {"build"}
_TRAIN = _PLAN | {"plan", "observers", "published"}
_INFERENCE = _TRAIN | {"train"}
_LEDGER = _INFERENCE | {"inference"}

# What each part may import besides itself. A new part has to be entered here.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "choice": {"errors"},
    "values": set(),
    "observers": {"choice", "errors", "values"},
    "seeds": set(),
    "files": set(),
    "reading": set(),
    "network": {"errors"},
    "published": set(),
    "models": _LEAVES,
    "data": _LEAVES,
    "optim": _LEAVES,
    "losses": _LEAVES,
    "loss_choices": _LEAVES | {"losses"},
    "speed": _LEAVES | {"models", "optim"},
    "precision": _LEAVES,
    "strategies": _LEAVES,
    "config": _LEAVES | {"data", "loss_choices", "models", "observers", "optim", "speed", "precision", "strategies"},
    # It asks a `Network` for its units and never sees the model's class.
    "parallel": _LEAVES | {"speed", "strategies"} | _BOTTOM - {"models"},
    "build": _BUILD,
    "plan": _PLAN,
    "train": _TRAIN,
    "inference": _INFERENCE,
    "ledger": _LEDGER,
    "commands": _LEDGER | {"ledger"},
    "cli": {"errors", "commands", "config"},
    # Five lines each, besides two that write documents.
    "tools": _LEDGER | {"cli", "ledger"},
    # `pycls_fast.load` and `train_net` import when they are called.
    "pycls_fast": _BOTTOM | {"files", "inference", "train", "cli", "config", "loss_choices", "observers"},
}

_ONLY_IN_CONFIG = {"hydra", "omegaconf"}


def violations(root: Path) -> list[str]:
    """`file:line: what is wrong` for every import that goes the wrong way."""
    found = []
    for folder in ("pycls_fast", "tools"):
        for file in sorted((root / folder).rglob("*.py")):
            relative = file.relative_to(root)
            part = _part(".".join(relative.with_suffix("").parts))
            if part not in ALLOWED:
                found.append(f"{relative}:1: the part {part} has no place in the order of imports")
                continue
            for line, module in sorted(_imports(file)):
                reason = _reason(part, module)
                if reason:
                    found.append(f"{relative}:{line}: {reason}")
    return found


def _reason(part: str, module: str) -> str:
    top = module.partition(".")[0]
    if top in _ONLY_IN_CONFIG:
        return "" if part == "config" else f"only config imports {top}"
    if top not in ("pycls_fast", "tools"):
        return ""
    imported = _part(module)
    if (part, imported) == ("train", "train_net"):
        return ""  # `pycls_fast.train(...)`: the package's function has the name of this room.
    if imported == part or imported in ALLOWED[part]:
        return ""
    if imported == "pycls_fast":
        return "" if module == "pycls_fast.__version__" else "import the part that is meant, not pycls_fast"
    return f"{part} imports {imported}"


def _part(module: str) -> str:
    """`pycls_fast.data.batch` -> data; `tools.train_net` -> tools; the package itself -> pycls_fast."""
    top, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return first if top == "pycls_fast" and not first.startswith("__") and first else top


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in a file; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(each.value)) for each in node.args[:1] if isinstance(each, ast.Constant))


def circle(root: Path) -> list[str]:
    """Files that import each other in a circle, if any; imports inside functions and under TYPE_CHECKING count.

    The package itself is left out: it has the version, and imports when its functions are called.
    """
    files = {_dotted(file.relative_to(root)): file for file in (root / "pycls_fast").rglob("*.py")}
    out = {"", "pycls_fast"}
    graph = {
        name: {_file_of(module, files) for _, module in _imports(file)} - {name} - out for name, file in files.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _dotted(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def _file_of(module: str, files: Mapping[str, Path]) -> str:
    """`pycls_fast.data.Batch` is in `pycls_fast.data`; "" for other packages."""
    while module and module not in files:
        module = module.rpartition(".")[0]
    return module


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    texts = {"a/__init__": "", "a/b": "def f():\n    from pycls_fast.c import g", "c": "from pycls_fast.a import b"}
    for name, text in texts.items():
        file = tmp_path / "pycls_fast" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert set(circle(tmp_path)) == {"pycls_fast.a.b", "pycls_fast.c"}


def test_the_order_has_no_cycle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("data/mix.py", "from pycls_fast import losses", "1: data imports losses"),
        ("optim/ema.py", "x = 1\ndef f():\n    from pycls_fast.models import ResNet", "3: optim imports models"),
        ("data/mix.py", "import importlib\nimportlib.import_module('pycls_fast.train')", "2: data imports train"),
        ("build/data.py", "import omegaconf", "1: only config imports omegaconf"),
        ("../tools/x.py", "import pycls_fast", "1: import the part that is meant, not pycls_fast"),
        ("novel/x.py", "", "1: the part novel has no place in the order of imports"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, text: str, found: str) -> None:
    path = tmp_path / "pycls_fast" / file
    for folder in (tmp_path / "tools", path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    shown = path.resolve().relative_to(tmp_path.resolve())
    assert violations(tmp_path) == [f"{shown}:{found}"]


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        (["pycls_fast"], ["torch", "numpy"]),
        pytest.param(
            [
                "pycls_fast.ledger.measure.timing",
                "pycls_fast.inference.predict",
                "pycls_fast.train.loop",
                "pycls_fast.train.tasks.lr_range",
            ],
            ["timm", "matplotlib", "torch.utils.tensorboard", "torch._dynamo"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_takes_long_to_import_is_imported_where_it_is_used(modules: list[str], late: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print([name for name in {late} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_two_public_classes_share_a_name() -> None:
    """But for `Options`, which each command has."""
    files: dict[str, Path] = {}
    for file in ROOT.glob("pycls_fast/**/*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Options":
                assert files.setdefault(node.name, file) == file, node.name
