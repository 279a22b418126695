"""Wrap a module's forward in place, restore it, and convert its outputs to fp32."""

import inspect
from collections.abc import Callable
from functools import update_wrapper, wraps
from types import MethodType
from typing import Any

from torch import nn

from trainer_lib.foundation.tensors.pytree import convert_to_fp32

Forward = Callable[..., Any]


def wrap_forward(model: nn.Module, around: Callable[[Forward], Forward]) -> None:
    """Replace the forward of this module by `around(forward)`; a second call replaces the first wrapper.

    Args:
        model: The module.
        around: Takes the forward as a function of the module and its inputs, and returns the new forward.
    """
    unwrap_forward(model)  # an earlier Accelerator may have wrapped it
    model = _inside_compile(model)
    original = model.forward
    model.__dict__["_original_forward"] = original

    @wraps(_unbound(original, model))
    def inside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_original_forward"](*args, **kwargs)

    # A method, not a closure: a deep copy of the model then runs the copy's weights.
    model.__dict__["forward"] = MethodType(around(inside), model)


def replace_forward(model: nn.Module, forward: Forward) -> None:
    """Replace a module's forward, inside its wrapper if it has one."""
    model = _inside_compile(model)
    name = "_original_forward" if "_original_forward" in model.__dict__ else "forward"
    model.__dict__[name] = forward


def unwrap_forward(model: nn.Module) -> None:
    """Restore a module's original forward."""
    model = _inside_compile(model)
    original: Any = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is inspect.getattr_static(type(model), "forward"):
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = original


def forward_signature(model: Any) -> inspect.Signature:
    """Return the signature of a model's forward; for a traced one, that of its schema.

    Example:
        >>> class Scorer(nn.Module):
        ...     def forward(self, inputs, mask=None):
        ...         return inputs
        >>> forward_signature(Scorer())
        <Signature (inputs, mask=None)>
    """
    try:
        return inspect.signature(model.forward)
    except ValueError:
        schema = getattr(model.forward, "schema", None)
        if schema is None:
            raise
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(argument.name, kind) for argument in schema.arguments[1:]])


def _inside_compile(model: nn.Module) -> nn.Module:
    # torch.compile's wrapper only delegates: the forward to wrap is that of the module inside.
    return getattr(model, "_orig_mod", model)


def _unbound(original: Forward, model: nn.Module) -> Forward:
    """Return `original`, a method of the model or any function, as a function of the model and its inputs."""
    if getattr(original, "__self__", None) is model:
        return original.__func__  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        return original(*args, **kwargs)

    return forward


class ConvertOutputsToFp32:
    """A forward whose 16-bit outputs are converted to fp32.

    Args:
        model_forward: The forward.
    """

    def __init__(self, model_forward: Forward) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the forward in fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Forward) -> Forward:
    """Return a function that calls the forward and converts its 16-bit outputs to fp32.

    Example:
        >>> convert_outputs_to_fp32(torch.nn.Linear(2, 1).bfloat16())(torch.ones(1, 2).bfloat16()).dtype
        torch.float32
    """
    converted = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    return forward
