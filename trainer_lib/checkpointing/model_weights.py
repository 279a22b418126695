"""Saving and loading the weights of a model alone, in Hugging Face's layout."""

import os
import re
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.format.manifest import Manifest, read_manifest
from trainer_lib.checkpointing.load.load_by_device_map import load_by_device_map
from trainer_lib.checkpointing.load.load_in_place import load_from_rank0, load_in_place
from trainer_lib.checkpointing.load.local_files import fetch
from trainer_lib.checkpointing.load.verification import check_bytes, damaged
from trainer_lib.checkpointing.load.weight_files import WeightFiles
from trainer_lib.checkpointing.storage.remote_storage import temporary_folder
from trainer_lib.checkpointing.storage.storage import storage_of
from trainer_lib.filesystem.remote_paths import AnyPath, RemotePath, path_at
from trainer_lib.foundation.byte_sizes import convert_bytes, convert_file_size_to_int
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import (
    CheckpointError,
    ConfigurationError,
    PreparationError,
    UnreachableError,
    UnsupportedError,
)
from trainer_lib.logging import get_logger
from trainer_lib.modules.device_placement import Device, read_device_map
from trainer_lib.modules.module_kinds import model_has_dtensor
from trainer_lib.modules.quantized_layers import is_quantized
from trainer_lib.modules.weights.state_dicts import check_fits, inner_module
from trainer_lib.state import PartialState
from trainer_lib.tensor_files.offloaded_weights import Index
from trainer_lib.tensor_files.weight_names import weights_ending, weights_stem
from trainer_lib.tensor_files.weights_index import weight_files

_logger = get_logger(__name__)

_ENDINGS = (".safetensors", ".bin", ".index.json")


def save_weights(state: Mapping[str, Any], folder: AnyPath, max_shard_size: int | str, safe: bool) -> None:
    """Save weights in Hugging Face's layout, in place of those of an earlier save.

    An error leaves the earlier weights; no kill leaves files of both to a reader.

    Args:
        state: The state of a model. Only its tensors are saved.
        folder: The folder to save to.
        max_shard_size: The size of one file.
        safe: Whether to write safetensors; otherwise pickles of tensors.
    """
    convert_file_size_to_int(max_shard_size)
    if folder.is_file():
        raise ConfigurationError(f"{folder} is a file, and weights are saved to a folder. Give another name.")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) < len(state):
        skipped = [name for name in state if name not in tensors]
        _logger.warning("%s are not tensors and are not saved with the weights.", ", ".join(skipped))
    files = weight_files(tensors, max_shard_size, safe=safe)
    storage = storage_of(folder)
    try:
        storage.write_files({name: content.write for name, content in files.items()})
        # Weights of an earlier save, which a reader of the folder could mistake for these.
        storage.delete_files([path.name for path in _weights_in(folder) if path.name not in files])
    except (OSError, UnreachableError) as error:
        needed = convert_bytes(sum(content.size for content in files.values()))
        raise CheckpointError(f"{folder}: the weights ({needed}) could not be written: {error}") from error


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | AnyPath,
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Any = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model before `prepare`; weights on the meta device become weights on the CPU.

    Args:
        model: The model.
        checkpoint: A file of weights, an index of several files, or a folder with either, such as those that
            `save_model`, `save_state` and `save_pretrained` write.
        device_map: The device of each module; by default where its weights are. Weights of modules on the "disk" are
            not loaded and become empty: `dispatch_model` or `load_checkpoint_and_dispatch` runs such a model.
        offload_folder: The folder for weights on the disk that are not in safetensors files, and for their index.
        dtype: The dtype of the loaded weights in the model; by default the model's own.
        offload_state_dict: Accepted for compatibility: weights never take memory twice.
        offload_buffers: Whether buffers of modules on the disk stay there too.
        keep_in_fp32_modules: Names of modules whose weights are loaded in fp32 whatever `dtype` says.
        offload_8bit_bnb: Accepted for compatibility: weights of 8-bit layers on the disk are always quantized.
        strict: Whether names that only the model or only the checkpoint has raise; otherwise they are logged.
        full_state_dict: Only `True` for a model that is sharded: each rank takes its parts of whole weights.
        broadcast_from_rank0: Whether only rank 0 reads the files, and sends the other ranks one tensor after the other.

    Raises:
        CheckpointError: If the weights are missing or damaged.
        StateError: If they do not fit the model.
        PreparationError: If a sharded model is to get a device map, or another dtype.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 2)
        >>> accelerator.save_model(accelerator.prepare(model), "weights")
        >>> load_checkpoint_in_model(torch.nn.Linear(4, 2), "weights", strict=True)
    """
    is_mapped = device_map is not None or bool(keep_in_fp32_modules)
    refuse_distributed(full_state_dict, broadcast_from_rank0, is_mapped, model)
    if isinstance(device_map, str):
        raise ConfigurationError(
            f"load_checkpoint_in_model(device_map={device_map!r}) needs a map from names of modules to devices. Use "
            "infer_auto_device_map to make one, or load_checkpoint_and_dispatch."
        )
    if device_map is None and any(is_quantized(parameter) for parameter in model.parameters()):
        device_map = {"": _device(model)}
    if device_map is not None or keep_in_fp32_modules:
        load_by_map(
            model,
            checkpoint,
            device_map or {"": "cpu"},
            offload_folder,
            dtype,
            strict,
            keep_in_fp32_modules or (),
            offload_buffers,
        )
        return
    model, chosen = inner_module(model), _dtype(dtype)
    if broadcast_from_rank0:
        missing, unexpected = load_from_rank0(model, Path(str(checkpoint)), chosen, strict, PartialState().group)
    else:
        with checked_weights(checkpoint) as files:
            missing, unexpected = load_in_place(model, files, chosen, strict)
    if not strict:
        _warn(model, missing, unexpected, checkpoint)


@contextmanager
def checked_weights(location: str | AnyPath) -> Generator[Path]:
    """Yield a local path of weights, verified if they are in a checkpoint; of weights behind a URL, temporary copies.

    Raises:
        DamagedError: If a file of the checkpoint is damaged.
    """
    checkpoint = path_at(location)
    if isinstance(checkpoint, Path):
        if is_committed(checkpoint):
            manifest = read_manifest(checkpoint)
            check_bytes(checkpoint, manifest, _names_of_weights(manifest))
        yield checkpoint
        return
    copies = temporary_folder()
    try:
        yield _fetched(checkpoint, copies)
    finally:
        shutil.rmtree(copies, ignore_errors=True)


def _fetched(checkpoint: RemotePath, copies: Path) -> Path:
    if checkpoint.is_file():
        is_index = checkpoint.suffix == ".json"
        names = [path.name for path in _weights_in(checkpoint.parent)] if is_index else [checkpoint.name]
        source, manifest = checkpoint.parent, None
    elif is_committed(checkpoint):
        source, manifest = checkpoint, read_manifest(checkpoint)
        names = _names_of_weights(manifest)
    else:
        source, manifest = checkpoint, None
        names = [name for name in checkpoint.sizes() if "/" not in name and name.endswith(_ENDINGS)]
    complaints = fetch(source, names, manifest, copies)
    if complaints:
        raise damaged(source, complaints)
    return copies / checkpoint.name if source != checkpoint else copies


def _names_of_weights(manifest: Manifest) -> list[str]:
    stems = tuple(f"{weights_stem(safe=safe)}{after}" for safe in (True, False) for after in ".-")
    return [name for name in manifest.files if name.startswith(stems)]


def _refuse_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_local_tensor"):
            raise PreparationError(
                f"{name} is sharded. Load weights before prepare(model) shards it: all ranks then start from the "
                "weights of the main rank. To resume a training, use load_state."
            )


def _warn(model: nn.Module, missing: Sequence[str], unexpected: Sequence[str], checkpoint: Any) -> None:
    state = model.state_dict(keep_vars=True)
    empty = [name for name in missing if name in state and state[name].device.type == "meta"]
    unchanged = [name for name in missing if name not in empty]
    if unchanged:
        _logger.warning("Weights that %s does not have are unchanged: %s.", checkpoint, ", ".join(unchanged[:8]))
    if empty:
        _logger.warning("Weights that are not in %s have no values yet: %s.", checkpoint, ", ".join(empty[:8]))
    if unexpected:
        _logger.warning("Weights in %s that the model does not have: %s.", checkpoint, ", ".join(unexpected[:8]))


def load_by_map(
    model: nn.Module,
    checkpoint: str | AnyPath,
    device_map: Mapping[str, Device],
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    keep_in_fp32: Iterable[str] = (),
    offload_buffers: bool = False,
) -> Index:
    """Load weights, each to its device, and return the index of those that stay on the disk.

    See `load_checkpoint_in_model`; model and weights are checked before anything is loaded.
    """
    _refuse_sharded(model)
    device_map = read_device_map(device_map)
    folder = None if offload_folder is None else Path(offload_folder)
    with checked_weights(checkpoint) as files:
        if files != Path(str(checkpoint)).expanduser() and "disk" in device_map.values():
            raise UnsupportedError(
                f"device_map puts modules on the disk, and {checkpoint} is not there. Copy the weights to this machine."
            )
        if strict:
            state = model.state_dict(keep_vars=True)
            check_fits(model, WeightFiles(files, state).shapes_for(state), strict)
        missing, unexpected, index = load_by_device_map(
            model, files, device_map, folder, _dtype(dtype), keep_in_fp32, offload_buffers
        )
    _warn(model, missing, sorted(unexpected), checkpoint)
    return index


def refuse_distributed(full_state_dict: bool, broadcast_from_rank0: bool, is_mapped: bool, model: nn.Module) -> None:
    """Raise for arguments of `load_checkpoint_in_model` that contradict each other, or the model."""
    if broadcast_from_rank0 and is_mapped:
        raise ConfigurationError(
            "broadcast_from_rank0=True sends weights to models that are whole or sharded on each rank; device_map and "
            "keep_in_fp32_modules place them on one. Leave one of them out."
        )
    if not full_state_dict and (broadcast_from_rank0 or model_has_dtensor(model)):
        raise UnsupportedError(
            "load_checkpoint_in_model(full_state_dict=False): files hold whole weights, and each rank of a sharded "
            "model takes its parts of them. Leave it out."
        )


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    if value is None:
        return None
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"dtype={shown(value)} is not a torch dtype. Give one such as torch.float16 or 'bfloat16'."
        )
    return dtype


def _device(model: nn.Module) -> torch.device:
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _weights_in(folder: AnyPath) -> list[AnyPath]:
    """Return the files of the first model's weights: whole files, shards and indexes, safetensors and pickles."""
    return [
        path
        for stem, ending in ((weights_stem(safe=safe), weights_ending(safe)) for safe in (True, False))
        for path in folder.iterdir()
        if re.fullmatch(rf"{stem}(-\d+-of-\d+)?{re.escape(ending)}(\.index\.json)?", path.name)
    ]
