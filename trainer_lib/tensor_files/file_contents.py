"""The contents of a file before it is written: tensors, JSON, or pickled tensors."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trainer_lib.filesystem.checksums import ChecksummedFile
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.light_dataclasses import frozen_dataclass
from trainer_lib.tensor_files.finite_check import Fault, nonfinite_tensors
from trainer_lib.tensor_files.safetensors import write_tensors
from trainer_lib.tensor_files.tensor_storage import bytes_of, without_aliases


class Content(ABC):
    """The contents of a file."""

    @abstractmethod
    def write(self, path: AnyPath) -> str:
        """Write the file, and return the checksum of what was written."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The approximate size of the file in bytes."""

    def nonfinite(self) -> dict[str, Fault]:
        """Return its tensors with a NaN or an infinity, by name."""
        return {}


@frozen_dataclass
class Tensors(Content):
    """Tensors by name, as safetensors.

    Args:
        tensors: The tensors.
        metadata: Strings to store in the header.
        bypasses_cache: Whether to write past the page cache, as `write_tensors` does.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None
    bypasses_cache: bool = False

    def write(self, path: AnyPath) -> str:
        """Write the file."""
        return write_tensors(self.tensors, path, self.metadata, self.bypasses_cache)

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return tensor_bytes(self.tensors)

    def nonfinite(self) -> dict[str, Fault]:
        """Check each tensor."""
        return nonfinite_tensors(self.tensors)


@frozen_dataclass
class PickledTensors(Content):
    """Tensors by name, as `torch.save` writes them.

    Args:
        tensors: The tensors.
        bypasses_cache: Whether to write past the page cache.
    """

    tensors: Mapping[str, Tensor]
    bypasses_cache: bool = False

    def write(self, path: AnyPath) -> str:
        """Write the file."""
        # torch.save writes the whole storage of a view, so each tensor is cloned.
        kept, aliases = without_aliases(self.tensors)
        kept = {name: tensor.detach().cpu().clone() for name, tensor in kept.items()}
        # A Python file reports why it cannot write; torch's own does not.
        with ChecksummedFile(path, self.bypasses_cache) as file:
            torch.save({name: kept[aliases.get(name, name)] for name in self.tensors}, cast(Any, file))
        return file.checksum

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return tensor_bytes(self.tensors)

    def nonfinite(self) -> dict[str, Fault]:
        """Check each tensor."""
        return nonfinite_tensors(self.tensors)


@frozen_dataclass
class Pickled(Content):
    """Any value, as `torch.save` writes it; tensors are moved to the CPU."""

    value: Any

    def write(self, path: AnyPath) -> str:
        """Write the file."""
        value = tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, self.value)
        with ChecksummedFile(path) as file:
            torch.save(value, cast(Any, file))
        return file.checksum

    @property
    def size(self) -> int:
        """The bytes of the tensors."""
        return sum(bytes_of(leaf) for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor))


@frozen_dataclass
class Json(Content):
    """A value as JSON.

    Args:
        value: The value.
        is_indented: Whether to indent the file for reading.
    """

    value: Any
    is_indented: bool = False

    def write(self, path: AnyPath) -> str:
        """Write the file."""
        text = json.dumps(self.value, indent=2 if self.is_indented else None, allow_nan=False) + "\n"
        with ChecksummedFile(path) as file:
            file.write(text.encode())
        return file.checksum

    @staticmethod
    def read(path: AnyPath) -> Any:
        """Read a file of JSON.

        Raises:
            CheckpointError: If it cannot be read or is not valid JSON.
        """
        try:
            return read_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error

    @property
    def size(self) -> int:
        """The bytes of the JSON."""
        return len(json.dumps(self.value))


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors; a tensor with several names counts once."""
    return sum(map(bytes_of, without_aliases(tensors)[0].values()))
