"""Saving and loading the weights of a model alone, in Hugging Face's layout."""

import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.format.layout import is_committed
from trainer_lib.checkpointing.format.manifest import Manifest, read_manifest
from trainer_lib.checkpointing.load.local_files import fetch
from trainer_lib.checkpointing.load.verification import check_bytes, damaged
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
from trainer_lib.modules.names import canonical_name
from trainer_lib.modules.state import check_fits, inner_module
from trainer_lib.modules.ties import find_tied_parameters, retie_parameters
from trainer_lib.tensor_files.model_files import read_weights, weight_files
from trainer_lib.tensor_files.weight_names import weights_ending, weights_stem

_logger = get_logger(__name__)

_ENDINGS = (".safetensors", ".bin", ".index.json")


def save_weights(state: Mapping[str, Any], folder: AnyPath, max_shard_size: int | str, safe: bool) -> None:
    """Save weights in Hugging Face's layout, each file atomically, and delete the files of an earlier save.

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
        for name, content in files.items():
            storage.write_with(name, content.write)
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
        device_map: `{"": device}`, to move the model to that device. This version does not split or offload models.
        offload_folder: Not supported by this version, like all offloading.
        dtype: The dtype of the loaded weights in the model; by default the model's own.
        offload_state_dict: See `offload_folder`.
        offload_buffers: See `offload_folder`.
        keep_in_fp32_modules: See `offload_folder`.
        offload_8bit_bnb: See `offload_folder`.
        strict: Whether names that only the model or only the checkpoint has raise; otherwise they are logged.
        full_state_dict: Not supported by this version: load weights before `prepare` shards the model.
        broadcast_from_rank0: See `full_state_dict`.

    Raises:
        CheckpointError: If the weights are missing or damaged.
        StateError: If they do not fit the model.
        PreparationError: If the model is sharded.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 2)
        >>> accelerator.save_model(accelerator.prepare(model), "/tmp/weights")
        >>> load_checkpoint_in_model(torch.nn.Linear(4, 2), "/tmp/weights", strict=True)
    """
    device = _one_device(device_map)
    _refuse(
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict or None,
        offload_buffers=offload_buffers or None,
        keep_in_fp32_modules=keep_in_fp32_modules,
        offload_8bit_bnb=offload_8bit_bnb or None,
        full_state_dict=None if full_state_dict else False,
        broadcast_from_rank0=broadcast_from_rank0 or None,
    )
    chosen = _dtype(dtype)
    model = inner_module(model)
    _refuse_sharded(model)
    with checked_weights(checkpoint) as files:
        weights = read_weights(files)
    check_fits(model, {name: tensor.shape for name, tensor in weights.items()}, strict)
    ties = find_tied_parameters(model)
    loaded = _assign(model, weights, chosen)
    retie_parameters(model, ties)
    if device is not None:
        model.to(device)
    if not strict:
        _warn_about_differences(model, loaded, weights, checkpoint)


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


def _assign(model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> set[int]:
    """Assign weights to the tensors of the model with the same names, and return the ids of those tensors."""
    loaded: set[int] = set()
    for name, current in list(model.state_dict(keep_vars=True).items()):
        value = weights.get(canonical_name(name))
        if value is None or not isinstance(current, Tensor):
            continue
        target_dtype = current.dtype if dtype is None or not current.is_floating_point() else dtype
        if current.device.type == "meta":
            owner, _, attribute = name.rpartition(".")
            value = value.to(target_dtype, copy=True)
            is_parameter = isinstance(current, nn.Parameter)
            new = nn.Parameter(value, current.requires_grad) if is_parameter else value
            setattr(model.get_submodule(owner), attribute, new)
            loaded |= {id(new), id(current)}
            continue
        if current.dtype == target_dtype:
            with torch.no_grad():
                current.copy_(value)
        else:
            current.data = value.to(current.device, target_dtype)
        loaded.add(id(current))
    return loaded


def _warn_about_differences(model: nn.Module, loaded: set[int], weights: Mapping[str, Tensor], checkpoint: Any) -> None:
    state = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    missing = [name for name, value in state.items() if id(value) not in loaded and isinstance(value, Tensor)]
    unexpected = [name for name in weights if name not in state]
    if missing:
        _logger.warning("Weights that %s does not have are unchanged: %s.", checkpoint, ", ".join(sorted(missing)[:8]))
    if unexpected:
        _logger.warning(
            "Weights in %s that the model does not have: %s.", checkpoint, ", ".join(sorted(unexpected)[:8])
        )


def _one_device(device_map: Any) -> torch.device | None:
    if not isinstance(device_map, Mapping) or list(device_map) != [""] or device_map[""] == "disk":
        _refuse(device_map=device_map)
        return None
    try:
        return torch.device(device_map[""])
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device_map={device_map!r} does not name a device: {str(error).splitlines()[0]}"
        ) from error


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"load_checkpoint_in_model({name}={shown(value)}): this version loads whole weights into a model on "
                "one device." + (' Give {"": device}, or leave it out.' if name == "device_map" else " Leave it out.")
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


def _weights_in(folder: AnyPath) -> list[AnyPath]:
    """Return the files of the first model's weights: whole files, shards and indexes, safetensors and pickles."""
    return [
        path
        for stem, ending in ((weights_stem(safe=safe), weights_ending(safe)) for safe in (True, False))
        for path in folder.iterdir()
        if re.fullmatch(rf"{stem}(-\d+-of-\d+)?{re.escape(ending)}(\.index\.json)?", path.name)
    ]
