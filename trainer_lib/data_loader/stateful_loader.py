"""Prepared loaders as instances of torchdata's `StatefulDataLoader`, for scripts that ask for the type.

The position remains the prepared loader's own: it counts the batches delivered, not those that workers read ahead.
"""

import functools
from typing import Any, TypeVar

from trainer_lib.foundation.imports import require

_Kind = TypeVar("_Kind", bound=type[Any])


@functools.cache
def stateful_kind(kind: _Kind) -> _Kind:
    """Return a class of prepared loaders as a subclass of `StatefulDataLoader` too.

    Raises:
        MissingPackageError: If torchdata is not installed.
    """
    stateful = require("torchdata.stateful_dataloader", "torchdata", "torchdata").StatefulDataLoader
    if issubclass(kind, stateful):
        return kind
    # It has no name to import it by, so a copy in another process makes it again.
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: _parts(kind, self),
        "use_stateful_dataloader": True,
    }
    return type(kind.__name__, (kind, stateful), members)  # pyright: ignore[reportReturnType]


def _parts(kind: type[Any], loader: Any) -> tuple[Any, ...]:
    return _made_again, (kind,), vars(loader)


def _made_again(kind: type[Any]) -> Any:
    return object.__new__(stateful_kind(kind))
