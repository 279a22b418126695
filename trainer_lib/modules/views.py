"""Views of a model: other modules that share its parameters, buffers and modes."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def view(model: nn.Module, peel: Callable[[nn.Module], nn.Module], replaces: Callable[[nn.Module], bool]) -> nn.Module:
    """Return a view of the model without wrappers; modules in which nothing changes are the originals.

    Args:
        model: The model; it is not changed.
        peel: Returns the module inside a wrapper, or its argument.
        replaces: Whether a module needs its own view, which calls the module's forward without torch.compile.
    """
    return _view(model, peel, replaces, {})


def _view(module: nn.Module, peel: Any, replaces: Any, seen: dict[int, nn.Module]) -> nn.Module:
    inside = peel(module)
    # A module that occurs twice has one view.
    if id(inside) not in seen:
        children = {
            name: None if child is None else _view(child, peel, replaces, seen)
            for name, child in inside._modules.items()
        }
        changes = any(children[name] is not child for name, child in inside._modules.items())
        seen[id(inside)] = _around(inside, children) if changes or replaces(inside) else inside
    return seen[id(inside)]


def _around(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    result: nn.Module = _bare(_view_class(type(module)))
    # The view shares the dictionaries of parameters and buffers with the module, so that both see new entries.
    result.__dict__.update(module.__dict__, _modules=children, _compiled_call_impl=None, _viewed=module)
    for name, value in list(result.__dict__.items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            result.__dict__[name] = MethodType(value.__func__, result)
    return result


@functools.cache
def _view_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, _View):
        return kind
    same_names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (_View, kind), same_names)


class _View:
    """Forwards `training` to the viewed module, and pickles and copies as a plain module."""

    @property
    def training(self) -> bool:
        return _viewed(self).__dict__["training"]

    @training.setter
    def training(self, mode: bool) -> None:
        _viewed(self).__dict__["training"] = mode

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = next(kind for kind in type(self).__mro__ if not issubclass(kind, _View))
        plain = _bare(kind)
        plain.__dict__.update(self.__dict__, training=self.training)
        plain.__dict__.pop("_viewed", None)
        return _bare, (kind,), plain.__getstate__()


def _viewed(module: Any) -> nn.Module:
    # Follow views of views. A slice of a ModuleList's view has the view's class, but is no view itself.
    while "_viewed" in module.__dict__:
        module = module.__dict__["_viewed"]
    return module


def _bare(kind: type) -> Any:
    return object.__new__(kind)
