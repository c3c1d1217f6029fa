"""Training. start.py prepares a run of the parts that assemble.py builds, and loop.py trains it, by step.py.

A new head is fitted in head.py. validation.py scores, by evaluate.py; saving.py and checkpoint.py save, resume.py
loads; summary.py ends a run. folder.py has the files of a run, tasks/ what is done with saved weights.

Called, the room is `pycls_fast.train_net`, whose help says what it takes.
"""

import sys
from types import ModuleType
from typing import Any

from pycls_fast.train.loop import train


class _Callable(ModuleType):
    """The function that users call, `pycls_fast.train(data=..., weights=...)`, has the name of this room."""

    def __call__(self, *given: Any, **values: Any) -> Any:
        from pycls_fast import train_net

        return train_net(*given, **values)


sys.modules[__name__].__class__ = _Callable

__all__ = ["train"]
