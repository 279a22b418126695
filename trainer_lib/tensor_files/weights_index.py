"""A model's weights on disk: one file, or shards with an index, in the layout of Hugging Face."""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_lib.filesystem.atomic_files import path_inside
from trainer_lib.filesystem.strict_json import read_json
from trainer_lib.foundation.byte_sizes import convert_file_size_to_int
from trainer_lib.foundation.errors import CheckpointError, UnsupportedError
from trainer_lib.tensor_files.file_contents import Content, Json, PickledTensors, Tensors
from trainer_lib.tensor_files.load_tensors import load_tensors
from trainer_lib.tensor_files.rank_shards import SHARDS_ENDING, read_whole
from trainer_lib.tensor_files.safetensors import read_shapes, read_tensors
from trainer_lib.tensor_files.tensor_storage import bytes_of, without_aliases
from trainer_lib.tensor_files.weight_names import weights_ending, weights_stem

_INDEX_ENDING = ".index.json"


def weight_files(
    tensors: Mapping[str, Tensor], max_shard_size: int | str, index: int = 0, safe: bool = True
) -> dict[str, Content]:
    """Return the files that hold a model's weights, by name; an index of shards is the last of them.

    Args:
        tensors: The weights.
        max_shard_size: The size of one file in bytes, or a string such as "10GB". A larger tensor gets its own file.
        index: The index of the model among those of a training.
        safe: Whether to write safetensors; otherwise pickles.
    """
    stem, ending, kind = weights_stem(index, safe), weights_ending(safe), Tensors if safe else PickledTensors
    shards = list(_shards(tensors, convert_file_size_to_int(max_shard_size)))
    if len(shards) == 1:
        return {f"{stem}{ending}": kind(shards[0])}
    files: dict[str, Content] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}{ending}"
        files[name] = kind(shard)
        # A safetensors file holds a tensor under its first name, and the others in its metadata.
        names = without_aliases(shard)[0] if safe else shard
        weight_map |= dict.fromkeys(names, name)
    total = sum(file.size for file in files.values())
    files[f"{stem}{ending}{_INDEX_ENDING}"] = Json({"metadata": {"total_size": total}, "weight_map": weight_map}, True)
    return files


def load_state_dict(checkpoint_file: str | Path, device_map: Any = None) -> dict[str, Tensor]:
    """Read one file of weights: safetensors, or a pickle that holds only tensors.

    Args:
        checkpoint_file: The file.
        device_map: Not supported by this version.
    """
    if device_map is not None:
        raise UnsupportedError("load_state_dict(device_map=…): this version reads weights to the CPU. Leave it out.")
    path = Path(checkpoint_file).expanduser()
    if path.suffix == ".safetensors":
        return read_tensors(path)
    return _read_pickled(path)


def read_weights(
    checkpoint: Path, device: str = "cpu", load: Callable[[Path, str], dict[str, Tensor]] = load_tensors
) -> dict[str, Tensor]:
    """Read the weights in a file, in the files of an index, or in a folder that has either.

    The shards that the ranks of a sharded model wrote are assembled.

    Args:
        checkpoint: The file, index or folder.
        device: The device that the weights are read to.
        load: Reads a safetensors file.
    """
    if has_rank_shards(checkpoint):
        return read_whole(_rank_shards(checkpoint))
    weights: dict[str, Tensor] = {}
    for path in files_of_weights(checkpoint):
        weights |= load(path, device) if path.suffix == ".safetensors" else _read_pickled(path)
    return weights


def has_rank_shards(checkpoint: Path) -> bool:
    """Whether a folder has the shards that the ranks of a sharded model wrote."""
    return _rank_shards(checkpoint).is_dir()


def read_file_shapes(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtypes and shapes of the weights in one file, without reading their values where that is possible."""
    if path.suffix == ".safetensors":
        return read_shapes(path)
    is_zip = zipfile.is_zipfile(path)  # an older pickle cannot be mapped into memory
    return {name: (value.dtype, value.shape) for name, value in _read_pickled(path, mmap=is_zip).items()}


def files_of_weights(checkpoint: Path) -> list[Path]:
    """Return the files of weights that a file, an index or a folder refers to.

    Raises:
        CheckpointError: If there are none, or an index names a file that is missing.
    """
    if checkpoint.is_dir():
        checkpoint = _in_folder(checkpoint)
    if not checkpoint.is_file():
        raise CheckpointError(f"There is no file {checkpoint}.")
    if checkpoint.suffix != ".json":
        return [checkpoint]
    try:
        index = read_json(checkpoint.read_bytes())
        names = sorted(set(index.get("weight_map", index).values()))  # older indexes are the map itself
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint} is not an index of weights: {error!r}.") from error
    paths = [path_inside(checkpoint.parent, name, checkpoint.name) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{checkpoint} names files that are missing: {', '.join(missing)}.")
    return paths


def find_weights(folder: Path, index: int = 0, safe: bool = True) -> Path | None:
    """Return the file or index with the weights of a model; `None` if the folder has neither."""
    name = f"{weights_stem(index, safe)}{weights_ending(safe)}"
    return next((path for path in (folder / name, folder / f"{name}{_INDEX_ENDING}") if path.is_file()), None)


def _rank_shards(checkpoint: Path) -> Path:
    return checkpoint / f"{weights_stem()}{SHARDS_ENDING}"


def _in_folder(folder: Path) -> Path:
    for safe in (True, False):
        if (path := find_weights(folder, safe=safe)) is not None:
            return path
    candidates = [path for pattern in ("*.safetensors", "*.bin") for path in sorted(folder.glob(pattern))]
    indexes = [*sorted(folder.glob(f"*{_INDEX_ENDING}")), *folder.glob("index.json")]
    only = indexes or candidates
    if len(only) == 1:
        return only[0]
    raise CheckpointError(
        f"{folder} has no weights: neither {weights_stem()}.safetensors nor an index of shards. "
        f"It has {', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}."
    )


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    kept, aliases = without_aliases(tensors)
    shard: dict[str, Tensor] = {}
    filled = 0
    names: dict[str, list[str]] = {first: [first] for first in kept}
    for name, first in aliases.items():
        names[first].append(name)
    for first, tensor in kept.items():
        if shard and filled + bytes_of(tensor) > limit:
            yield shard
            shard, filled = {}, 0
        # All names of a tensor go into the same shard.
        shard |= {name: tensors[name] for name in names[first]}
        filled += bytes_of(tensor)
    yield shard


def _is_state(state: Any) -> bool:
    return isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())


def _read_pickled(path: Path, mmap: bool = False) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read as a pickle of tensors only: {reason}") from error
    if not _is_state(state):
        inside = [key for key, value in state.items() if _is_state(value) and value] if isinstance(state, dict) else []
        load = f"torch.load({str(path)!r}, weights_only=True)"
        hint = f" Its {inside[0]!r} is one: model.load_state_dict({load}[{inside[0]!r}])." if inside else ""
        raise CheckpointError(f"{path} must hold a dict of tensors (got a {type(state).__name__}).{hint}")
    return state
