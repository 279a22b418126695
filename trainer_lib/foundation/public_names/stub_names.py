"""The names that a stub re-exports, by a parser: for stubs with `from module import *`."""

import ast
from collections.abc import Iterator
from pathlib import Path


def imports_of(source: str, package: str, file: Path) -> Iterator[tuple[str, str]]:
    """Yield the names that a stub re-exports, with the modules they come from.

    Args:
        source: The text of the stub.
        package: The package's `__name__`.
        file: The package's `__file__`; its modules lie beside it.
    """
    for statement in ast.parse(source).body:
        for name, module in _imports(statement):
            if name == "*":
                yield from _names_of_part(module, file.with_name(f"{module.removeprefix(f'{package}.')}.py"))
            else:
                yield name, module


def _names_of_part(module: str, file: Path) -> Iterator[tuple[str, str]]:
    for statement in _statements(file):
        yield from _imports(statement)
        yield from ((name, module) for name in _definitions(statement) if not name.startswith("_"))


def _imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement re-exports (`from module import Name as Name`, or `*`), with their module."""
    if isinstance(statement, ast.ImportFrom) and statement.module:
        for alias in statement.names:
            if alias.name == "*" or alias.asname == alias.name:
                yield alias.name, statement.module


def _definitions(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body
