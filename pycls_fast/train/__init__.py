"""Training. Read loop.py, step.py, assemble.py in this order; then checkpoints, evaluation, the files of a run."""

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
