"""This file is a model's weights without anything else: saved for others to read, and loaded from what others saved."""

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
    """Save weights in Hugging Face's layout, each file as a whole, in the place of those that were there.

    Args:
        state: The state of a model, of which the tensors are saved.
        folder: Where to.
        max_shard_size: The size of one file.
        safe: As safetensors; else as pickles of tensors.
    """
    convert_file_size_to_int(max_shard_size)
    if folder.is_file():
        raise ConfigurationError(f"{folder} is a file, and weights are saved to a folder. Give another name.")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) < len(state):
        others = [name for name in state if name not in tensors]
        _logger.warning("%s are no tensors and are not saved with the weights.", ", ".join(others))
    files = weight_files(tensors, max_shard_size, safe=safe)
    storage = storage_of(folder)
    try:
        for name, content in files.items():
            storage.write_with(name, content.write)
        # Those of an earlier save, which a reader of the folder might take for these.
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
    """Load weights into a model that is not prepared yet; one on the meta device gets them on the CPU.

    Args:
        model: The model.
        checkpoint: A file of weights, an index of several, or a folder with the one or the other, such as what
            `save_model`, `save_state` and `save_pretrained` wrote.
        device_map: `{"": device}`, to bring the model to that device. This version does not spread or offload.
        offload_folder: Not supported by this version, as all that offloads.
        dtype: The type that loaded weights take in the model; by default the type that the model has.
        offload_state_dict: See `offload_folder`.
        offload_buffers: See `offload_folder`.
        keep_in_fp32_modules: See `offload_folder`.
        offload_8bit_bnb: See `offload_folder`.
        strict: Raise for names that only one side has; else a warning tells of them.
        full_state_dict: Not supported by this version: load weights before `prepare` shards the model.
        broadcast_from_rank0: See `full_state_dict`.

    Raises:
        CheckpointError: If the weights are not there or damaged.
        StateError: If they do not fit.
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
    loaded = _put_in(model, weights, chosen)
    retie_parameters(model, ties)
    if device is not None:
        model.to(device)
    if not strict:
        _tell_differences(model, loaded, weights, checkpoint)


@contextmanager
def checked_weights(given: str | AnyPath) -> Generator[Path]:
    """Give the weights that lie somewhere, checked if they lie in a state; behind a URL, copies for as long.

    Raises:
        DamagedError: If they are not as they were written.
    """
    checkpoint = path_at(given)
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
                f"{name} is sharded. Load weights before prepare(model) shards it: all processes then start from the "
                "main process's. A whole training goes on with load_state."
            )


def _put_in(model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> set[int]:
    """Load what the model has a name for, and return the ids of what was loaded."""
    loaded: set[int] = set()
    for name, current in list(model.state_dict(keep_vars=True).items()):
        value = weights.get(canonical_name(name))
        if value is None or not isinstance(current, Tensor):
            continue
        wanted = current.dtype if dtype is None or not current.is_floating_point() else dtype
        if current.device.type == "meta":
            owner, _, attribute = name.rpartition(".")
            value = value.to(wanted, copy=True)
            is_parameter = isinstance(current, nn.Parameter)
            made = nn.Parameter(value, current.requires_grad) if is_parameter else value
            setattr(model.get_submodule(owner), attribute, made)
            loaded |= {id(made), id(current)}
            continue
        if current.dtype == wanted:
            with torch.no_grad():
                current.copy_(value)
        else:
            current.data = value.to(current.device, wanted)
        loaded.add(id(current))
    return loaded


def _tell_differences(model: nn.Module, loaded: set[int], weights: Mapping[str, Tensor], checkpoint: Any) -> None:
    own = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    missing = [name for name, value in own.items() if id(value) not in loaded and isinstance(value, Tensor)]
    unexpected = [name for name in weights if name not in own]
    for text, names in (("are not in it and stay as they were", missing), ("are not in the model", unexpected)):
        if names:
            _logger.warning("Of the weights in %s, %s: %s.", checkpoint, text, ", ".join(sorted(names)[:8]))


def _one_device(device_map: Any) -> torch.device | None:
    if not isinstance(device_map, Mapping) or list(device_map) != [""] or device_map[""] == "disk":
        _refuse(device_map=device_map)
        return None
    try:
        return torch.device(device_map[""])
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"device_map={device_map!r} names no device: {str(error).splitlines()[0]}") from error


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"load_checkpoint_in_model({name}={shown(value)}): this version loads whole weights into a model on "
                "one device." + (' Give {"": device}, or leave it out.' if name == "device_map" else " Leave it out.")
            )


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return None
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"dtype={shown(given)} is no type of torch. Give torch.float16, 'bfloat16' or such.")
    return found


def _weights_in(folder: AnyPath) -> list[AnyPath]:
    """Return the files of a first model's weights: whole, shards and indexes, of both kinds."""
    return [
        path
        for stem, ending in ((weights_stem(safe=safe), weights_ending(safe)) for safe in (True, False))
        for path in folder.iterdir()
        if re.fullmatch(rf"{stem}(-\d+-of-\d+)?{re.escape(ending)}(\.index\.json)?", path.name)
    ]
