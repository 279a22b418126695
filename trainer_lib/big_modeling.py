"""Models that are large for one device: weights on several devices, on the CPU and on the disk, or in smaller types."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.checkpointing.load_torchao import load_quantized_by_torchao
from trainer_lib.checkpointing.model_weights import load_by_map, load_checkpoint_in_model, refuse_distributed
from trainer_lib.device_map.balance import get_balanced_memory as get_balanced_memory
from trainer_lib.device_map.infer import infer_auto_device_map as infer_auto_device_map
from trainer_lib.device_map.units import Classes
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import ConfigurationError, StateError, UnsupportedError
from trainer_lib.foundation.tensors.tensor_operations import has_same_bits
from trainer_lib.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from trainer_lib.modules.device_placement import (
    Device,
    check_device_map,
    check_device_same,
    device_of,
    has_offloaded_params,
    read_device_map,
    split_device_map,
)
from trainer_lib.modules.init_on_device import init_empty_weights as init_empty_weights
from trainer_lib.modules.init_on_device import init_on_device as init_on_device
from trainer_lib.modules.weights.tied_parameters import TiedTensors, retie_by_device
from trainer_lib.options.quantization_options import BnbQuantizationConfig
from trainer_lib.options.torchao_options import TorchAoConfig
from trainer_lib.quantization.methods import quantization_method, single_device
from trainer_lib.tensor_files.offloaded_weights import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)

_CPU = torch.device("cpu")
_MOVES = ("to", "cpu", "cuda", "half", "float", "double", "bfloat16")  # methods that a dispatched model refuses


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    *,
    ties: TiedTensors | None = None,
) -> nn.Module:
    """Spread a model over devices, the memory of the host and the disk, in place, and return it.

    What is on the disk, or on the CPU next to accelerators, comes to the main device for each forward, one layer ahead
    of the one that computes. Outputs are those of the model on one device.

    Args:
        model: The model.
        device_map: The device of each module: the index of an accelerator, "cpu" or "disk".
        main_device: The device that runs offloaded modules; by default the first accelerator in the map, else the CPU.
        state_dict: The weights that stay in the memory of the host; by default those of the model.
        offload_dir: The folder for weights on the disk. Those of an earlier call are used if they have the model's
            values, or if the model is empty.
        offload_index: The index of weights that are on the disk already, in `offload_dir` or in safetensors files.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        skip_keys: Names of arguments that stay on their device.
        preload_module_classes: Names of classes that use the weights of modules inside them directly.
        force_hooks: Whether a model on one device gets hooks too, which move its inputs.
        ties: The names of tied tensors, which are tied again when the hooks are removed; by default those of `model`.

    Raises:
        ConfigurationError: If the map leaves out a module or names a device that is not there.
        UnsupportedError: If the model is dispatched already.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir="offloaded")
        >>> model[1].weight.device, model(torch.ones(1, 2)).shape
        (device(type='meta'), torch.Size([1, 1]))
    """
    ties = ties or TiedTensors(model)
    placed = read_device_map(device_map)
    check_device_map(model, placed)
    _refuse_dispatched(model)
    devices: dict[str, Any] = split_device_map(model, placed)
    main = _main_device(devices.values()) if main_device is None else torch.device(main_device)
    on_disk = [name for name, device in devices.items() if device == "disk"]
    offloaded = _with_siblings(
        model, [*on_disk, *(name for name, device in devices.items() if device == _CPU and main != _CPU)], devices
    )
    if not offloaded and len(set(devices.values())) == 1 and not force_hooks:
        if any(not check_device_same(tensor.device, main) for tensor in (*model.parameters(), *model.buffers())):
            model.to(main)
        vars(model)["hf_device_map"] = dict(device_map)
        return model
    weights = _offloaded_weights(model, offloaded, devices, state_dict, offload_dir, offload_index, offload_buffers)
    attach_align_device_hook_on_blocks(
        model,
        {name: main if name in offloaded else device for name, device in devices.items()},
        {name: name in offloaded for name in devices},
        weights,
        offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        ties=ties,
    )
    retie_by_device(model, ties.groups)
    vars(model).update(hf_device_map=dict(device_map), **{name: RefusedMove(model, name) for name in _MOVES})
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Iterable[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in the memory of the host, from where each layer's come for its forward.

    Args:
        model: The model.
        execution_device: The device of the forwards; by default that of the model.
        offload_buffers: Whether buffers are offloaded too.
        state_dict: The weights; by default those of the model.
        preload_module_classes: Names of classes that use the weights of modules inside them directly.
    """
    _refuse_dispatched(model)
    weights = state_dict or {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Iterable[str] | None = None,
) -> nn.Module:
    """Keep the weights of a model in files, from where each layer's come for its forward.

    Args:
        model: The model.
        offload_dir: The folder of the files. Those of an earlier call are used if they have the model's values, or if
            the model is empty.
        execution_device: The device of the forwards; by default that of the model.
        offload_buffers: Whether buffers are offloaded too.
        preload_module_classes: Names of classes that use the weights of modules inside them directly.
    """
    _refuse_dispatched(model)
    folder = Path(offload_dir)
    _keep_on_disk(model, folder, model.state_dict(), offload_buffers)
    weights = OffloadedWeightsLoader(save_folder=folder)
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward, and return it with a hook that moves it back.

    In a pipeline of models each takes the hook of the one before, which then leaves the device by itself.

    Args:
        model: The model.
        execution_device: The device of its forward; by default that of this process.
        prev_module_hook: The hook of the model that runs before.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | AnyPath,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: Classes = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    quantization: BnbQuantizationConfig | TorchAoConfig | None = None,
) -> nn.Module:
    """Load weights into an empty model, each to its device, and dispatch it.

    Args:
        model: The model, usually made under `init_empty_weights`.
        checkpoint: The weights; see `load_checkpoint_in_model`.
        device_map: The device of each module; or "auto" ("balanced"), "balanced_low_0" or "sequential", to infer it.
        max_memory: How much of each device to use; see `infer_auto_device_map`.
        no_split_module_classes: See `infer_auto_device_map`.
        offload_folder: The folder for weights on the disk that are not in safetensors files.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        dtype: The type of the weights; by default that of the model.
        offload_state_dict: Accepted for compatibility: weights never take memory twice.
        skip_keys: See `dispatch_model`.
        preload_module_classes: See `dispatch_model`.
        force_hooks: See `dispatch_model`.
        strict: Whether names that only the model or only the checkpoint has raise.
        full_state_dict: See `load_checkpoint_in_model`.
        broadcast_from_rank0: See `load_checkpoint_in_model`.
        quantization: How to quantize linear layers while their weights are loaded; then `dtype` is in its options.
            torchao's are on one device.

    Raises:
        StateError: If the weights do not fit the model, or an empty model has weights that the checkpoint lacks.

    Example:
        >>> Accelerator().save_model(nn.Linear(4, 2), "weights")
        >>> with init_empty_weights():
        ...     model = nn.Linear(4, 2)
        >>> model = load_checkpoint_and_dispatch(model, "weights", device_map="auto")
    """
    del offload_state_dict
    if isinstance(quantization, TorchAoConfig):
        return load_quantized_by_torchao(model, checkpoint, quantization, single_device(device_map), strict)
    method = quantization_method(quantization, dtype)
    method.replace_layers(model)
    device_map = method.device_map(model, device_map, max_memory, no_split_module_classes, offload_buffers)
    if device_map is None:
        load_checkpoint_in_model(
            model,
            checkpoint,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        return model
    refuse_distributed(full_state_dict, broadcast_from_rank0, True, model)
    ties = TiedTensors(model)
    index = load_by_map(
        model, checkpoint, device_map, offload_folder, method.dtype, strict, method.keep_in_fp32, offload_buffers
    )
    _check_complete(model, index, device_map, checkpoint)
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        ties=ties,
    )


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of a model's linear and convolution layers in a smaller type between their forwards.

    Args:
        module: The model.
        storage_dtype: The type between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: The type of a forward.
        skip_modules_pattern: Patterns of names of modules that stay as they are, such as "norm".
        skip_modules_classes: Classes of modules that stay as they are.
        non_blocking: Do not wait for copies.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
        >>> model[0].weight.dtype, model(torch.ones(1, 4)).dtype
        (torch.float8_e4m3fn, torch.float32)
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    for layer in _layers(module, "", patterns, skip_modules_classes or ()):
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers(
    module: nn.Module, name: str, patterns: Iterable[str], classes: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return []
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        return [module]
    return [
        layer
        for child_name, child in module.named_children()
        for layer in _layers(child, f"{name}.{child_name}" if name else child_name, patterns, classes)
    ]


def _offload_all(
    model: nn.Module,
    device: Device | None,
    weights: Mapping[str, Tensor],
    offload_buffers: bool,
    preload: Iterable[str] | None,
) -> nn.Module:
    first = next(iter(model.parameters()), None)
    if device is None:
        device = _CPU if first is None or first.device.type == "meta" else first.device
    attach_align_device_hook(model, device, True, weights, offload_buffers, preload_module_classes=preload)
    vars(model).update({name: RefusedMove(model, name) for name in _MOVES})
    return add_hook_to_module(model, AlignDevicesHook(device, io_same_device=True), append=True)


def _refuse_dispatched(model: nn.Module) -> None:
    if hasattr(model, "hf_device_map"):
        raise UnsupportedError(
            "The model has a device map already. To dispatch it in another way, load it again, or call "
            "remove_hook_from_submodules(model) and delete model.hf_device_map."
        )
    if _is_offloaded(model):
        raise UnsupportedError(
            f"Weights of the {type(model).__name__} are offloaded already. To dispatch it in another way, call "
            "remove_hook_from_submodules(model) first, which brings them back into memory."
        )


def _is_offloaded(model: nn.Module) -> bool:
    return any(has_offloaded_params(module) for module in model.modules())


def _with_siblings(model: nn.Module, offloaded: list[str], names: Iterable[str]) -> list[str]:
    """Return names of offloaded modules and tensors, and the other tensors of a module of which one is offloaded.

    A module has one hook, which fetches all of its tensors: those that are in memory stay there, and are not copied.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    owners = {name.rpartition(".")[0] for name in offloaded if name not in modules}
    tensors = (name for name in names if name not in modules and name.rpartition(".")[0] in owners)
    return list(dict.fromkeys([*offloaded, *tensors]))


def _offloaded_weights(
    model: nn.Module,
    offloaded: list[str],
    devices: Mapping[str, Any],
    state_dict: Mapping[str, Tensor] | None,
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Return the weights of the offloaded modules, after writing those that belong on the disk and are not there."""
    if not offloaded:
        return None
    on_disk = [name for name in offloaded if devices[name] == "disk"]
    state = model.state_dict() if state_dict is None else state_dict
    in_memory = extract_submodules_state_dict(state, [name for name in offloaded if name not in on_disk])
    if on_disk and index is None:
        if folder is None:
            raise ConfigurationError(
                f"device_map puts {', '.join(on_disk[:4]) or 'the model'}{', …' if len(on_disk) > 4 else ''} on the "
                "disk. Give offload_dir, a folder for these weights."
            )
        _keep_on_disk(model, Path(folder), extract_submodules_state_dict(state, on_disk), offload_buffers)
    _check_loaded(in_memory)
    weights = {name: tensor.to(device_of(name, devices)) for name, tensor in in_memory.items()}
    return OffloadedWeightsLoader(weights, None if folder is None else Path(folder), index)


def _keep_on_disk(model: nn.Module, folder: Path, state: Mapping[str, Tensor], offload_buffers: bool) -> None:
    """Write weights into a folder, unless it has them already; an empty model gets those that it has.

    Raises:
        ConfigurationError: If the folder has other values under these names.
    """
    on_disk = OffloadedWeightsLoader(save_folder=folder) if (folder / "index.json").is_file() else {}
    to_write = {name: tensor for name, tensor in state.items() if name not in on_disk}
    _check_loaded(to_write)
    unused = () if offload_buffers else {name for name, _ in model.named_buffers(remove_duplicate=False)}
    other = [
        name
        for name, tensor in state.items()
        if name in on_disk and name not in unused and not _is_same(on_disk[name], tensor)
    ]
    if other:
        raise ConfigurationError(
            f"{folder} has weights of another model, or of another time, which the {type(model).__name__} would run "
            f"with: {_listed(other)}. Delete the folder, or give another one."
        )
    if to_write:
        offload_state_dict(folder, to_write)


def _is_same(stored: Tensor, tensor: Tensor) -> bool:
    """Whether a stored tensor is this one, bit for bit; of a tensor on the meta device, whether it may be."""
    if tensor.is_meta:
        return (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
    return has_same_bits(stored.cpu(), tensor.cpu())


def _check_complete(
    model: nn.Module, index: Mapping[str, Any], device_map: Mapping[str, Device], checkpoint: Any
) -> None:
    """Raise for weights of an empty model that have no values after its checkpoint was loaded."""
    persistent = model.state_dict(keep_vars=True)
    empty = [
        name
        for name, tensor in _tensors(model)
        if tensor.is_meta and name not in index and str(device_of(name, device_map)) != "meta"
    ]
    missing = [name for name in empty if name in persistent]
    if missing:
        renamed = (
            " If transformers renames weights of this checkpoint while it loads them, load it with from_pretrained and "
            "write it once with save_model."
            if hasattr(model, "from_pretrained")
            else ""
        )
        raise StateError(
            f"Weights of the {type(model).__name__} have no values, since {checkpoint} does not have them and the "
            f"model is empty: {_listed(missing)}. Give a checkpoint with all weights, or make these modules outside of "
            f"init_empty_weights.{renamed}"
        )
    if empty:
        raise StateError(
            f"Buffers of the {type(model).__name__} have no values, and no checkpoint has them, since they are not "
            f"persistent: {_listed(empty)}. Leave include_buffers=True out of init_empty_weights."
        )


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}"


def _check_loaded(state: Mapping[str, Tensor]) -> None:
    empty = [name for name, tensor in state.items() if tensor.device.type == "meta"]
    if empty:
        raise ConfigurationError(
            f"{', '.join(empty[:4])}{', …' if len(empty) > 4 else ''} have no values yet: they are on the meta device. "
            "Load the weights first, or use load_checkpoint_and_dispatch."
        )


def _main_device(devices: Iterable[Any]) -> torch.device:
    return next((device for device in devices if device not in ("disk", _CPU)), _CPU)


class RefusedMove:
    """What a dispatched model has in place of a method that moves or converts it.

    Args:
        model: The model.
        name: The name of the method.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, and say where the model is; once its hooks and its device map are removed, run the method."""
        model = self._model
        device_map = vars(model).get("hf_device_map")
        if device_map is not None:
            devices = dict.fromkeys(map(str, device_map.values()))
            raise UnsupportedError(
                f"The {type(model).__name__} is spread over {', '.join(devices)} by its device map, and cannot be "
                "moved or converted as a whole. Load it again in another way."
            )
        if _is_offloaded(model):
            raise UnsupportedError(
                f"Weights of the {type(model).__name__} are offloaded, and it cannot be moved or converted as a whole. "
                "Call remove_hook_from_submodules(model) first, which brings them back into memory."
            )
        return getattr(type(model), self._name)(model, *args, **kwargs)
