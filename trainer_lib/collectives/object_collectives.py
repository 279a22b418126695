"""Collectives on any Python objects, which are sent pickled."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.pytree import map_leaves, map_tensors, tensors
from trainer_lib.process_group import ProcessGroup
from trainer_lib.state.partial_state import PartialState


def gather_object(object: Any) -> list[Any]:
    """Return the objects of all ranks in order of rank; lists and tuples are joined to one list.

    Example:
        >>> gather_object(["a cat", "a dog"]), gather_object("a cat")
        (['a cat', 'a dog'], ['a cat'])
    """
    return joined(gather_per_rank(object))


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the list with that of one rank, and return it.

    Example:
        >>> broadcast_object_list(["run-7", None])
        ['run-7', None]
    """
    if not isinstance(object_list, list):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"broadcast_object_list needs a list (got a {type(object_list).__name__}). Pass [value]."
        )
    group = PartialState().group
    # As one object, so that receivers need not know the length of the list.
    received = group.broadcast_objects([_packed(object_list)], from_process)[0]
    if group.rank != from_process:
        object_list[:] = _unpacked(received)
    return object_list


def gather_per_rank(value: Any) -> list[Any]:
    """Return the values of all ranks in order of rank."""
    return _gathered(value, PartialState().group)


def gather_per_data_rank(value: Any) -> list[Any]:
    """Return the values of the ranks that read different batches, in order of rank."""
    return _gathered(value, PartialState().data_group)


def joined(values: Iterable[Any]) -> list[Any]:
    """Join lists and tuples; anything else counts as one item."""
    items: list[Any] = []
    for value in values:
        items += value if isinstance(value, (list, tuple)) else [value]
    return items


def _gathered(value: Any, group: ProcessGroup) -> list[Any]:
    return [_unpacked(value) for value in group.all_gather_objects(_packed(value))]


class _OnDevice:
    """A tensor sent from one rank's accelerator to that of another."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu()


def _packed(value: Any) -> Any:
    # Pickled as it is, a tensor would arrive on the device of its sender, which the receiver must not use.
    if all(tensor.device.type == "cpu" for tensor in tensors(value)):
        return value
    return map_tensors(lambda tensor: tensor if tensor.device.type == "cpu" else _OnDevice(tensor), value)


def _unpacked(value: Any) -> Any:
    device = PartialState().device
    if device.type == "cpu":
        return value
    return map_leaves(lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _OnDevice) else leaf, value)
