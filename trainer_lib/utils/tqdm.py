"""`tqdm` on one rank, as scripts import it from `accelerate.utils.tqdm`.

In `trainer_lib.utils` the function and this module have one name, so this module can be called like the function.
"""

import sys
from types import ModuleType
from typing import Any

from trainer_lib.progress import tqdm as tqdm


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tqdm(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
