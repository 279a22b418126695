"""This file is states as JSON and tensors, and back exactly as they were: nothing in between is pickled.

JSON has six kinds of values and Python has more: what JSON cannot say is an object of one key that begins with `$`.
"""

import base64
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.tensor_files.safetensors import why_not

_DEFAULT_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, bool, tuple)}

# The states of torchao's optimizers: tensors made of other tensors. No other class is imported for a name in a file.
_QUANTIZED = frozenset(
    {
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
    }
)


@dataclass
class Encoded:
    """A state in two halves.

    Args:
        tree: What JSON can say, with places for the tensors.
        tensors: The tensors by the names of their places.
    """

    tree: Any = None
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])


def encode(state: Any, allow_pickle: bool = False, label: str = "the state", shards: bool = False) -> Encoded:
    """Take a state apart.

    Nested dicts, lists, tuples, sets, ordered dicts, counters, default dicts and deques of numbers (with infinities
    and nan), texts, bytes, tensors, numpy's arrays and scalars, and torch's types, devices and sizes.

    Args:
        state: The state.
        allow_pickle: Pickle what else there is; else it is refused.
        label: What errors call the state.
        shards: Whether sharded tensors are tensors too.

    Raises:
        CheckpointError: With the path of what cannot be taken apart.

    Example:
        >>> decode(encode({"lr": 0.1, 7: (math.inf, torch.ones(2))}))
        {'lr': 0.1, 7: (inf, tensor([1., 1.]))}
    """
    encoder = _Encoder(allow_pickle, label, shards)
    return Encoded(encoder.tree(state, ""), encoder.tensors)


def decode(encoded: Encoded, allow_pickle: bool = False, label: str = "the state") -> Any:
    """Put a state together again.

    Raises:
        CheckpointError: If something was pickled and `allow_pickle` does not say so, or the two halves do not fit.
    """
    try:
        return _Decoder(encoded.tensors, allow_pickle, label).value(encoded.tree, "")
    except RecursionError as error:
        raise CheckpointError(f"{label} is too deep: no state that was saved is.") from error


class _Encoder:
    def __init__(self, allow_pickle: bool, label: str, shards: bool) -> None:
        self.allow_pickle = allow_pickle
        self.label = label
        self.shards = shards
        self.tensors: dict[str, Tensor] = {}
        self._inside: set[int] = set()

    def tree(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _SAID_BY_JSON or (kind is float and math.isfinite(value)):
            return value
        if kind in _SIMPLE:
            tag, encode_one, _ = _SIMPLE[kind]
            return {tag: encode_one(value)}
        if kind in _CONTAINERS:
            return self._container(value, path)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value, path)
        if self.shards and hasattr(value, "_local_tensor"):
            return {"$tensor": self._placed(value, path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        if (name := f"{kind.__module__}.{kind.__qualname__}") in _QUANTIZED:
            return {"$quantized": name, **self._parts(value, path)}
        return self._pickled(value, path, f"is a {kind.__module__}.{kind.__qualname__}")

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside:
            raise CheckpointError(f"{self._told(path)} is inside of itself, so it cannot be saved.")
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
        if factory is not None and _DEFAULT_FACTORIES.get(name or "") is not factory:
            return self._pickled(values, path, f"is a defaultdict of {factory!r}")
        return {"$defaultdict": [name, self.pairs(values, path)]}

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        told: dict[str, Any] = {}
        if isinstance(tensor, Parameter):
            told["parameter"] = tensor.requires_grad
        values = tensor.detach()
        if values.dtype is torch.complex128:
            values, told["complex"] = torch.view_as_real(values.resolve_conj()), True
        if (reason := why_not(values)) is not None:
            return self._pickled(tensor, path, reason)
        return {"$tensor": self._placed(values, path), **told}

    def _array(self, array: Any, path: str) -> Any:
        dtype = array.dtype
        if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or dtype.itemsize == 0:
            return self._pickled(array, path, f"is an array of {dtype}")
        values = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
        tag = "$array" if isinstance(array, np.ndarray) else "$number"
        return {tag: self._placed(values, path), "dtype": dtype.str, "shape": list(array.shape)}

    def _parts(self, tensor: Any, path: str) -> dict[str, Any]:
        names, context = tensor.__tensor_flatten__()
        parts = {name: self.tree(getattr(tensor, name), f"{path}.{name}") for name in names}
        layout = {"size": list(tensor.size()), "stride": list(tensor.stride())}
        return {"parts": parts, "context": self.tree(list(context), f"{path}.context"), **layout}

    def _placed(self, tensor: Tensor, path: str) -> str:
        name = path or "value"
        while name in self.tensors:  # keys that look alike, such as 1 and "1"
            name += "'"
        self.tensors[name] = tensor
        return name

    def _pickled(self, value: Any, path: str, reason: str) -> Any:
        if not self.allow_pickle:
            raise CheckpointError(
                f"{self._told(path)} {reason}, and a state on disk holds plain values, tensors and arrays only. "
                "Put it in such terms in state_dict(), or say allow_pickle=True here and when it is loaded."
            )
        try:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        except Exception as error:
            raise CheckpointError(f"{self._told(path)} {reason}, which cannot be pickled either: {error}") from error

    def _told(self, path: str) -> str:
        return f"{self.label}[{path!r}]" if path else self.label


class _Decoder:
    def __init__(self, tensors: Mapping[str, Any], allow_pickle: bool, label: str) -> None:
        self.tensors = tensors
        self.allow_pickle = allow_pickle
        self.label = label

    def value(self, tree: Any, path: str) -> Any:
        if type(tree) is list:
            return self.items(tree, path)
        if type(tree) is not dict:
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {key: self.value(one, f"{path}.{key}" if path else key) for key, one in tree.items()}
        try:
            return self._tagged(tag, tree, path)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._told(path)} is damaged: {error!r}.") from error

    def items(self, trees: list[Any], path: str) -> list[Any]:
        return [self.value(tree, f"{path}.{index}" if path else str(index)) for index, tree in enumerate(trees)]

    def pairs(self, trees: list[Any], path: str) -> list[tuple[Any, Any]]:
        return [(self.value(key, path), self.value(one, f"{path}.{key}" if path else str(key))) for key, one in trees]

    def _tagged(self, tag: str, tree: dict[str, Any], path: str) -> Any:
        content = tree[tag]
        if tag in _SIMPLE_TAGS:
            return _SIMPLE_TAGS[tag](content)
        if tag in _CONTAINER_TAGS:
            return _CONTAINER_TAGS[tag](self, content, path)
        if tag == "$tensor":
            return self._tensor(content, tree, path)
        if tag in ("$array", "$number"):
            data = self._placed(content, path).cpu().numpy().tobytes()
            array = np.frombuffer(data, np.dtype(tree["dtype"])).reshape(tree["shape"])
            return array.copy() if tag == "$array" else array[()]
        if tag == "$quantized":
            return self._quantized(content, tree, path)
        if tag == "$pickle":
            return self._unpickled(content, path)
        raise CheckpointError(f"{self._told(path)} is of a kind {tag!r} that this version does not know.")

    def _tensor(self, name: str, told: dict[str, Any], path: str) -> Any:
        tensor = self._placed(name, path)
        if told.get("complex"):
            tensor = torch.view_as_complex(tensor)
        return Parameter(tensor, told["parameter"]) if "parameter" in told else tensor

    def _quantized(self, name: str, told: dict[str, Any], path: str) -> Any:
        if name not in _QUANTIZED:
            raise CheckpointError(f"{self._told(path)} is a {name}, which this version does not know.")
        module, _, kind = name.rpartition(".")
        try:
            cls: Any = getattr(import_module(module), kind)
        except ImportError as error:
            raise CheckpointError(f"{self._told(path)} is a {name}: install torchao to load it.") from error
        parts = {part: self.value(tree, f"{path}.{part}") for part, tree in told["parts"].items()}
        size, stride = torch.Size(told["size"]), tuple(told["stride"])
        return cls.__tensor_unflatten__(parts, self.value(told["context"], path), size, stride)

    def _placed(self, name: str, path: str) -> Any:
        if name not in self.tensors:
            raise CheckpointError(f"{self._told(path)} is a tensor that is not in the file: {name!r}.")
        return self.tensors[name]

    def _unpickled(self, content: str, path: str) -> Any:
        if not self.allow_pickle:
            raise CheckpointError(
                f"{self._told(path)} was pickled when it was saved, and to load it may run code that came with it. Say "
                "allow_pickle=True if you trust where this state comes from."
            )
        return pickle.loads(base64.b64decode(content))  # noqa: S301 - on the user's explicit word only

    def _told(self, path: str) -> str:
        return f"{self.label}[{path!r}]" if path else self.label


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no type")
    return dtype


_SAID_BY_JSON = frozenset({type(None), bool, int, str})
# For each type: its tag, how it is said, and how it is read.
_SIMPLE: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("$float", repr, float),  # inf and nan
    complex: ("$complex", repr, complex),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    bytearray: (
        "$bytearray",
        lambda value: base64.b64encode(value).decode(),
        lambda text: bytearray(base64.b64decode(text)),
    ),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), _read_dtype),
    torch.device: ("$device", str, torch.device),
    torch.Size: ("$size", list, torch.Size),
    range: ("$range", lambda value: [value.start, value.stop, value.step], lambda values: range(*values)),
}
_SIMPLE_TAGS = {tag: read for tag, _, read in _SIMPLE.values()}
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
_CONTAINER_TAGS: dict[str, Callable[[_Decoder, Any, str], Any]] = {
    "$dict": lambda self, content, path: dict(self.pairs(content, path)),
    "$tuple": lambda self, content, path: tuple(self.items(content, path)),
    "$set": lambda self, content, path: set(self.items(content, path)),
    "$frozenset": lambda self, content, path: frozenset(self.items(content, path)),
    "$deque": lambda self, content, path: deque(self.items(content[1], path), content[0]),
    "$ordered": lambda self, content, path: OrderedDict(self.pairs(content, path)),
    "$counter": lambda self, content, path: Counter(dict(self.pairs(content, path))),
    "$defaultdict": lambda self, content, path: defaultdict(
        content[0] and _DEFAULT_FACTORIES[content[0]], self.pairs(content[1], path)
    ),
}
