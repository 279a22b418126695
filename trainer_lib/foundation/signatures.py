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
