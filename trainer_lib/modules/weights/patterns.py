"""Match the names of a model's parameters against shell patterns."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from trainer_lib.foundation.errors import ConfigurationError

_SHOWN = 5


def matching(names: Iterable[str], patterns: Sequence[str], source: str) -> list[str]:
    """Return the names that match one of the patterns.

    Args:
        names: The names.
        patterns: Shell patterns (`fnmatch`) over whole names, such as "encoder.*".
        source: The name of the option that holds the patterns, for the error.

    Raises:
        ConfigurationError: If a pattern matches no name; lists the nearest names.

    Example:
        >>> matching(["encoder.weight", "head.weight"], ["encoder.*"], "Freeze")
        ['encoder.weight']
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise no_match(source, pattern, known)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def no_match(source: str, pattern: str, names: Sequence[str]) -> ConfigurationError:
    """Return the error for a pattern that matches no name, with similar names."""
    near = get_close_matches(pattern, names, n=_SHOWN, cutoff=0.3) or list(names[:_SHOWN])
    return ConfigurationError(
        f"{source}({pattern!r}) matches none of the {len(names)} names of parameters. Names like it: "
        f"{', '.join(near)}. A pattern has to match a whole name: use * for any characters."
    )
