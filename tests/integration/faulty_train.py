"""tools/train_net.py with one fault put in, and a record of the images that each step was given.

    FAULT='{"kind": "die", "at": "after write", "step": 10, "rank": 1}' SEEN=FOLDER python faulty_train.py ...

A fault happens once: a file beside the records says that it did. With `"times": 2` it happens again at the same point
of the next save. Kinds: `hang` (the rank sleeps instead of computing a step), `die` (kill -9 at a point of a save),
`full` (writing fails as on a full disk).
"""

from __future__ import annotations

import errno
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from pycls_fast.data.batch import Batch
from pycls_fast.train import saving
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.step import Step

ROOT = Path(__file__).parents[2]
RANK = int(os.environ.get("RANK", "0"))
SEEN = Path(os.environ["SEEN"])
FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))


def happens(at: str, step: int) -> bool:
    """Whether the fault is due, and has not happened as often as it should."""
    if FAULT.get("at") != at or FAULT["rank"] != RANK or step < FAULT["step"]:
        return False
    marker = SEEN / "fault.happened"
    times = len(marker.read_text()) if marker.exists() else 0
    due = times < FAULT.get("times", 1) and (times > 0 or step == FAULT["step"])
    if due:
        marker.write_text("x" * (times + 1))
    return due


def act(at: str, step: int) -> None:
    if not happens(at, step):
        return
    if FAULT["kind"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT["kind"] == "hang":
        time.sleep(3600)
    else:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def before_and_after(module: Any, name: str, step_of: Callable[..., int]) -> None:
    """Put `before NAME` and `after NAME` around a function of a module."""
    inner = getattr(module, name)

    def outer(*arguments: Any) -> Any:
        act(f"before {name}", step_of(*arguments))
        result = inner(*arguments)
        act(f"after {name}", step_of(*arguments))
        return result

    setattr(module, name, outer)


def step_in(path: Path) -> int:
    """Of `.step_000000010.12345678.tmp` or `step_000000010`."""
    return int(path.name.split("step_")[1][:9])


before_and_after(saving, "_begin", lambda folder, step: step)
before_and_after(saving, "_write_tensors", lambda tensors, folder, world: step_in(folder))
before_and_after(FileSystemWriter, "write_data", lambda self, plan, planner: step_in(Path(self.path)))
before_and_after(saving, "_publish", lambda temporary, values: step_in(temporary))
flush = saving.flush


def half_a_file(file: Any) -> None:
    """`in state.json`: killed when half of it is written."""
    path = Path(file.name)
    if happens("in state.json", step_in(path.parent)):
        file.flush()
        path.write_text(path.read_text()[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    flush(file)


saving.flush = half_a_file  # type: ignore[attr-defined]
compute = Step.__call__


def recorded(self: Step, step: int, microbatches: Iterable[Batch], metrics: TrainMetrics) -> None:
    microbatches = list(microbatches)
    act("step", step + 1)
    # Seconds, so that there is time to do something to the run from outside.
    time.sleep(FAULT.get("pause", 0.0))
    compute(self, step, microbatches, metrics)
    indices = [index for batch in microbatches for index in batch.indices_B.tolist()]
    with (SEEN / f"{RANK}.{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "step": step, "indices": indices}) + "\n")


Step.__call__ = recorded  # type: ignore[method-assign]
tool = ROOT / "tools" / "train_net.py"
sys.argv[0] = str(tool)
runpy.run_path(str(tool), run_name="__main__")
