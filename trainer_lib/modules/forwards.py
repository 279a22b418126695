"""This file is a module's own forward, put into something and taken out again."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(model: nn.Module, around: Callable[[Forward], Forward]) -> None:
    """Replace the forward of this one module by what `around` makes of it; at most once.

    Args:
        model: The module.
        around: Is handed the forward as a function of the module and its inputs, and returns another one.
    """
    unwrap_forward(model)  # an earlier engine may have left its own
    model = _inside_compile(model)
    original = model.forward
    model.__dict__["_original_forward"] = original
    # A method, not a closure: a deep copy of the model then runs the copy's weights.
    model.__dict__["forward"] = MethodType(around(_unbound(original, model)), model)


def unwrap_forward(model: nn.Module) -> None:
    """Give a module its own forward back."""
    model = _inside_compile(model)
    original: Any = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = original


def _inside_compile(model: nn.Module) -> nn.Module:
    # torch.compile's wrapper has no forward of its own to speak of, and passes attributes on.
    return getattr(model, "_orig_mod", model)


def _unbound(original: Forward, model: nn.Module) -> Forward:
    """Return a function of the model and its inputs for what may be a method of the model, or any function."""
    if getattr(original, "__self__", None) is model:
        return original.__func__  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        return original(*args, **kwargs)

    return forward
