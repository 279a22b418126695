"""Plain values from JSON, read without torch: what JSON cannot represent is an object whose key begins with `$`."""

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from trainer_lib.foundation.errors import CheckpointError

DEFAULT_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, bool, tuple)}


def decode_plain(tree: Any, label: str = "the state") -> Any:
    """Return the values that `encode` made a tree of, if none of them is a tensor or an array.

    Raises:
        CheckpointError: If the tree is damaged or holds tensors.

    Example:
        >>> decode_plain({"lr": 0.1, "shape": {"$tuple": [1, {"$float": "inf"}]}})
        {'lr': 0.1, 'shape': (1, inf)}
    """
    return PlainDecoder(label).decode(tree)


class PlainDecoder:
    """Reads the values of a tree.

    Args:
        label: The name of the state in errors.
    """

    def __init__(self, label: str) -> None:
        self.label = label

    def decode(self, tree: Any) -> Any:
        """Return the values of a whole tree."""
        try:
            return self.value(tree, "")
        except RecursionError as error:
            raise CheckpointError(f"{self.label} is damaged: it is nested too deeply.") from error

    def value(self, tree: Any, path: str) -> Any:
        """Return the values of a branch."""
        if type(tree) is list:
            return self.items(tree, path)
        if type(tree) is not dict:
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {key: self.value(branch, f"{path}.{key}" if path else key) for key, branch in tree.items()}
        try:
            return self.tagged(tag, tree, path)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.name(path)} is damaged: {error!r}.") from error

    def tagged(self, tag: str, tree: dict[str, Any], path: str) -> Any:
        """Return the value of an object with a tag."""
        content = tree[tag]
        if tag in _SIMPLE_TAGS:
            return _SIMPLE_TAGS[tag](content)
        if tag in _CONTAINER_TAGS:
            return _CONTAINER_TAGS[tag](self, content, path)
        raise CheckpointError(f"{self.name(path)} has the type {tag!r}, which this version does not know.")

    def items(self, trees: list[Any], path: str) -> list[Any]:
        """Return the values of a list."""
        return [self.value(tree, f"{path}.{index}" if path else str(index)) for index, tree in enumerate(trees)]

    def pairs(self, trees: list[Any], path: str) -> list[tuple[Any, Any]]:
        """Return the keys and values of a list of pairs."""
        return [(self.value(key, path), self.value(tree, f"{path}.{key}" if path else str(key))) for key, tree in trees]

    def name(self, path: str) -> str:
        """Return the name of a value in errors."""
        return f"{self.label}[{path!r}]" if path else self.label


def _dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _size(sizes: list[int]) -> Any:
    import torch

    return torch.Size(sizes)


_SIMPLE_TAGS: dict[str, Callable[[Any], Any]] = {
    "$float": float,  # infinities and NaN
    "$complex": complex,
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$dtype": _dtype,
    "$device": _device,
    "$size": _size,
    "$range": lambda values: range(*values),
}
_CONTAINER_TAGS: dict[str, Callable[[PlainDecoder, Any, str], Any]] = {
    "$dict": lambda self, content, path: dict(self.pairs(content, path)),
    "$tuple": lambda self, content, path: tuple(self.items(content, path)),
    "$set": lambda self, content, path: set(self.items(content, path)),
    "$frozenset": lambda self, content, path: frozenset(self.items(content, path)),
    "$deque": lambda self, content, path: deque(self.items(content[1], path), content[0]),
    "$ordered": lambda self, content, path: OrderedDict(self.pairs(content, path)),
    "$counter": lambda self, content, path: Counter(dict(self.pairs(content, path))),
    "$defaultdict": lambda self, content, path: defaultdict(
        content[0] and DEFAULT_FACTORIES[content[0]], self.pairs(content[1], path)
    ),
}
