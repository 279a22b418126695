"""This file is how a package offers many names and imports a module only when one of them is used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from trainer_lib.foundation.errors import did_you_mean


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose names live in other modules.

    Args:
        package: The package's `__name__`.
        homes: For each public name, the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in homes:
            # An AttributeError, since hasattr() and `from package import name` rely on it.
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, homes)}")
        value = getattr(importlib.import_module(homes[name]), name)
        importlib.import_module(package).__dict__[name] = value
        return value

    return get, lambda: sorted(homes)
