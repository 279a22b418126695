"""Hooks around a module's forward: the class to derive yours from, attaching and removing."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import nn


class ModelHook:
    """What runs before and after a module's forward; derive your own hook from it.

    Unlike torch's hooks, it can change the arguments by name, and the module when it is attached.

    Attributes:
        no_grad: Whether the forward runs without gradients.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module when the hook is attached to it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of the forward, which runs next."""
        del module
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output of the forward, which has run."""
        del module
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module when the hook is removed from it."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other.

    Args:
        *hooks: The hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad: bool = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach all hooks."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Pass the arguments through all hooks."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)  # type: ignore[assignment]
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through all hooks."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Remove all hooks."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module, in place, and return the module.

    Args:
        module: The module.
        hook: The hook.
        append: Whether it joins the hooks that the module has; otherwise it replaces them.

    Example:
        >>> class Doubles(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> add_hook_to_module(torch.nn.Identity(), Doubles())(torch.ones(1))
        tensor([2.])
    """
    present = vars(module).get("_hf_hook")
    if present is not None:
        if append:
            hook = SequentialHook(present, hook)
        remove_hook_from_module(module)
    original = module.forward
    module = hook.init_hook(module)
    vars(module)["_hf_hook"] = hook
    if getattr(original, "__func__", None) is not nn.Module.forward:  # a container, such as a ParameterList, has none
        vars(module).update(_old_forward=original, forward=HookedForward(module, original))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hooks of a module, in place, and return the module.

    Args:
        module: The module.
        recurse: Whether to remove those of modules inside it too.
    """
    hook = vars(module).pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        original = vars(module).pop("_old_forward", None)
        if original is not None:
            del vars(module)["forward"]
            if getattr(original, "__func__", None) is not type(module).forward:
                vars(module)["forward"] = original
    if recurse:
        remove_hook_from_submodules(module)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules inside it."""
    for inside in module.modules():
        remove_hook_from_module(inside)


class HookedForward:
    """The forward of a module that has a hook.

    An object that knows its module, so that a copy of the module, also one by pickle, runs the copy's hook and weights.

    Args:
        module: The module.
        original: Its own forward.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module = module
        update_wrapper(self, original)  # for those who look at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward between the two halves of its hook."""
        module = self._module
        hook: ModelHook = vars(module)["_hf_hook"]
        args, kwargs = hook.pre_forward(module, *args, **kwargs)  # type: ignore[assignment]
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = vars(module)["_old_forward"](*args, **kwargs)
        return hook.post_forward(module, output)
