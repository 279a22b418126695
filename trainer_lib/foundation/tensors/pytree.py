"""Nested structures of tensors (pytrees): tuples, lists, mappings and dataclasses with tensors as leaves."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer_lib.foundation.light_dataclasses import LightDataclass

_NOTHING: frozenset[str] = frozenset()
# The types of leaves that need no further checks.
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})


@dataclass(repr=False, eq=False)
class TensorInformation(LightDataclass):
    """The shape and type of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a tensor."""
    return isinstance(tensor, Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a tensor on an XPU."""
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether `tensor_info` stands for a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Any) -> Any:
    """Return the values of `generator` in a sequence of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def never(tree: Any) -> bool:
    """Return False: no container is a leaf."""
    del tree
    return False


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = never) -> Any:
    """Return `tree` with `function` applied to its leaves; the containers keep their types.

    Args:
        function: The function of a leaf.
        tree: The nested structure.
        is_leaf: Whether to treat a container as a leaf.
    """
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN or is_leaf(tree):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, value, is_leaf) for value in tree])
    if kind is dict:
        return {key: map_leaves(function, value, is_leaf) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return honor_type(tree, [map_leaves(function, value, is_leaf) for value in tree])
    if isinstance(tree, Mapping):
        return _rebuilt_mapping(tree, {key: map_leaves(function, value, is_leaf) for key, value in tree.items()})
    if is_dataclass_value(tree):
        return _rebuilt_dataclass(
            tree, {name: map_leaves(function, value, is_leaf) for name, value in _fields(tree).items()}
        )
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to its tensors; other values are unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Any, is_leaf: Callable[[Any], bool] = never) -> Iterator[Any]:
    """Yield the leaves, in the order of `map_leaves`."""
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN or is_leaf(tree) or (parts := _parts(tree)) is None:
        yield tree
    else:
        for part in parts:
            yield from leaves(part, is_leaf)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] = never, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path.

    Example:
        >>> list(named_leaves({"scores": (1, 2), "loss": 3}))
        [("['scores'][0]", 1), ("['scores'][1]", 2), ("['loss']", 3)]
    """
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN or is_leaf(tree):
        yield name, tree
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from named_leaves(value, is_leaf, f"{name}[{index}]")
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, is_leaf, f"{name}[{key!r}]")
    elif is_dataclass_value(tree):
        for field, value in _fields(tree).items():
            yield from named_leaves(value, is_leaf, f"{name}.{field}")
    else:
        yield name, tree


def is_dataclass_value(tree: Any) -> bool:
    """Whether `tree` is a dataclass that is a container, and not a leaf."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, (type, TensorInformation))


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of `tree`, in order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf of `data` that passes `test_type`.

    Raises:
        TypeError: For another leaf, if `error_on_other_type`.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} got a {type(leaf).__name__} inside a {type(data).__name__}. "
                "Give only tensors, and tuples, lists, mappings and dataclasses of tensors."
            )
        return leaf

    return map_leaves(apply, data)


def send_to_device(
    tensor: Any,
    device: Any,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Return `tensor` (or a tree of tensors, or any object with a `to` method) on `device`.

    Args:
        tensor: The tensor or nested structure to move.
        device: The target device.
        non_blocking: Whether to return before the copy is complete; this needs pinned memory.
        skip_keys: Keys of mappings whose values are not moved.
    """
    if skip_keys is None:
        return _sent(tensor, device, non_blocking, _NOTHING)
    return _sent(tensor, device, non_blocking, frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys))


def find_batch_size(data: Any) -> int | None:
    """Return the size of the first dimension of the first tensor in `data`.

    Raises:
        TypeError: If there is no tensor in `data`.
    """
    first = next(tensors(data), None)
    if first is None:
        raise TypeError(f"There is no tensor in this {type(data).__name__} to take a batch size from.")
    return first.shape[0] if first.ndim else None


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the result of `find_batch_size`, or `None` if there is no tensor."""
    first = next(tensors(data), None)
    return first.shape[0] if first is not None and first.ndim else None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`, or `None`."""
    first = next(tensors(data), None)
    return None if first is None else first.device


def listify(data: Any) -> Any:
    """Return `data` with its tensors as lists of numbers."""
    return map_tensors(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return `tensor` (or a tree of tensors) with fp16 and bf16 values as fp32."""
    return map_tensors(_as_fp32, tensor)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of trees of the same shape, tensor by tensor, along `dim`.

    `None` in all of them stays, and of one tree any leaf.
    """
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        return honor_type(first, [concatenate([tree[i] for tree in data], dim) for i in range(len(first))])
    if isinstance(first, Mapping):
        # Not its iterator: that of a TensorDict yields rows.
        return _rebuilt_mapping(
            first, {key: concatenate([tree[key] for tree in data], dim) for key, _ in first.items()}
        )
    if is_dataclass_value(first):
        return _rebuilt_dataclass(
            first, {name: concatenate([getattr(tree, name) for tree in data], dim) for name in _fields(first)}
        )
    if len(data) == 1 or all(value is None for value in data):
        return first
    raise TypeError(
        f"A {type(first).__name__} cannot be concatenated; only tensors, and tuples, lists, mappings and dataclasses "
        "of them, can."
    )


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `data` with each tensor cut to `tensor_slice` of its first dimension.

    The last two arguments are unused; other slice functions of the same signature depend on the rank.
    """
    del process_index, num_processes
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def get_data_structure(data: Any) -> Any:
    """Return `data` with a `TensorInformation` in place of each tensor."""
    return map_tensors(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return `data` with the list of its sizes in place of each tensor."""
    return map_tensors(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return `data_structure` with an empty tensor in place of each `TensorInformation`."""
    return map_leaves(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, TensorInformation) else leaf,
        data_structure,
    )


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float16 or tensor.dtype is torch.bfloat16 else tensor


def _sent(tree: Any, device: Any, non_blocking: bool, skipped: frozenset[str]) -> Any:
    kind = type(tree)
    # This runs for each batch: `to` takes 2 µs to find that a tensor is where it should be, so it is not asked.
    if kind is Tensor:
        return tree if tree.device == device else tree.to(device, non_blocking=non_blocking)
    if kind in _PLAIN:
        return tree
    if kind is tuple or kind is list:
        return kind([
            value if type(value) is Tensor and value.device == device
            else _sent(value, device, non_blocking, skipped)
            for value in tree
        ])  # fmt: skip
    if kind is dict and not skipped:
        return {
            key: value if type(value) is Tensor and value.device == device
            else _sent(value, device, non_blocking, skipped)
            for key, value in tree.items()
        }  # fmt: skip
    # Before its parts: those of a `PackedSequence` are not all on one device.
    if hasattr(tree, "to") and not (skipped and isinstance(tree, Mapping)):
        try:
            return tree.to(device, non_blocking=non_blocking)
        except TypeError:  # its `to` accepts only a device
            return tree.to(device)
    if isinstance(tree, (tuple, list)):
        return honor_type(tree, [_sent(value, device, non_blocking, skipped) for value in tree])
    if isinstance(tree, Mapping):
        return _rebuilt_mapping(
            tree,
            {
                key: value if key in skipped else _sent(value, device, non_blocking, skipped)
                for key, value in tree.items()
            },
        )
    if is_dataclass_value(tree):
        return _rebuilt_dataclass(
            tree, {name: _sent(value, device, non_blocking, skipped) for name, value in _fields(tree).items()}
        )
    return tree


def _parts(tree: Any) -> Iterable[Any] | None:
    """Return what a container holds; `None` for a leaf."""
    if isinstance(tree, (tuple, list)):
        return cast("Iterable[Any]", tree)
    if isinstance(tree, Mapping):
        return cast("Iterable[Any]", tree.values())
    return _fields(tree).values() if is_dataclass_value(tree) else None


def _rebuilt_mapping(original: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(original, MutableMapping):
        # A copy keeps what a constructor would lose: a default factory, a tokenizer's encodings.
        rebuilt = copy.copy(original)
        try:
            for key, value in values.items():
                rebuilt[key] = value
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(original).__name__
            raise TypeError(
                f"A {kind} refuses the results for its values, which may have another number of rows ({error}). Pass a "
                "dict of them: dict(batch), or batch.to_dict() for a TensorDict."
            ) from error
        return rebuilt
    return type(original)(values)  # type: ignore[call-arg]


def _fields(dataclass_value: Any) -> dict[str, Any]:
    return {field.name: getattr(dataclass_value, field.name) for field in dataclasses.fields(dataclass_value)}


def _rebuilt_dataclass(original: Any, values: dict[str, Any]) -> Any:
    # Not the constructor, which may reject some fields and check or change others.
    rebuilt = copy.copy(original)
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)  # the dataclass may be frozen
    return rebuilt
