"""The length of whatever may have none: a dataset, a sampler, a loader."""

from typing import Any


def length_of(source: Any) -> int | None:
    """Return `len(source)`; `None` if it has no length, as iterable datasets and loaders of them.

    Example:
        >>> length_of([1, 2]), length_of(iter([1, 2]))
        (2, None)
    """
    try:
        return len(source)
    # Without __len__, a TypeError; the others are of samplers of torch and of PyG whose length is unknown.
    except (TypeError, NotImplementedError, ValueError):
        return None
