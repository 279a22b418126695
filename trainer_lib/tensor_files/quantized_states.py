"""The states of torchao's optimizers in 8 or 4 bits: the tensors that they are made of, which files hold.

A sharded state is a DTensor of quantized shards. Its parts are DTensors too, so they are saved, gathered and split
again like weights: no value is converted.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.foundation.tensors.local_shards import with_part

# The types of their values. A name in a file imports no other class.
_KINDS = {
    "torchao.optim.subclass_8bit.OptimState8bit": torch.uint8,
    "torchao.optim.subclass_4bit.OptimState4bit": torch.uint8,
    "torchao.optim.subclass_fp8.OptimStateFp8": torch.float8_e4m3fn,
}
_VALUES = "codes"  # the part that has them
_TABLES = frozenset({"qmap"})  # parts that are the same for all values


def quantized_kind(tensor: Any) -> str | None:
    """Return the kind of a quantized state, or of a sharded one; `None` for another tensor."""
    kind = type(getattr(tensor, "_local_tensor", tensor))
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in _KINDS else None


@frozen_dataclass
class QuantizedState:
    """A quantized state in parts.

    Args:
        kind: Its class.
        parts: Its parts by name: tensors, or what stands for them.
        context: Its other values.
        shape: The shape of the whole state.
    """

    kind: str
    parts: Mapping[str, Any]
    context: list[Any]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Any) -> "QuantizedState":
        """Return the parts of a state; those of a sharded one are sharded.

        Raises:
            CheckpointError: If the ranks' shards are not of one size.
        """
        local = getattr(tensor, "_local_tensor", tensor)
        names, context = local.__tensor_flatten__()
        parts = {name: getattr(local, name) for name in names}
        parts[_VALUES] = parts[_VALUES].view(torch.uint8)  # gloo sends no values in fp8
        if local is not tensor:
            _check_split(tensor)
            parts = {name: part if name in _TABLES else _sharded(part, tensor) for name, part in parts.items()}
        kind = quantized_kind(tensor)
        assert kind is not None  # since the caller asked
        return cls(kind, parts, list(context), tensor.shape)

    def mapped(self, function: Callable[[Any], Any]) -> "QuantizedState":
        """Return the state with a function applied to each part."""
        parts = {name: function(part) for name, part in self.parts.items()}
        return QuantizedState(self.kind, parts, self.context, self.shape)

    def split_like(self, parameter: Any, fill: Callable[[dict[str, Tensor]], object]) -> Any:
        """Return the state with the sharding of a parameter.

        Args:
            parameter: The sharded parameter.
            fill: Fills empty parts with values, by name; they are sharded, except for tables.

        Raises:
            CheckpointError: If the blocks of the state do not fit into the shards.
        """
        if parameter.shape != self.shape:
            raise CheckpointError(
                f"The state of a weight has the shape {tuple(self.shape)} instead of {tuple(parameter.shape)}."
            )
        _check_split(parameter)
        local, parts = parameter._local_tensor, dict[str, Any]()
        for name, part in self.parts.items():
            if name in _TABLES:
                parts[name] = torch.empty(part.shape, dtype=part.dtype, device=local.device)
                fill({name: parts[name]})
                continue
            count, rest = divmod(math.prod(part.shape) * local.numel(), parameter.numel())
            if rest:
                raise CheckpointError(
                    f"The blocks of a state of the shape {tuple(self.shape)} do not fit into shards of "
                    f"{tuple(local.shape)}. Load the checkpoint with as many ranks as saved it."
                )
            shape = local.shape if part.shape == self.shape else torch.Size([count])
            parts[name] = torch.empty(shape, dtype=part.dtype, device=local.device)
            fill({name: with_part(parameter, parts[name], part.shape)})
        return with_part(parameter, self._joined(parts, local.shape, local.stride()))

    def joined(self) -> Any:
        """Return the state of whole parts."""
        return self._joined(self.parts, self.shape, torch.empty(self.shape, device="meta").stride())

    def _joined(self, parts: Mapping[str, Tensor], shape: torch.Size, stride: tuple[int, ...]) -> Any:
        module, _, kind = self.kind.rpartition(".")
        cls: Any = getattr(import_module(module), kind)
        parts = {**parts, _VALUES: parts[_VALUES].view(_KINDS[self.kind])}
        context = [shape if isinstance(value, (torch.Size, tuple)) else value for value in self.context]
        return cls.__tensor_unflatten__(parts, context, shape, stride)


def check_shards(states: Iterable[Mapping[str, Any]]) -> None:
    """Check that checkpoints can hold the sharded states of an optimizer.

    Raises:
        CheckpointError: If the ranks' shards of a quantized one are not of one size.
    """
    for state in states:
        for value in state.values():
            if hasattr(value, "_local_tensor") and quantized_kind(value) is not None:
                _check_split(value)


def check_kind(kind: str, label: str) -> None:
    """Check that a kind of states in a file is known, and that torchao is installed.

    Raises:
        CheckpointError: If it is not.
    """
    if kind not in _KINDS:
        raise CheckpointError(f"{label} is a {kind}, which this version does not know.")
    try:
        import_module(kind.rpartition(".")[0])
    except ImportError as error:
        raise CheckpointError(f"{label} is a {kind}: install torchao to load it.") from error


def _sharded(part: Tensor, state: Any) -> Any:
    """Return a part of a rank's shard as this rank's shard of the whole part."""
    if part.shape == state._local_tensor.shape:
        return with_part(state, part)
    return with_part(state, part, torch.Size([part.numel() * state.numel() // state._local_tensor.numel()]))


def _check_split(tensor: Any) -> None:
    """Check that all ranks have as many rows: the parts of their shards are then the shards of the parts."""
    sizes = tensor.device_mesh.shape
    sharded = [
        (size, placement) for size, placement in zip(sizes, tensor.placements, strict=True) if placement.is_shard()
    ]
    ranks = math.prod(size for size, _ in sharded)
    if any(placement.dim for _, placement in sharded) or tensor.shape[0] % ranks:
        raise CheckpointError(
            f"The state in 8 or 4 bits of a weight of {tuple(tensor.shape)} is not split by rows into {ranks} equal "
            "shards, so checkpoints cannot hold it. Train with another optimizer, such as torch's AdamW, or with a "
            "number of ranks that divides the rows."
        )
