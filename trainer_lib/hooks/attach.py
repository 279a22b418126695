"""Attaches hooks of devices and offloading to all modules of a model."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from trainer_lib.hooks.align_devices import AlignDevicesHook
from trainer_lib.hooks.model_hook import add_hook_to_module
from trainer_lib.hooks.offloaded_tensor import OffloadedTensor
from trainer_lib.hooks.weight_prefetch import WeightPrefetcher
from trainer_lib.modules.device_placement import Device, has_offloaded_params, move_tensors, set_module_tensor_to_device
from trainer_lib.modules.module_kinds import READS_INNER_WEIGHTS
from trainer_lib.modules.weights.tensor_sizes import named_module_tensors
from trainer_lib.modules.weights.tensor_slots import buffer_slots, parameter_slots
from trainer_lib.modules.weights.tied_parameters import TiedTensors
from trainer_lib.tensor_files.offloaded_weights import PrefixedDataset

Tied = dict[int, dict[torch.device, Tensor]]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Tied | None = None,
) -> None:
    """Have a module and all modules inside it take their inputs on a device; modules with a hook keep theirs.

    Args:
        module: The module.
        execution_device: The device.
        skip_keys: Names of arguments that stay where they are.
        preload_module_classes: Names of classes whose modules need no hooks inside them.
        tied_params_map: Copies of tied tensors by address and device.
    """
    if not hasattr(module, "_hf_hook") and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Tied | None = None,
    *,
    prefetcher: WeightPrefetcher | None = None,
    ties: TiedTensors | None = None,
    recurse: bool = True,
) -> None:
    """Attach an `AlignDevicesHook` to each module with weights of its own in a module.

    Args:
        module: The module.
        execution_device: The device of its forwards.
        offload: Whether its weights are kept elsewhere between forwards.
        weights_map: The offloaded weights by name, of the whole model.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of the module in the model.
        skip_keys: Names of arguments that stay where they are.
        preload_module_classes: Names of classes whose modules use weights of the modules inside them directly: all
            of these weights are loaded together.
        tied_params_map: Copies of tied tensors by address and device.
        prefetcher: What reads the weights; by default one for this call.
        ties: The names of tied tensors of the whole model, which are tied again when the hooks are removed; by default
            those of `module`.
        recurse: Whether modules inside it get hooks too.
    """
    if offload and prefetcher is None:
        prefetcher = WeightPrefetcher(torch.device("cpu" if execution_device is None else execution_device))
    if offload and ties is None:
        ties = TiedTensors(module, module_name)
    preloads = (
        offload
        and recurse
        and (isinstance(module, READS_INNER_WEIGHTS) or type(module).__name__ in (preload_module_classes or ()))
    )
    if preloads or any(True for _ in named_module_tensors(module)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=preloads,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
            prefetcher=prefetcher,
            name=module_name,
            ties=ties,
        )
        add_hook_to_module(module, hook, append=True)
    if preloads or not recurse:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
            prefetcher=prefetcher,
            ties=ties,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Tied | None = None,
    *,
    ties: TiedTensors | None = None,
) -> None:
    """Attach hooks to the blocks of a model, each with its own device, and to the model itself.

    Args:
        module: The model.
        execution_device: The device of each block by its name; or one for all.
        offload: Whether weights are kept elsewhere between forwards, by the name of the block; or one value for all.
        weights_map: The offloaded weights by name.
        offload_buffers: Whether buffers are offloaded too.
        module_name: The name of `module` in the model.
        skip_keys: Names of arguments that stay where they are.
        preload_module_classes: See `attach_align_device_hook`.
        tied_params_map: Copies of tied tensors by address and device.
        ties: See `attach_align_device_hook`.
    """
    devices = dict(execution_device) if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloads = dict(offload) if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    targets = {name: None if device is None else torch.device(device) for name, device in devices.items()}
    prefetchers = {target: WeightPrefetcher(target or torch.device("cpu")) for target in set(targets.values())}
    ties = ties or TiedTensors(module, module_name)
    only = next(iter(prefetchers)) if len(prefetchers) == 1 else None  # then inputs move once, for the whole model
    for name, target in targets.items():
        block, tensor = _block(module, name, module_name)
        if tensor is not None and has_offloaded_params(block):
            continue  # the hook for another tensor of this module fetches all of them
        if offloads.get(name):
            attach_align_device_hook(
                block,
                target,
                True,
                weights_map,
                offload_buffers,
                name if tensor is None else name.rpartition(".")[0],
                skip_keys,
                preload_module_classes,
                tied_params_map,
                prefetcher=prefetchers[target],
                ties=ties,
                recurse=tensor is None,
            )
        elif tensor is not None and target is not None:
            set_module_tensor_to_device(block, tensor, target, tied_params_map=tied_params_map)
        elif target is not None:
            _place(block, target, tied_params_map)
        if target is not None and tensor is None and only is None:
            add_hook_to_module(block, AlignDevicesHook(target, skip_keys=skip_keys), append=True)
    add_hook_to_module(module, AlignDevicesHook(only, io_same_device=True, skip_keys=skip_keys), append=True)


def _block(model: nn.Module, name: str, model_name: str) -> tuple[nn.Module, str | None]:
    """Return the module of this name; of a tensor its module, and the last part of the name."""
    inside = name.removeprefix(model_name).removeprefix(".") if model_name else name
    owner, _, last = inside.rpartition(".")
    parent = model.get_submodule(owner)
    if last in parameter_slots(parent) or last in buffer_slots(parent):
        return parent, last
    return model.get_submodule(inside), None


def _place(module: nn.Module, device: torch.device, tied: Tied | None) -> None:
    tensors = named_module_tensors(module, recurse=True, remove_duplicate=False)
    # The module may be in the model under another name too, which is offloaded.
    names = [name for name, tensor in tensors if not isinstance(tensor, OffloadedTensor)]
    move_tensors(module, names, device, tied)
