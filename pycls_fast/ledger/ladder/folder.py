"""A ledger's folder: its plan, the code and machine it belongs to, its lock, and what is read from its files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pycls_fast.config import RunConfig
from pycls_fast.config.keys import CONFIGS, flat
from pycls_fast.config.ladder import Mode, Variant
from pycls_fast.config.run import groups
from pycls_fast.errors import UserError, first_few, refusing
from pycls_fast.files import LEDGERS
from pycls_fast.ledger.ladder.plan import Factors, readable, slug
from pycls_fast.ledger.report.record import Rounding
from pycls_fast.reading import Model, Saved, check, read_json
from pycls_fast.train.environment import environment, versions
from pycls_fast.train.folder import RunFolder, write_json
from pycls_fast.values import ImageSize

_PACKAGE = Path(__file__).parents[2]


class SavedPlan(BaseModel):
    """The plan that a folder belongs to, with the digests of the code that measured, the seconds that all starts have
    worked, and what is known of the variants as factors of the trainings."""

    model_config = ConfigDict(extra="allow")

    code: list[str]
    worked: NonNegativeFloat = 0.0
    crossing: Factors | None
    experiment: dict[str, Any] = {}


class SavedFailure(Saved):
    """Why a training ended without a result."""

    reason: str


class _Scores(Saved):
    top1: NonNegativeFloat
    count: PositiveInt


class SavedResult(Saved):
    """A training's result."""

    final: _Scores
    wall_seconds: NonNegativeFloat


class SavedRounding(Saved):
    """A variant's rounding errors, and the digest of its weights."""

    errors: list[Rounding]
    weights: str | None = None


class SavedSpeed(Saved):
    """How fast any part is: the median of its steps."""

    step_seconds_p50: PositiveFloat


class SavedSteps(SavedSpeed):
    """Training steps; rates in images/s."""

    images_per_second: PositiveFloat
    images_per_step: PositiveInt
    step_seconds_each: list[list[PositiveFloat]]
    flops_per_second: PositiveFloat | None = None
    share_of_matmul: NonNegativeFloat | None = None


class _Matmul(Saved):
    flops_per_second: PositiveFloat


class SavedTiming(Saved):
    """A timing of training steps, and what was timed."""

    train: SavedSteps
    memory_peak_bytes: NonNegativeInt | None
    matmul: _Matmul | None = None
    model: str
    parameters: NonNegativeInt
    train_forward_flops_per_image: NonNegativeInt
    train_image_size: ImageSize
    precision: str
    switches: dict[str, Any]
    device: str
    steps_per_run: NonNegativeInt
    evaluated_images: NonNegativeInt
    evaluated_images_per_run: NonNegativeInt


def read_measurement(file: Path, kind: type[Model]) -> Model:
    """What a file says. A `UserError` if it is damaged, for example by a power failure."""
    with refusing(f"output: {file} is damaged", OSError, ValueError, use="remove it, and it is measured again"):
        return check(kind, read_json(file))


class LedgerFolder:
    """The folder of one ledger, which belongs to a plan and to the code that it was measured with.

    Args:
        code: returns the digest of the current code.
        accept_code: whether the folder may hold measurements of different code.
    """

    def __init__(self, path: Path, *, code: Callable[[], str] = str, accept_code: bool = False) -> None:
        self.path = path
        self._plan_file = path / "plan.json"
        # Digests of all code that it was measured with.
        self.codes: list[str] = []
        # Its variants as factors of the trainings, once it trains.
        self.factors: Factors | None = None
        self._code, self._accept_code = code, accept_code
        self._plan: dict[str, Any] = {}
        # Seconds worked in earlier starts, and when this one began.
        self._before, self._started = 0.0, time.monotonic()

    @contextmanager
    def opened(self, plan: Mapping[str, Any]) -> Iterator[None]:
        """Create the folder, or resume in it; it is locked inside the context. A `UserError` if it holds results of a
        different plan, another ledger is using it, or it cannot be written to."""
        with ExitStack() as stack:
            with refusing(f"output: {self.path} cannot be written to", use="give another"):
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunFolder(self.path)).lock(0, key="output")
                self.check(plan)
                self._started = time.monotonic()
                self.save()
            stack.callback(self.save)
            yield

    def check(self, plan: Mapping[str, Any]) -> None:
        """Check that the folder is new or belongs to the plan and the code; writes nothing. A `UserError` if it holds
        results of a different plan or of different code."""
        self._plan = json.loads(json.dumps(plan))
        if not self._plan_file.is_file():
            self.codes = [self._code()]
            return
        way_out = "choose another folder, or remove it"
        with refusing(f"output: {self._plan_file} cannot be read", OSError, ValueError, use=way_out):
            before = read_json(self._plan_file)
            kept = check(SavedPlan, before)
        # After a verdict its trainings and the margin are fixed, too.
        fixed = _UNTIL_VERDICTS if kept.crossing is not None and kept.crossing.looked else ()
        asked = {key: value for key, value in self._plan.items() if key not in _MAY_GROW or key in fixed}
        other = changed(before, asked)
        if self._code() not in kept.code and not self._accept_code:
            other.insert(0, "code (accept_code=true, if the change does not affect the measurements)")
        if other:
            raise UserError(f"output: {self.path} holds a ledger with different {first_few(other)}; {way_out}")
        self.codes, self.factors, self._before = kept.code, kept.crossing, kept.worked

    @property
    def seconds(self) -> float:
        """Seconds worked in all starts up to now."""
        return self._before + time.monotonic() - self._started

    def save(self) -> None:
        """Save the plan with what is known by now; a kill -9 loses the seconds since."""
        factors = None if self.factors is None else asdict(self.factors)
        write_json(self._plan_file, {**self._plan, "code": self.codes, "worked": self.seconds, "crossing": factors})

    def keep_factors(self, factors: Factors) -> None:
        """Save the variants as factors of the trainings, so that a later start has the same design."""
        self.factors = factors
        self.save()

    def note_code(self) -> None:
        """Record the code of the next measurement, which may have been accepted, or edited while the ledger runs."""
        if (now := self._code()) not in self.codes:
            self.codes.append(now)
            self.save()

    def timing_file(self, variant: Variant, number: int) -> Path:
        return self.path / "timings" / slug(variant) / f"round_{number}.json"

    def file(self, kind: Literal["numerics", "gradients"], variant: Variant) -> Path:
        return self.path / kind / f"{slug(variant)}.json"

    def run_dir(self, variant: Variant, seed: int) -> Path:
        return self.path / "runs" / slug(variant) / f"seed_{seed}"

    def log_file(self, made: Path) -> Path:
        name = made.relative_to(self.path).with_suffix("").as_posix().replace("/", "-")
        return self.path / "logs" / f"{name}.txt"

    def timings(self, variant: Variant, rounds: int) -> list[SavedTiming]:
        """Records of those of a variant's `rounds` rounds that exist, in order."""
        files = (self.timing_file(variant, number) for number in range(rounds))
        return [read_measurement(file, SavedTiming) for file in files if file.is_file()]


# What may change when a ledger is resumed: more trainings or rounds extend the same plan.
_UNTIL_VERDICTS = ("margin", "runs_at_most")
_MAY_GROW = ("rounds", "jobs", "gradients", *_UNTIL_VERDICTS)


def default_folder(config_name: str, ladder: str, mode: Mode, switches: Sequence[str]) -> Path:
    """The default folder of a ledger; the same each time, so that it resumes after a kill."""
    picked = f"-{readable(' '.join(sorted(switches)))}" if switches else ""
    return Path(LEDGERS) / f"{config_name}-{Path(ladder).stem}-{mode}{picked}"


def conditions(config: RunConfig, device: str) -> dict[str, Any]:
    """The experiment with all its settings, the machine (device: "cpu" or "cuda"), torch, torchvision and timm."""
    here = environment(torch.device("cpu"), 1)
    return {
        "experiment": config.model_dump(mode="json", exclude={"run_dir"}),
        "device": _gpu() if device == "cuda" else device,
        "processor": here["processor"],
        "cores": here["cpu_count"],
        "torch": torch.__version__,
        **{name: versions()[name] for name in ("torchvision", "timm")},
    }


_INSTALLED = {"site-packages", "dist-packages"}


def files_of(imports: Iterable[str]) -> list[Path]:
    """The files of the user's modules, which this process has imported, those of their packages, and of what these
    import from the folder that they are in (not Python, which may be there, nor what is installed or the command)."""
    others, found = {*sys.stdlib_module_names, "__main__", "__mp_main__", _PACKAGE.name}, set[Path]()
    own = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] not in others]
    loaded = [Path(file) for each in own if (file := getattr(each, "__file__", None))]
    for name in imports:
        # A folder without `__init__.py` has no file.
        if file := getattr(sys.modules[name], "__file__", None):
            module, is_package = Path(file), Path(file).stem == "__init__"
            found |= set(module.parent.rglob("*.py")) if is_package else {module}
            folder = module.parents[name.count(".") + is_package]
            found |= {each for each in loaded if each.is_relative_to(folder) and _INSTALLED.isdisjoint(each.parts)}
    return sorted(found)


def code_digest(configs: Sequence[Path], trees: Sequence[Path] = (), own: Sequence[Path] = ()) -> str:
    """SHA-256 of the code that a variant's processes run; takes milliseconds.

    Args:
        configs: folders of configurations. Only the files of groups count, which variants choose by name: the plan
            itself holds the experiment and the ladder.
        trees: other checkouts that variants run.
        own: the user's files (`files_of`).
    """
    found = hashlib.sha256()
    for file in own:
        with suppress(OSError):
            found.update(file.read_bytes())
    for package, folders in ((_PACKAGE, configs), *((t / "pycls_fast", [t / "configs"]) for t in trees)):
        files = [(package, file) for pattern in ("*.py", "*.c") for file in package.rglob(pattern)]
        files += [
            (root, file) for root in folders for each in groups([CONFIGS]) for file in (root / each).glob("*.yaml")
        ]
        for name, file in sorted((os.fsencode(file.relative_to(root)), file) for root, file in files):
            # Unreadable: the lock file of an editor, or a file that is being replaced.
            with suppress(OSError):
                found.update(repr((name, hashlib.sha256(file.read_bytes()).digest())).encode())
    return found.hexdigest()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the plan's entries that differ from an earlier plan's; for the experiment, the keys that differ."""
    names = [name for name, value in now.items() if value != before.get(name)]
    if "experiment" not in names:
        return names
    old, new = (flat(plan.get("experiment", {})) for plan in (before, now))
    keys = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    # The keys say what changed; that `base` differs too adds nothing.
    return [*(name for name in names if name not in ("base", "experiment")), *keys]


def _gpu() -> str:
    # Asked in a separate process: this one must not hold GPU memory while variants are measured.
    code = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
