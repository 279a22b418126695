"""The empty tensor in place of an offloaded weight, whose values are read where something is computed with it."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.tensors.pytree import map_tensors

# Methods that need no values.
_DESCRIBING = frozenset(
    {
        "__delete__",
        "__format__",
        "__get__",
        "__hash__",
        "__repr__",
        "__set__",
        "_is_view",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "has_names",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_neg",
        "is_pinned",
        "is_shared",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "retain_grad",
        "size",
        "storage",
        "storage_offset",
        "stride",
        "untyped_storage",
    }
)
_COMPUTED = frozenset({"H", "T", "imag", "mH", "mT", "real"})  # properties that are views of the values
# Methods whose results are empty too, until something is computed with them.
_DEFERRED = (
    Tensor.detach,
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.to,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.float,
    Tensor.double,
)


class OffloadedTensor(Tensor):
    """An empty tensor on the meta device in place of a weight that is kept elsewhere.

    A module that uses a weight of another one without its forward, as in `F.linear(x, self.head.weight)`, computes with
    the values. Changes in place are lost, as for any tensor on the meta device.

    Attributes:
        read: Returns the values, on the device of the forward.
    """

    read: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Describe the empty tensor, or compute with the values."""
        options = dict(kwargs or {})
        is_deferred = func in _DEFERRED and not (func == Tensor.to and _names_device(*args[1:], *options.values()))
        if not is_deferred and not _describes(func, next(iter((*args, *options.values())), None)):
            return func(*map_tensors(_values, args), **map_tensors(_values, options))
        result: Any = super().__torch_function__(func, types, args, options)
        if not is_deferred or result is args[0]:
            return result
        return _reading(result.as_subclass(OffloadedTensor), partial(_applied, func, args[0].read, args[1:], options))

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedTensor":
        """Copy the empty tensor, and what reads its values."""
        memo[id(self)] = again = self._empty()
        return _reading(again, copy.deepcopy(self.read, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, as of an entry of a state dict."""
        return self.read().__reduce_ex__(protocol)

    def _empty(self) -> "OffloadedTensor":
        return torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(OffloadedTensor)


class OffloadedParameter(OffloadedTensor, nn.Parameter):
    """An `OffloadedTensor` that is a parameter of its module."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the empty parameter, and what reads its values."""
        del protocol
        return _empty_parameter, (self.shape, self.dtype, self.requires_grad), self.read

    def __setstate__(self, state: Any) -> None:
        self.read = state

    def _empty(self) -> OffloadedTensor:
        return _empty_parameter(self.shape, self.dtype, self.requires_grad)


def offloaded_tensor(tensor: Tensor, read: Callable[[], Tensor]) -> OffloadedTensor:
    """Return the empty tensor in place of a parameter or buffer.

    Args:
        tensor: The parameter or buffer.
        read: Returns its values, on the device of the forward.
    """
    if isinstance(tensor, nn.Parameter):
        return _reading(_empty_parameter(tensor.shape, tensor.dtype, tensor.requires_grad), read)
    return _reading(torch.empty_like(tensor, device="meta").as_subclass(OffloadedTensor), read)


def _empty_parameter(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> OffloadedParameter:
    return OffloadedParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def _reading(tensor: OffloadedTensor, read: Callable[[], Tensor]) -> OffloadedTensor:
    tensor.read = read
    return tensor


def _applied(func: Any, read: Callable[[], Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    return func(read(), *args, **options)


def _values(tensor: Tensor) -> Tensor:
    return tensor.read() if isinstance(tensor, OffloadedTensor) else tensor


def _describes(func: Any, first: Any) -> bool:
    """Whether a function needs no values: it describes a tensor, or changes an empty one (its first argument)."""
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__ not in _COMPUTED
    is_in_place = name.endswith("_") and not name.endswith("__")
    return name in _DESCRIBING or (is_in_place and isinstance(first, OffloadedTensor))


def _names_device(*args: Any) -> bool:
    """Whether arguments of `Tensor.to` name a device, or a tensor whose device counts."""
    return any(isinstance(arg, (torch.device, str, int, Tensor)) and not isinstance(arg, bool) for arg in args)
