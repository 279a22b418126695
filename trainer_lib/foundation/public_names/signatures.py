"""The constructor signature that `help()` and editors show for a class whose `__new__` checks argument names."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any


class ConstructorSignature:
    """Describes a class by the parameters of its `__init__`, as a class attribute called `__signature__`.

    Example:
        >>> class Checked:
        ...     __signature__ = ConstructorSignature()
        ...     def __new__(cls, *positional, **named):
        ...         return super().__new__(cls)
        ...     def __init__(self, size, *, name=""):
        ...         self.size, self.name = size, name
        >>> print(inspect.signature(Checked))
        (size, *, name='')
    """

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        """Return the signature of the class; its instances have none, because they are not called."""
        if instance is not None:
            raise AttributeError("__signature__")
        if owner.__init__ is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


def unknown_keywords(function: Any, named: Iterable[str]) -> list[str]:
    """Return the names that a Python function does not take as keywords; none if it takes any, or is not in Python.

    Example:
        >>> unknown_keywords(lambda size, *, name="": size, ["size", "colour"])
        ['colour']
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return []
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in named if name not in known]


def cannot_take(function: Any, *arguments: str, named: Iterable[str] = ()) -> str | None:
    """Return why a function cannot take these arguments, by position and by name; `None` if it can, or is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is not a Python function
        return None
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        return f"{signature} does not fit: {error}"
    return None


def function_name(function: Any) -> str:
    """Return what an error calls a function before its signature; nothing for a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return "" if name == "<lambda>" else name


def names_in(code: CodeType | None) -> set[str]:
    """Return the names of attributes and global variables in a function's code, and in that of functions inside it."""
    if code is None:
        return set()
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*(names_in(part) for part in inner))


def takes_targets_first(function: Any) -> bool:
    """Whether a function names its first arguments `y_true, y_pred`, as those of scikit-learn and Keras do."""
    return parameter_names(function)[:2] == ["y_true", "y_pred"]


def parameter_names(function: Any) -> list[str]:
    """Return the names of a function's parameters; none if it has no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it is not a Python function
        return []


def keywords_in_source(module: str, function: str) -> list[str] | None:
    """Return the names that a function takes as keywords, read from its source without importing its package.

    Args:
        module: The module that defines it.
        function: Its name in the module; that of a method after its class: "Writer.__init__".

    Returns:
        The names; `None` if it takes any, or its source is not found.

    Example:
        >>> keywords_in_source("trainer_lib.foundation.public_names.signatures", "keywords_in_source")
        ['module', 'function']
    """
    import ast

    node: ast.AST | None = _syntax_tree(module)
    path = function.split(".")
    for name in path:
        body: list[ast.stmt] = getattr(node, "body", [])
        node = next((statement for statement in reversed(body) if getattr(statement, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef) or node.args.kwarg is not None:
        return None
    of_instance = len(path) - 1  # `self` or `cls`
    positional = [*node.args.posonlyargs, *node.args.args][of_instance:]
    return [argument.arg for argument in [*positional, *node.args.kwonlyargs]]


def _syntax_tree(module: str) -> Any:
    """Return the syntax tree of a module's source; `None` if it is not found. Only the top package is looked up."""
    import ast
    from importlib.util import find_spec

    package, *inner = module.split(".")
    try:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return None
        origin = Path(spec.origin)
        path = origin.parent.joinpath(*inner).with_suffix(".py") if inner else origin
        return ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
