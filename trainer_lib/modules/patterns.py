"""This file is which names of a model's parameters a shell pattern means."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from trainer_lib.foundation.errors import ConfigurationError

_SHOWN = 5


def matching(names: Iterable[str], patterns: Sequence[str], told_as: str) -> list[str]:
    """Return the names that match one of the patterns.

    Args:
        names: The names.
        patterns: Shell patterns (`fnmatch`) over whole names, such as "encoder.*".
        told_as: What the patterns were given as, for the error.

    Raises:
        ConfigurationError: If a pattern matches nothing; with the nearest names.

    Example:
        >>> matching(["encoder.weight", "head.weight"], ["encoder.*"], "Freeze")
        ['encoder.weight']
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise no_match(told_as, pattern, known)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def no_match(told_as: str, pattern: str, names: Sequence[str]) -> ConfigurationError:
    """Return the error that a pattern matches nothing, with names like it."""
    near = get_close_matches(pattern, names, n=_SHOWN, cutoff=0.3) or list(names[:_SHOWN])
    return ConfigurationError(
        f"{told_as}({pattern!r}) matches none of the {len(names)} names of parameters. Names like it: "
        f"{', '.join(near)}. A pattern has to match a whole name: put * where anything may stand."
    )
