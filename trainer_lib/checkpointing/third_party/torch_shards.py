"""Shards in the format of `torch.distributed.checkpoint`, as Accelerate writes them; reading runs no code in them."""

import itertools
import pickle
import shutil
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.checkpointing.model_weights import save_weights
from trainer_lib.foundation.errors import CheckpointError, UnwritableError
from trainer_lib.options.accelerate_constants import FSDP_MODEL_NAME
from trainer_lib.state import PartialState

_METADATA = ".metadata"
# What metadata is made of: records of names, sizes and types.
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # Megatron-LM's metadata has the plans of its writers too.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
TensorPath = tuple[str | int, ...]
Target = Callable[[TensorPath, torch.Size, torch.dtype], Tensor]


def is_sharded(folder: Path) -> bool:
    """Whether a folder holds such shards."""
    return (folder / _METADATA).is_file()


def write_shards(folder: Path, state: dict[str, Any], alone: bool = False) -> None:
    """Write a nested state whose sharded tensors each rank writes in part. All ranks call it.

    Args:
        folder: The folder to make.
        state: The state.
        alone: Whether this rank writes all of it, without the others.
    """
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _without_warning():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)
    except dcp.api.CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise UnwritableError(f"{folder} could not be written: {causes}.") from error


@contextmanager
def _without_warning() -> Generator[None]:
    """Ignore torch's warning that no ranks take part, as `alone` asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def read_shards(folder: Path, target: Target, alone: bool = False) -> dict[str, Any]:
    """Read a nested state.

    Args:
        folder: The folder of the shards.
        target: Returns the tensor to read into, whole or sharded, for its path in the state, its size and its type.
        alone: Whether this rank reads it without the others.

    Raises:
        CheckpointError: If it is no such folder, is damaged, or its pickles hold more than tensors and plain values.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _read_metadata(folder)
    flat: dict[str, Any] = {
        name: target(metadata.planner_data[name], entry.size, entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    _load(folder, metadata, flat, alone)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        _insert(nested, metadata.planner_data[name], value)
    return nested


def read_tensors_of(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read whole tensors under the names that the shards have, on this rank alone.

    Args:
        folder: The folder of the shards.
        wanted: Whether to read the tensor of a name.

    Raises:
        CheckpointError: See `read_shards`.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _read_metadata(folder)
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(name)
    }
    _load(folder, metadata, flat, alone=True)
    return flat


def read_whole(folder: Path) -> dict[str, Any]:
    """Read a nested state with whole tensors, on this rank alone.

    Raises:
        CheckpointError: See `read_shards`.
    """
    return read_shards(folder, lambda path, size, dtype: torch.empty(size, dtype=dtype), alone=True)


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write the whole weights of a model that was saved in shards; rank 0 does.

    Args:
        checkpoint_dir: The folder of the shards, or the one with `pytorch_model_fsdp_0`.
        output_path: The folder to write `model.safetensors` to.
        safe_serialization: Write safetensors; else `pytorch_model.bin`.
        remove_checkpoint_dir: Whether to delete the shards afterwards.

    Raises:
        CheckpointError: If there are no shards, or they cannot be read.

    Example:
        >>> merge_fsdp_weights("state/pytorch_model_fsdp_0", "merged")  # doctest: +SKIP
    """
    state = PartialState()
    if state.is_main_process:
        folder = _folder_of_shards(Path(checkpoint_dir))
        nested = read_whole(folder)
        weights: dict[str, Any] = next(iter(nested.values())) if len(nested) == 1 else nested
        save_weights(weights, Path(output_path), "1000TB", safe_serialization)
        if remove_checkpoint_dir:
            shutil.rmtree(folder)
    state.wait_for_everyone()


def _folder_of_shards(folder: Path) -> Path:
    for candidate in (folder, folder / f"{FSDP_MODEL_NAME}_0"):
        if is_sharded(candidate):
            return candidate
    raise CheckpointError(
        f"{folder} has no shards of torch.distributed.checkpoint (no {_METADATA} file). Give the folder "
        f"{FSDP_MODEL_NAME}_0 of a checkpoint. For a checkpoint of this library, use `trainer-lib checkpoint "
        "consolidate`."
    )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record, a size or a type; refuse all other names."""
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 writes paths
        is_type = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        if (module in _RECORDS and "." not in name) or (module, name) in _PLAIN or is_type:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _read_metadata(folder: Path) -> Any:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused, and no code in it was run: it holds more than names, sizes and types ({error})."
        ) from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _load(folder: Path, metadata: Any, flat: dict[str, Any], alone: bool) -> None:
    """Read the values of a flat state in place."""
    import torch.distributed.checkpoint as dcp

    try:
        with _without_warning():
            dcp.load(flat, storage_reader=_reader(folder, metadata), planner=_planner(), no_dist=alone)
    except dcp.api.CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise CheckpointError(f"{folder} cannot be read: {causes}") from error


def _reader(folder: Path, metadata: Any) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            return metadata

    return Reader(folder)


def _planner() -> Any:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _insert(nested: Any, path: TensorPath, value: Any) -> None:
    """Set a value in nested dicts and lists, which are made on the way."""
    for key, following in itertools.pairwise(path):
        nested = _child(nested, key, [] if isinstance(following, int) else {})
    _child(nested, path[-1], value)


def _child(parent: Any, key: str | int, new: Any) -> Any:
    if isinstance(parent, dict):
        return parent.setdefault(key, new)
    parent.extend([None] * (int(key) + 1 - len(parent)))
    if parent[key] is None:
        parent[key] = new
    return parent[key]
