"""How many bytes the tensors of a model take, by module, and in another type."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.modules.quantized_layers import is_quantized, quantized_size
from trainer_lib.modules.weights.tensor_slots import non_persistent_buffers
from trainer_lib.options.enums import CustomDtype

_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return how many bytes a value of this type takes in a file; a boolean is one bit.

    Example:
        >>> dtype_byte_size(torch.bfloat16)
        2
    """
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype must be a torch.dtype such as torch.float32 (got {shown(dtype)}).")
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
    *,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module, by name.

    Args:
        module: The module.
        include_buffers: Whether to yield buffers too.
        recurse: Whether to yield those of modules inside it too.
        remove_non_persistent: Whether to leave out buffers that a state dict does not have.
        remove_duplicate: Whether to leave out further names of a tensor.
    """
    yield from module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set[str]()
        buffers = module.named_buffers(recurse=recurse, remove_duplicate=remove_duplicate)
        yield from ((name, buffer) for name, buffer in buffers if name not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict of the module does not have.

    Args:
        module: The module.
        recurse: Whether to look into modules inside it too.
        fqns: Whether to return the whole names (`encoder.mask`), instead of the last part of each.
    """
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, owner in modules
        for name in non_persistent_buffers(owner)
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return how many bytes each tensor, each module and (under "") the whole model take.

    Args:
        model: The model.
        dtype: The type to count with, where a tensor has a wider floating one. Weights of layers of bitsandbytes
            count as quantized, with their scales, and so do weights that torchao has quantized.
        special_dtypes: The types of tensors with these names, instead of `dtype`.
        buffers_only: Whether to leave out parameters.

    Example:
        >>> compute_module_sizes(torch.nn.Linear(4, 2))
        {'': 40, 'weight': 32, 'bias': 8}
    """
    bytes_of = tensor_bytes(model, dtype, special_dtypes)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors:
        size = bytes_of[id(tensor)]
        parts = name.split(".")
        for count in range(len(parts) + 1):
            sizes[".".join(parts[:count])] += size
    return dict(sizes)


def tensor_bytes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> dict[int, int]:
    """Return how many bytes each parameter and buffer takes, by its `id`; see `compute_module_sizes`."""
    special = {name: _read(kind) for name, kind in (special_dtypes or {}).items()}
    target = None if dtype is None else _read(dtype)
    return {
        id(tensor): _bytes(tensor, special.get(name), target)
        for name, tensor in named_module_tensors(model, recurse=True)
    }


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
) -> int:
    """Return how many bytes all buffers of a model take; see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Iterable[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Iterable[str]
) -> tuple[int, list[str]]:
    """Return the size of the largest layer among modules, and the names of the layers that have it.

    A layer is a tensor, a module without modules inside it, or one of a class named in `no_split_module_classes`.

    Args:
        modules: The modules (or tensors) by name.
        module_sizes: What `compute_module_sizes` returned for their model.
        no_split_module_classes: The names of classes whose modules are one layer.
    """
    classes = set(no_split_module_classes)
    sizes = {name: module_sizes.get(name, 0) for name in _layers(modules, classes)}
    largest = max(sizes.values(), default=0)
    return largest, [name for name, size in sizes.items() if size == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the size of a model in bytes, and what `get_max_layer_size` returns for it."""
    sizes = compute_module_sizes(model)
    classes: Iterable[str] = getattr(model, "_no_split_modules", None) or ()
    return sizes.get("", 0), get_max_layer_size(model.named_children(), sizes, classes)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names in sizes of modules that no other name is inside of: those of the tensors."""
    owners = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name and name not in owners]


def _layers(modules: Iterable[tuple[str, Any]], classes: set[str]) -> Iterator[str]:
    for name, module in modules:
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if not children or type(module).__name__ in classes:
            yield name
            continue
        inside = [*module.named_parameters(recurse=False), *children]
        yield from _layers([(f"{name}.{child}", value) for child, value in inside], classes)


def _bytes(tensor: Tensor, special: torch.dtype | None, target: torch.dtype | None) -> int:
    if special is None and is_quantized(tensor):
        return quantized_size(tensor)
    if special is None and type(tensor).__module__.startswith("torchao"):
        parts, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(getattr(tensor, part).nbytes for part in parts)
    return int(tensor.numel() * _width(tensor, special, target))


def _width(tensor: Tensor, special: torch.dtype | None, target: torch.dtype | None) -> float:
    if special is not None:
        return dtype_byte_size(special)
    own = dtype_byte_size(tensor.dtype)
    is_castable = target is not None and (tensor.is_floating_point() or tensor.is_complex())
    return min(own, dtype_byte_size(target)) if target is not None and is_castable else own


def _read(dtype: str | torch.dtype) -> torch.dtype:
    kind = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, (torch.dtype, CustomDtype)):
        raise ConfigurationError(f"{shown(dtype)} is not a torch dtype. Give one such as torch.float16 or 'bfloat16'.")
    return kind  # pyright: ignore[reportReturnType] - a CustomDtype has a size too
