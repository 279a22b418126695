"""The methods of a trainer that a subclass may override, and whether it does.

`DEFAULTS` has them as they were declared, also where `Trainer` itself is patched later.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])
DEFAULTS: dict[str, Callable[..., Any]] = {}


def overridable(method: _Method) -> _Method:
    """Declare a method of the Trainer that subclasses may override."""
    DEFAULTS[method.__name__] = method
    return method


def is_overridden(kind: type, name: str) -> bool:
    """Whether a class derived from the Trainer overrides a method.

    Example:
        >>> from trainer_lib import Trainer
        >>> class Regression(Trainer):
        ...     def compute_loss(self, model, batch): ...
        >>> is_overridden(Regression, "compute_loss"), is_overridden(Regression, "training_step")
        (True, False)
    """
    return getattr(kind, name) is not DEFAULTS[name]
