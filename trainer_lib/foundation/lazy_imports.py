"""Lazy public names of a package, declared once, in the stub beside its `__init__.py`."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_lib.foundation.errors import did_you_mean


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported when they are first used.

    The names and their modules are the lines `from module import Name as Name` of `__init__.pyi`, which type checkers
    read as well.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`; the stub lies beside it.
    """
    modules = _imports_of_stub(Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name not in modules:
            # An AttributeError, since hasattr() and `from package import name` rely on it.
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, modules)}")
        value = getattr(importlib.import_module(modules[name]), name)
        importlib.import_module(package).__dict__[name] = value
        return value

    return get, lambda: sorted(modules), sorted(modules)


def _imports_of_stub(stub: Path) -> dict[str, str]:
    statements = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom) and statement.module]
    return {alias.name: str(statement.module) for statement in imports for alias in statement.names}
