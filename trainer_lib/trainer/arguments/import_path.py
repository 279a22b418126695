"""Classes and functions from dotted paths, and their keyword arguments."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_lib.foundation.errors import ConfigurationError, did_you_mean


def load(path: str, option: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path.

    Args:
        path: Such as "package.module.Class".
        option: The name of the setting that holds the path, for errors.

    Raises:
        ConfigurationError: If the path does not lead to something callable.

    Example:
        >>> load("torch.optim.SGD", "optimizer")
        <class 'torch.optim.sgd.SGD'>
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{option}={path!r}: module {module_name!r} cannot be imported ({error}).") from error
    loaded = getattr(module, name, None)
    if not callable(loaded):
        names = [attribute for attribute in dir(module) if callable(getattr(module, attribute))]
        raise ConfigurationError(
            f"{option}={path!r}: {module_name} has no class or function {name!r}.{did_you_mean(name, names)}"
        )
    return loaded


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that you can give by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function has a `**kwargs` parameter."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())


def check_options(owner: str, options: Mapping[str, Any], known: Iterable[str], arguments: Mapping[str, str]) -> None:
    """Raise for an unknown option of an optimizer, schedule or the like.

    Args:
        owner: What the options belong to, for errors.
        options: The options by name.
        known: The names of all options.
        arguments: For options that an argument of the trainer sets: the name of that argument.

    Raises:
        ConfigurationError: With the known names.
    """
    names = [name for name in known if name not in arguments]
    for name in options:
        if name in arguments:
            raise ConfigurationError(f"{owner}: the option {name!r} is set by {arguments[name]}. Leave the option out.")
        if name not in names:
            allowed = f"Known: {', '.join(names)}." if names else "It has no options."
            raise ConfigurationError(f"{owner} has no option {name!r}. {allowed}{did_you_mean(name, names)}")
