"""Train a network: `python tools/train_net.py --config-name vit_digits [key=value ...]`."""

if __name__ == "__main__":
    import pycls_fast.ctrl_c  # noqa: F401

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pycls_fast.config import NoOptions, RunConfig, command_line


def main(config: RunConfig, options: NoOptions) -> int:
    """Train as configured."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train import train

    return train(config)


def table_of(configs: Sequence[RunConfig]) -> str:
    """A note with the command that lists the runs of a sweep in one table."""
    folders = dict.fromkeys(_place(config) for config in configs)
    command = shlex.join(["python", str(Path(sys.argv[0]).with_name("runs.py")), *map(str, folders)])
    return f"list the runs of this sweep: {command}"


def _place(config: RunConfig) -> Path:
    """The folder that the runs of one sweep share."""
    if config.run_dir is None:
        return Path("runs") / config.config_name
    folder = Path(config.run_dir)
    return folder if folder.parent == Path() else folder.parent


if __name__ == "__main__":
    command_line(main, trains=True, after_sweep=table_of)
