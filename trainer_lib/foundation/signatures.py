"""The constructor signature that `help()` and editors show for a class whose `__new__` checks argument names."""

import inspect
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
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=signature.empty)


def cannot_take(function: Any, *arguments: str) -> str | None:
    """Return why a function cannot take these positional arguments; `None` if it can, or has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it is not a Python function
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"{signature} does not fit: {error}"
    return None


def function_name(function: Any) -> str:
    """Return what an error calls a function before its signature; nothing for a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return "" if name == "<lambda>" else name


def takes_targets_first(function: Any) -> bool:
    """Whether a function names its first arguments `y_true, y_pred`, as those of scikit-learn and Keras do."""
    return parameter_names(function)[:2] == ["y_true", "y_pred"]


def parameter_names(function: Any) -> list[str]:
    """Return the names of a function's parameters; none if it has no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # it is not a Python function
        return []
