"""Writing and reading files of tensors in the safetensors format, which holds no code."""

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter

from trainer_lib.filesystem.checksums import ChecksummedFile
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.errors import CheckpointError
from trainer_lib.foundation.tensors.tensor_operations import as_bytes
from trainer_lib.tensor_files.tensor_storage import stored_values, without_aliases

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = {"format": "pt"}  # transformers refuses files without it
_Named = TypeVar("_Named")
ALIGNMENT = 64  # bytes, as torch aligns its memory: some kernels round differently elsewhere


class TensorLocation(NamedTuple):
    """The location of a tensor in a file.

    Args:
        dtype: Its dtype.
        shape: Its shape.
        start: The offset of its first byte in the file.
    """

    dtype: torch.dtype
    shape: torch.Size
    start: int


def unsupported_reason(tensor: Tensor) -> str | None:
    """Return why safetensors cannot store a tensor; `None` if it can."""
    if type(tensor) not in (Tensor, Parameter):
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return "is not a dense tensor"
    if tensor.dtype not in _NAMES:
        return f"has the dtype {tensor.dtype}, which safetensors does not support"
    return None


def _instead(tensor: Tensor) -> str:
    if stored_values(tensor) is tensor:
        return ""
    return (
        " Keep its indices and values as buffers, make it in the constructor with persistent=False, or save with "
        "safe_serialization=False."
    )


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: AnyPath,
    metadata: Mapping[str, str] | None = None,
    bypasses_cache: bool = False,
) -> str:
    """Write a file of tensors, and return its checksum; a tensor with several names is stored once.

    Args:
        tensors: The tensors by name.
        path: The file.
        metadata: Strings to store in the header.
        bypasses_cache: Whether to write past the page cache, which spares the cores of others and takes longer.
    """
    kept, aliases = without_aliases(tensors)
    for name, tensor in kept.items():
        if (reason := unsupported_reason(tensor)) is not None:
            raise CheckpointError(f"{name!r} {reason}, so it cannot be saved.{_instead(tensor)}")
    # Large dtypes first, so that each tensor is aligned to the size of its elements.
    order = sorted(kept, key=lambda name: (-kept[name].dtype.itemsize, name))
    with ChecksummedFile(path, bypasses_cache) as file:
        file.write(_header({name: kept[name] for name in order}, {**aliases, **(metadata or {})}))
        for name in order:
            file.write(_bytes(kept[name]))
    return file.checksum


@contextmanager
def open_safetensors(path: Path, device: str = "cpu") -> Generator[Any]:
    """Yield a file that safetensors has opened: one whose path is not valid UTF-8 through its descriptor."""
    with nullcontext() if _is_utf8(path) else path.open("rb") as opened:
        name = path if opened is None else f"/proc/self/fd/{opened.fileno()}"
        with safe_open(name, framework="pt", device=device) as file:
            yield file


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read a file of tensors, each under all its names.

    On the CPU the tensors are memory-mapped: clone those that you need after the file is deleted.

    Raises:
        CheckpointError: If it is not a safetensors file, or is incomplete.
    """
    try:
        with open_safetensors(path, str(device)) as file:
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            aliases: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from error
    return with_aliases(tensors, aliases)


def with_aliases(tensors: dict[str, _Named], metadata: Mapping[str, str]) -> dict[str, _Named]:
    """Return tensors, or what is known of them, under all their names, including the aliases in the metadata."""
    aliases = {name: tensors[first] for name, first in metadata.items() if name not in _METADATA and first in tensors}
    return {**aliases, **tensors}


def read_shapes(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtypes and shapes of the tensors in a file, under all their names, without reading them."""
    return {name: (location.dtype, location.shape) for name, location in locate_tensors(path).items()}


def locate_tensors(path: Path) -> dict[str, TensorLocation]:
    """Return the locations of the tensors in a file, under all their names.

    Raises:
        CheckpointError: If it is not a safetensors file.
    """
    return with_aliases(*read_locations(path))


def read_header(path: Path) -> tuple[dict[str, tuple[torch.dtype, torch.Size]], dict[str, str]]:
    """Return the dtypes and shapes of the tensors in a file, and its metadata.

    Raises:
        CheckpointError: If it is not a safetensors file.
    """
    locations, metadata = read_locations(path)
    return {name: (location.dtype, location.shape) for name, location in locations.items()}, metadata


def read_locations(path: Path) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Return the locations of the tensors in a file, and its metadata.

    Raises:
        CheckpointError: If it is not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if length > size:  # do not allocate as much memory as a damaged file asks for
                raise ValueError("its header is longer than the file")
            header = read_json(file.read(length))
        with open_safetensors(path):  # which checks that tensors neither overlap nor leave bytes out
            metadata = header.pop("__metadata__", {})
        return {name: _location(name, info, 8 + length, size) for name, info in header.items()}, metadata
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
        IndexError,
        SafetensorError,
    ) as error:
        raise _unreadable(path, error) from error


def _location(name: str, info: Mapping[str, Any], data_start: int, size: int) -> TensorLocation:
    dtype, shape = _TYPES[info["dtype"]], torch.Size(info["shape"])
    start, end = info["data_offsets"]
    if not 0 <= start <= end <= size - data_start or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has the invalid data offsets {start} to {end}")
    return TensorLocation(dtype, shape, data_start + start)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as safetensors: {error}")


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {**metadata, **_METADATA}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> Any:
    return as_bytes(tensor.detach().cpu()).numpy().data
