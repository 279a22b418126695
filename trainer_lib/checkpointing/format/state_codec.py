"""States encoded as JSON and tensors, without pickle, and decoded to exactly the same values.

A value that JSON cannot represent becomes an object whose first key begins with `$`, such as `{"$tuple": [1, 2]}`.
"""

import base64
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from trainer_lib.checkpointing.format.plain_json import DEFAULT_FACTORIES, PlainDecoder
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.light_dataclasses import LightDataclass
from trainer_lib.tensor_files.safetensors import unsupported_reason


@dataclass(repr=False, eq=False)
class Encoded(LightDataclass):
    """An encoded state.

    Args:
        tree: The values for JSON, which name the tensors.
        tensors: The tensors by name.
    """

    tree: Any = None
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])


def encode(state: Any, allow_pickle: bool = False, label: str = "the state", shards: bool = False) -> Encoded:
    """Encode a state.

    The state may hold nested dicts, lists, tuples, sets, ordered dicts, counters, default dicts and deques of numbers
    (with infinities and NaN), strings, bytes, tensors, NumPy arrays and scalars, and torch dtypes, devices and sizes.

    Args:
        state: The state.
        allow_pickle: Whether to pickle other values; otherwise they raise.
        label: The name of the state in errors.
        shards: Whether sharded tensors (DTensors) are stored as tensors.

    Raises:
        CheckpointError: With the path of the value that cannot be encoded.

    Example:
        >>> decode(encode({"lr": 0.1, 7: (math.inf, torch.ones(2))}))
        {'lr': 0.1, 7: (inf, tensor([1., 1.]))}
    """
    encoder = _Encoder(allow_pickle, label, shards)
    return Encoded(encoder.tree(state, ""), encoder.tensors)


def decode(encoded: Encoded, allow_pickle: bool = False, label: str = "the state") -> Any:
    """Decode a state.

    Raises:
        CheckpointError: If a value was pickled and `allow_pickle` is not set, or the tensors do not fit the tree.
    """
    return _Decoder(encoded.tensors, allow_pickle, label).decode(encoded.tree)


class _Encoder:
    def __init__(self, allow_pickle: bool, label: str, shards: bool) -> None:
        self.allow_pickle = allow_pickle
        self.label = label
        self.shards = shards
        self.tensors: dict[str, Tensor] = {}
        self._inside: set[int] = set()

    def tree(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _JSON_TYPES or (kind is float and math.isfinite(value)):
            return value
        if kind in _SIMPLE:
            tag, to_json = _SIMPLE[kind]
            return {tag: to_json(value)}
        if kind in _CONTAINERS:
            return self._container(value, path)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value, path)
        if self.shards and hasattr(value, "_local_tensor"):
            return self._quantized(value, path) or {"$tensor": self._add_tensor(value, path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        return self._quantized(value, path) or self._pickled(value, path, f"is a {kind.__module__}.{kind.__qualname__}")

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside:
            raise CheckpointError(f"{self._name(path)} contains itself, so it cannot be saved.")
        self._inside.add(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, path)
        finally:
            self._inside.discard(id(value))

    def items(self, values: Any, path: str) -> list[Any]:
        return [self.tree(value, f"{path}.{index}" if path else str(index)) for index, value in enumerate(values)]

    def pairs(self, values: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.tree(key, f"{path}.(a key)"), self.tree(value, f"{path}.{key}" if path else str(key))]
            for key, value in values.items()
        ]

    def mapping(self, values: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in values):
            return {key: self.tree(value, f"{path}.{key}" if path else key) for key, value in values.items()}
        return {"$dict": self.pairs(values, path)}

    def default_dict(self, values: Any, path: str) -> Any:
        factory = values.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and DEFAULT_FACTORIES.get(name or "") is not factory:
            return self._pickled(values, path, f"is a defaultdict of {factory!r}")
        return {"$defaultdict": [name, self.pairs(values, path)]}

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        facts: dict[str, Any] = {}
        if isinstance(tensor, Parameter):
            facts["parameter"] = tensor.requires_grad
        values = tensor.detach()
        if values.dtype is torch.complex128:
            values, facts["complex"] = torch.view_as_real(values.resolve_conj()), True
        if (reason := unsupported_reason(values)) is not None:
            return self._pickled(tensor, path, reason)
        return {"$tensor": self._add_tensor(values, path), **facts}

    def _array(self, array: Any, path: str) -> Any:
        dtype = array.dtype
        if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or dtype.itemsize == 0:
            return self._pickled(array, path, f"is an array of {dtype}")
        values = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
        tag = "$array" if isinstance(array, np.ndarray) else "$number"
        return {tag: self._add_tensor(values, path), "dtype": dtype.str, "shape": list(array.shape)}

    def _quantized(self, value: Any, path: str) -> dict[str, Any] | None:
        from trainer_lib.tensor_files.quantized_states import QuantizedState, quantized_kind

        if (kind := quantized_kind(value)) is None:
            return None
        state = QuantizedState.of(value)
        parts = {name: self.tree(part, f"{path}.{name}") for name, part in state.parts.items()}
        layout = {"size": list(value.size()), "stride": list(value.stride())}
        return {"$quantized": kind, "parts": parts, "context": self.tree(state.context, f"{path}.context"), **layout}

    def _add_tensor(self, tensor: Tensor, path: str) -> str:
        name = path or "value"
        while name in self.tensors:  # keys that print the same, such as 1 and "1"
            name += "'"
        self.tensors[name] = tensor
        return name

    def _pickled(self, value: Any, path: str, reason: str) -> Any:
        if not self.allow_pickle:
            raise CheckpointError(
                f"{self._name(path)} {reason}, and a checkpoint holds plain values, tensors and arrays only. Return "
                "those from state_dict(), or give allow_pickle=True both here and to load_state."
            )
        try:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        except Exception as error:
            raise CheckpointError(f"{self._name(path)} {reason}, which cannot be pickled either: {error}") from error

    def _name(self, path: str) -> str:
        return f"{self.label}[{path!r}]" if path else self.label


class _Decoder(PlainDecoder):
    def __init__(self, tensors: Mapping[str, Any], allow_pickle: bool, label: str) -> None:
        super().__init__(label)
        self.tensors = tensors
        self.allow_pickle = allow_pickle

    def tagged(self, tag: str, tree: dict[str, Any], path: str) -> Any:
        content = tree[tag]
        if tag == "$tensor":
            return self._tensor(content, tree, path)
        if tag in ("$array", "$number"):
            data = self._stored_tensor(content, path).cpu().numpy().tobytes()
            array = np.frombuffer(data, np.dtype(tree["dtype"])).reshape(tree["shape"])
            return array.copy() if tag == "$array" else array[()]
        if tag == "$quantized":
            return self._quantized(content, tree, path)
        if tag == "$pickle":
            return self._unpickled(content, path)
        return super().tagged(tag, tree, path)

    def _tensor(self, name: str, facts: dict[str, Any], path: str) -> Any:
        tensor = self._stored_tensor(name, path)
        if facts.get("complex"):
            tensor = torch.view_as_complex(tensor)
        return Parameter(tensor, facts["parameter"]) if "parameter" in facts else tensor

    def _quantized(self, name: str, facts: dict[str, Any], path: str) -> Any:
        from trainer_lib.tensor_files.quantized_states import QuantizedState, check_kind

        check_kind(name, self.name(path))
        parts = {part: self.value(tree, f"{path}.{part}") for part, tree in facts["parts"].items()}
        state = QuantizedState(name, parts, self.value(facts["context"], path), torch.Size(facts["size"]))
        # Shards are put together by who knows how they are split here.
        return state.joined() if all(isinstance(part, Tensor) for part in parts.values()) else state

    def _stored_tensor(self, name: str, path: str) -> Any:
        if name not in self.tensors:
            raise CheckpointError(f"{self.name(path)} is a tensor that is not in the file: {name!r}.")
        return self.tensors[name]

    def _unpickled(self, content: str, path: str) -> Any:
        if not self.allow_pickle:
            raise CheckpointError(
                f"{self.name(path)} was pickled when it was saved, and loading a pickle can run code. Give "
                "allow_pickle=True if you trust where this checkpoint comes from."
            )
        return pickle.loads(base64.b64decode(content))  # noqa: S301 - only with allow_pickle=True


_JSON_TYPES = frozenset({type(None), bool, int, str})
# For each type: its tag, and the function that makes it JSON.
_SIMPLE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("$float", repr),  # infinities and NaN
    complex: ("$complex", repr),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    bytearray: ("$bytearray", lambda value: base64.b64encode(value).decode()),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    torch.Size: ("$size", list),
    range: ("$range", lambda value: [value.start, value.stop, value.step]),
}
_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.mapping,
    tuple: lambda self, value, path: {"$tuple": self.items(value, path)},
    set: lambda self, value, path: {"$set": self.items(value, path)},
    frozenset: lambda self, value, path: {"$frozenset": self.items(value, path)},
    deque: lambda self, value, path: {"$deque": [value.maxlen, self.items(value, path)]},
    OrderedDict: lambda self, value, path: {"$ordered": self.pairs(value, path)},
    Counter: lambda self, value, path: {"$counter": self.pairs(value, path)},
    defaultdict: _Encoder.default_dict,
}
