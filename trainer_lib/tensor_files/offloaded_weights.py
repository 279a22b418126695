"""Weights in files of a folder, one memory-mapped file a tensor, in the layout of Accelerate."""

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_lib.filesystem.atomic_files import path_inside, replace_file
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.tensor_files.load_tensors import locate_tensor
from trainer_lib.tensor_files.map_tensor import map_or_read, map_tensor
from trainer_lib.tensor_files.reused_memory import ReusedMemory

_INDEX = "index.json"
_ENDING = ".dat"

Index = dict[str, dict[str, Any]]


def offload_weight(weight: Tensor, weight_name: str, offload_folder: str | Path, index: Index | None = None) -> Index:
    """Write a tensor into a folder, and return the index with its type and shape.

    Args:
        weight: The tensor.
        weight_name: Its name, and that of the file.
        offload_folder: The folder.
        index: The index of tensors that are there already; the tensor is added to it.
    """
    values = weight.detach().cpu()
    index = {} if index is None else index
    index[weight_name] = {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}
    array = as_bytes(values).numpy()  # numpy lacks bfloat16 and the types of 8 bits
    path = path_inside(Path(offload_folder), f"{weight_name}{_ENDING}", weight_name)
    with _write_errors(offload_folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_array(array, path)
    return index


def write_array(array: "np.ndarray[Any, Any]", path: Path) -> None:
    """Write the values of an array to a file."""
    with path.open("wb") as file:
        file.write(np.ascontiguousarray(array).data)


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, Any]) -> Tensor:
    """Return a tensor in a file, mapped into memory: what is not read is not loaded.

    Args:
        weight_file: The file.
        weight_info: Its "dtype" and "shape", from the index.
    """
    return map_tensor(Path(weight_file), getattr(torch, weight_info["dtype"]), weight_info["shape"])


def save_offload_index(index: Index, offload_folder: str | Path) -> None:
    """Write the index into a folder, together with the entries of the one that is there."""
    path = Path(offload_folder) / _INDEX
    entries = {**(_read_index(path) if path.is_file() else {}), **index}
    if entries:
        with _write_errors(offload_folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda partial: partial.write_text(json.dumps(entries, indent=2), encoding="utf-8"))


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict into a folder, with their index.

    Example:
        >>> offload_state_dict("offloaded", {"weight": torch.ones(2)})
        >>> OffloadedWeightsLoader(save_folder="offloaded")["weight"]
        tensor([1., 1.])
    """
    index: Index = {}
    try:
        with _write_errors(save_dir):
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            for name, tensor in state_dict.items():
                index = offload_weight(tensor, name, save_dir, index)
            save_offload_index(index, save_dir)
    except CheckpointError:
        remove_offloaded_weights(save_dir, state_dict)
        raise


def remove_offloaded_weights(offload_folder: str | Path, names: Iterable[str]) -> None:
    """Remove the files of weights from a folder, as far as they are there.

    Args:
        offload_folder: The folder.
        names: The names of the weights.
    """
    for name in names:
        with suppress(OSError):
            path_inside(Path(offload_folder), f"{name}{_ENDING}", name).unlink(missing_ok=True)


@contextmanager
def _write_errors(folder: str | Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{folder}: the offloaded weights could not be written: {error}") from error


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Return the tensors of modules with these names.

    Example:
        >>> extract_submodules_state_dict({"head.bias": 1, "head2.bias": 2}, ["head"])
        {'head.bias': 1}
    """
    wanted = list(submodule_names)
    return {
        key: value
        for key, value in state_dict.items()
        if any(name in ("", key) or key.startswith(f"{name}.") for name in wanted)
    }


class PrefixedDataset(Mapping[str, Any]):
    """A mapping whose keys are those of another after a prefix.

    Args:
        dataset: The mapping.
        prefix: What comes before each key.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """The tensors of a state dict and those in files, by name.

    Args:
        state_dict: Tensors in memory.
        save_folder: The folder that `offload_state_dict` wrote.
        index: The types and shapes of files in `save_folder`, or the names of safetensors files that hold tensors; by
            default the index in that folder.
        device: Where tensors of safetensors files are loaded to; by default the CPU.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError("There is nothing to load from. Give state_dict, save_folder or index.")
        self.state_dict: dict[str, Tensor] = dict(state_dict or {})
        # The program may change its current directory before weights are read.
        self.save_folder: Path | None = None if save_folder is None else Path(save_folder).absolute()
        self.index: Mapping[str, Mapping[str, Any]] = (
            index if index is not None else {} if save_folder is None else _read_index(Path(save_folder) / _INDEX)
        )
        self.device = device
        self._memory = ReusedMemory()

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if "safetensors_file" not in entry:
            path = Path(self.save_folder or "") / f"{key}{_ENDING}"
            return map_tensor(path, getattr(torch, entry["dtype"]), entry["shape"], is_read_now=True)
        path = Path(entry["safetensors_file"])
        location = locate_tensor(path, entry.get("weight_name", key))
        tensor = map_or_read(path, location, is_read_now=True, memory=self._memory)
        tensor = tensor.to(self.device or "cpu")
        return tensor.to(getattr(torch, entry["dtype"])) if "dtype" in entry else tensor

    def __iter__(self) -> Iterator[str]:
        return iter([*self.state_dict, *(key for key in self.index if key not in self.state_dict)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _read_index(path: Path) -> Index:
    try:
        return read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not an index of offloaded weights: {error}") from error
