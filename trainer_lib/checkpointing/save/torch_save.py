"""`save` and `load` of any object in a file, as `torch.save` and `torch.load` on the right ranks."""

import pickle
from _codecs import encode
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch import Tensor

from trainer_lib.filesystem.atomic_files import replace_file
from trainer_lib.filesystem.checksums import ChecksummedFile
from trainer_lib.filesystem.remote_paths import RemotePath, local_path
from trainer_lib.foundation.errors import CheckpointError, ConfigurationError
from trainer_lib.state.partial_state import PartialState
from trainer_lib.tensor_files.file_contents import Tensors

# What numpy's states of random generators consist of, for torch.serialization.safe_globals.
TORCH_SAFE_GLOBALS: list[Any] = [np.ndarray, np.dtype, np.dtypes.UInt32DType, _reconstruct, encode]


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object on the main process.

    Args:
        obj: The object.
        f: A path, whose file is replaced atomically, or a file that is open for writing.
        save_on_each_node: Save on the main process of each machine.
        safe_serialization: Write a dict of tensors as safetensors; otherwise use `torch.save`.

    Example:
        >>> save({"seen": 7}, "seen.pt")
        >>> load("seen.pt")
        {'seen': 7}
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_object(obj, f, safe_serialization)


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Save an object on this process."""
    if safe_serialization and not (isinstance(obj, dict) and all(isinstance(value, Tensor) for value in obj.values())):
        raise ConfigurationError(
            f"safe_serialization=True needs a dict of tensors (got a {type(obj).__name__}"
            f"{' with other values' if isinstance(obj, dict) else ''}). Leave it out to save anything with torch.save."
        )
    if isinstance(f, (str, Path, RemotePath)):
        target = local_path(f, "save")
        try:
            replace_file(target, lambda path: _write(obj, path, safe_serialization))
        except OSError as error:  # it names no file, or the partial one
            raise OSError(error.errno, error.strerror, str(target)) from error
    elif safe_serialization:
        raise ConfigurationError("safe_serialization=True needs a path (got an open file). Give the path.")
    else:
        torch.save(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what `torch.save` wrote: tensors and plain values only, unless you give `weights_only=False`.

    Args:
        f: A path, or a file that is open for reading.
        map_location: See `torch.load`.
        **kwargs: Other arguments of `torch.load`. `weights_only=False` lets the file run code.

    Raises:
        CheckpointError: If the file holds other objects.
    """
    try:
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{f} holds more than tensors and plain values: {str(error).splitlines()[0]} If you trust where it comes "
            "from, call load(…, weights_only=False), which can run code."
        ) from error


def _write(obj: Any, path: Path, safe_serialization: bool) -> None:
    if safe_serialization:
        Tensors(obj).write(path)
        return
    with ChecksummedFile(path) as file:  # not for its checksum: its errors have the reason
        torch.save(obj, cast(Any, file))
