"""Why an arm has no numbers reaches the report in a few right words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast.config.ladder import Ladder, Rung
from pycls_fast.ledger.ladder import Ledger, Settings
from pycls_fast.ledger.outcome import collect
from pycls_fast.ledger.processes import Finished
from pycls_fast.ledger.table import state

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "time_net.py", line 1, in <module>
    raise RuntimeError("nothing")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.
"""
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:     raise KeyError("x")
[rank1]: KeyError: 'x'
[rank1]: During handling of the above exception, another exception occurred:
[rank1]: RuntimeError: boom
[rank0]: torch.distributed.DistBackendError: connection closed by peer
E1121 12:00:00 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
time_net.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
============================================================
"""
KILLED = """Root Cause (first observed failure):
  traceback : Signal 9 (SIGKILL) received by PID 123
============================================================
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (
            OUT_OF_MEMORY + "UserWarning: leaked semaphore\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        ),
        (TORCHRUN, "RuntimeError: boom"),
        (KILLED, "traceback : Signal 9 (SIGKILL) received by PID 123"),
        (OUT_OF_MEMORY + "error: optim.lr: too large\n", "optim.lr: too large"),
        ("step 1\n", "step 1"),
        ("", "exit status 1"),
    ],
)
def test_what_a_process_ended_with(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert Finished(1, 1.0, tmp_path / "log").reason() == reason


def test_only_what_cannot_run_here_needs_another_device(tmp_path: Path) -> None:
    rungs = [Rung(name=name, overrides=(f"{name}=1",)) for name in ("large", "broken", "far", "odd")]
    ladder = Ladder(description="d", baseline=Rung(name="base"), rungs=tuple(rungs))
    ledger = Ledger(ladder, Settings(seeds=0), [], [], "cuda", tmp_path, tmp_path)
    for name, log in (("large", OUT_OF_MEMORY), ("broken", TORCHRUN)):
        (tmp_path / name).write_text(log)
        ledger.failed[name] = Finished(1, 1.0, tmp_path / name).reason()
    ledger.impossible |= {"far": "precision: tf32 needs CUDA", "odd": "model: has no head"}
    arms = {arm["name"]: arm for arm in collect(ledger, "vit")["arms"]}
    states = {name: state(arms[name]) for name in ("large", "broken", "far", "odd")}
    assert states == {"large": "failed", "broken": "failed", "far": "needs CUDA", "odd": "cannot run here"}
    assert arms["broken"]["reason"] == "RuntimeError: boom"
