"""This file is classes and functions by their dotted paths, as settings name them."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean


def load(path: str, option: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path.

    Args:
        path: Such as "package.module.Class".
        option: What the path was given for.

    Raises:
        ConfigurationError: If there is nothing there that can be called.

    Example:
        >>> load("torch.optim.SGD", "optimizer")
        <class 'torch.optim.sgd.SGD'>
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{option}={path!r}: {module_name} cannot be imported ({error}).") from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [one for one in dir(module) if callable(getattr(module, one))]
        raise ConfigurationError(f"{option}={path!r}: {module_name} has no class {name}.{did_you_mean(name, names)}")
    return found


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}


def takes_anything(function: Callable[..., Any]) -> bool:
    """Whether a function takes any keyword."""
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


def check_options(told_as: str, given: Mapping[str, Any], known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Raise for an option that is not known.

    Args:
        told_as: Whose options they are.
        given: What was given.
        known: The names of options there are.
        instead: Where to say what some names stand for.

    Raises:
        ConfigurationError: With all names that are known.
    """
    names = [name for name in known if name not in instead]
    for name in given:
        if name in instead:
            raise ConfigurationError(f"{told_as}: {name} is not set by an option of its own but by {instead[name]}.")
        if name not in names:
            takes = f"It takes: {', '.join(names)}." if names else "It takes none."
            raise ConfigurationError(f"{told_as} has no option {name!r}. {takes}{did_you_mean(name, names)}")
