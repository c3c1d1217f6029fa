"""Training from Python: an experiment by its name, as on the command line, and what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.config.compose import check, compose, notes
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.keys import CONFIGS
from pycls_fast.errors import DONE, UserError, is_first_of_node
from pycls_fast.files import user_path
from pycls_fast.train.loop import train


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        run_dir: the run's folder, which `pycls_fast.load` takes.
        status: 0 if it is done, 3 if a signal stopped it with everything saved; the same `run_dir` resumes it.
    """

    run_dir: Path
    status: int

    @property
    def summary(self) -> dict[str, Any] | None:
        """The values of `summary.json`, which rank 0 writes; None if the training was stopped."""
        if self.status != DONE:
            return None
        values: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        return values


def train_net(experiment: str, overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> Trained:
    """Train as `pycls-fast train` does, in this process.

        trained = pycls_fast.train_net("finetune", ["data.root=my_images", "weights=RUN"])
        print(trained.summary["best"]["top1"])
        classifier = pycls_fast.load(trained.run_dir)

    Args:
        experiment: what `--config-name` takes: a file of `configs/` or of `config_dir`, without `.yaml`.
        overrides: as on the command line, e.g. `["model=vit_s16", "optim.lr=1e-3"]`.
        config_dir: a folder of your own experiments and groups, as `--config-dir`.

    Raises:
        UserError: a mistake in the configuration or the data, one line each, or a loss that is not finite.
        SystemExit: other ranks were lost; the status is 1, so that torchrun restarts all of them.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides: must be a list of key=value; got the text {overrides}; write [{overrides!r}]")
    composed = compose(experiment, overrides, [CONFIGS, *([] if config_dir is None else [user_path(config_dir)])])
    config = check(composed, Purpose(trains=True))
    if is_first_of_node():
        for note in notes(config, composed):
            print(f"note: {note}", file=sys.stderr)
    folders: list[Path] = []
    status = train(config, on_start=folders.append, command=_call(experiment, overrides, config_dir))
    return Trained(folders[0], status)


def _call(experiment: str, overrides: Sequence[str], config_dir: str | Path | None) -> str:
    """The call as Python code. The process's command line would be that of a notebook's kernel."""
    arguments = [repr(experiment), repr(list(overrides))]
    if config_dir is not None:
        arguments.append(f"config_dir={str(config_dir)!r}")
    return f"pycls_fast.train_net({', '.join(arguments)})"
