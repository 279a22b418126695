"""Move single tensors of a module between devices, and questions for device maps."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, did_you_mean
from trainer_lib.logging import get_logger
from trainer_lib.modules.quantized_layers import is_quantized, on_meta, quantize
from trainer_lib.modules.weights.tensor_slots import buffer_slots, module_slots, parameter_slots

_logger = get_logger(__name__)

Device = int | str | torch.device
_Device = TypeVar("_Device", bound=Device)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one parameter or buffer of a module to a device, and give it a value if you have one.

    Args:
        module: The module.
        tensor_name: The name of the tensor, such as `encoder.weight`.
        device: The target device.
        value: The new value, which a tensor on the meta device needs.
        dtype: The type of the new value; by default that of the tensor.
        fp16_statistics: The scales (`SCB`) of a value that bitsandbytes quantized to 8 bits.
        tied_params_map: Copies of tied tensors by address and device; one on the device is used instead of a new one.
        non_blocking: Do not wait for the copy.
        clear_cache: Accepted for compatibility: the memory of the old tensor is free once nothing else uses it.

    Example:
        >>> layer = torch.nn.Linear(2, 1, device="meta")
        >>> set_module_tensor_to_device(layer, "bias", "cpu", value=torch.zeros(1))
        >>> layer.bias.device
        device(type='cpu')
    """
    del clear_cache
    owner, name = _owner(module, tensor_name)
    current = (parameter_slots(owner) | buffer_slots(owner))[name]
    target = torch.device(device)
    if fp16_statistics is not None and not is_quantized(current):
        raise ConfigurationError(
            f"fp16_statistics belong to weights of 8-bit layers of bitsandbytes, and {tensor_name} is a "
            f"{type(current).__name__}. Leave them out."
        )
    if value is None and current is not None and check_device_same(current.device, target):
        return
    if value is None and current is not None and current.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(f"{tensor_name} is on the meta device and has no value. Give value=.")
    if is_quantized(current):
        parameter_slots(owner)[name] = _moved(owner, current, target, value, _dtype(dtype), fp16_statistics)
        return
    source = current if value is None else value
    if source is None:
        return
    _check_shape(tensor_name, current, source)
    copies = (tied_params_map or {}).get(source.data_ptr(), {})
    moved = copies.get(target)
    if moved is None:
        kind = _dtype(dtype) or (source if current is None else current).dtype
        moved = source.detach().to(target, kind if source.is_floating_point() else source.dtype, non_blocking)
        if tied_params_map is not None and source.data_ptr() in tied_params_map:
            tied_params_map[source.data_ptr()][target] = moved
    _assign(owner, name, moved)


def move_tensors(
    module: nn.Module,
    names: Iterable[str],
    device: Device,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
) -> None:
    """Move parameters and buffers of a module to a device; names that are one tensor stay one."""
    moved: dict[int, tuple[Tensor | None, Tensor | None]] = {}  # what was moved is kept, so that its id stays its own
    for name in names:
        owner, last = _owner(module, name)
        slots: dict[str, Any] = parameter_slots(owner) if last in parameter_slots(owner) else buffer_slots(owner)
        before = slots[last]
        if id(before) in moved:
            slots[last] = moved[id(before)][1]
            continue
        set_module_tensor_to_device(module, name, device, tied_params_map=tied_params_map)
        moved[id(before)] = before, slots[last]


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | None = None) -> Generator[None]:
    """Have a module's own parameters on a device for the length of a `with` block; changed values are kept.

    Offloaded parameters are there on the device of the module's forward, and changes to them are lost.

    Args:
        module: The module.
        execution_device: The device; by default they stay where they are.
    """
    if has_offloaded_params(module):
        hook = vars(module)["_hf_hook"]
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.post_forward(module, None)
        return
    parameters = dict(module.named_parameters(recurse=False)) if execution_device is not None else {}
    devices = {name: parameter.device for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(execution_device)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = parameter.data.to(devices[name])


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook keeps the module's parameters elsewhere between its forwards."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) is True for part in (hook, *getattr(hook, "hooks", ())))


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same one: "cuda" is the current one of its type.

    Example:
        >>> check_device_same(torch.device("cpu"), torch.device("cpu", 0))
        True
    """
    if first_device.type != second_device.type:
        return False
    return first_device.type in ("cpu", "meta") or with_index(first_device) == with_index(second_device)


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: "cuda" is the current one of this thread, and each thread has its own.

    Example:
        >>> with_index(torch.device("cpu"))
        device(type='cpu')
    """
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def read_device(device: Device) -> Any:
    """Return the torch device of an entry of a device map, which this machine has; "disk" stays as it is.

    Raises:
        ConfigurationError: If the machine has no such device.
    """
    if device == "disk":
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int) and accelerator is None:
        raise ConfigurationError(f"device_map names the accelerator {device}, and this machine has none. Use 'cpu'.")
    try:
        chosen = torch.device(device) if accelerator is None or not isinstance(device, int) else (
            torch.device(accelerator.type, device)
        )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device_map names the device {shown(device)}, which torch does not know. Use the index of an accelerator, "
            "'cpu' or 'disk'."
        ) from error
    count = torch.accelerator.device_count()
    is_there = accelerator is not None and chosen.type == accelerator.type and (chosen.index or 0) < count
    if chosen.type not in ("cpu", "meta") and not is_there:
        raise ConfigurationError(
            f"device_map names the device {shown(device)}, and this machine has {count} accelerators"
            f"{f' of the type {accelerator.type}' if accelerator else ''}. Use 'cpu', or another index."
        )
    return chosen


def read_device_map(device_map: Mapping[str, Device]) -> dict[str, Any]:
    """Return a device map with torch devices that this machine has; "disk" stays as it is.

    Raises:
        ConfigurationError: If it is not a map from names to devices, or the machine has no such device.
    """
    if not isinstance(device_map, Mapping) or not all(isinstance(name, str) for name in device_map):
        raise ConfigurationError(
            f"device_map must be a dict from names of modules to devices (got {shown(device_map)}). Give one such as "
            "{'': 'cpu'}, or that of infer_auto_device_map."
        )
    return {name: read_device(device) for name, device in device_map.items()}


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Raise unless a device map has a place for every parameter and buffer of a model; warn of names that it lacks.

    Raises:
        ConfigurationError: With the names that have none.
    """
    names = model.state_dict(keep_vars=True)
    known = _names(model)
    unknown = [name for name in device_map if name not in known]
    if unknown:
        _logger.warning_once(
            "device_map names what the %s does not have, and is ignored there: %s.%s",
            type(model).__name__,
            ", ".join(unknown[:8]),
            did_you_mean(unknown[0], sorted(known)),
        )
    left_out = [name for name in names if device_of(name, device_map) is None]
    if left_out:
        raise ConfigurationError(
            f"device_map names no device for {', '.join(left_out[:8])}{', …' if len(left_out) > 8 else ''}. Add them, "
            'or "" for all that remain.'
        )


def split_device_map(model: nn.Module, device_map: Mapping[str, _Device]) -> dict[str, _Device]:
    """Return a device map in which no entry is inside of another: the outer ones become entries of what is left.

    Example:
        >>> split_device_map(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), {"0": "disk", "": "cpu"})
        {'0': 'disk', '1': 'cpu', '2': 'cpu'}
    """
    split: dict[str, _Device] = {}

    def add(name: str, device: _Device) -> None:
        if not any(other != name and _is_inside(other, name) for other in device_map):
            split[name] = device
            return
        owner = model.get_submodule(name)
        for part in (*module_slots(owner), *parameter_slots(owner), *buffer_slots(owner)):
            inside = f"{name}.{part}" if name else part
            if inside not in device_map:
                add(inside, device)

    known = _names(model)
    for name, device in device_map.items():
        if name in known:
            add(name, device)
    return split


def clean_device_map(device_map: dict[str, _Device], module_name: str = "") -> dict[str, _Device]:
    """Replace the entries of modules that are on one device together by one entry, in place, and return the map.

    Example:
        >>> clean_device_map({"encoder.0": 0, "encoder.1": 0, "head": 1})
        {'head': 1, 'encoder': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    children = dict.fromkeys(prefix + name.removeprefix(prefix).partition(".")[0] for name in inside)
    for child in children:
        if child not in device_map:
            clean_device_map(device_map, child)
    return device_map


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> list[list[str]]:
    """Return the groups of tied names that a device map puts on several devices."""
    return [list(names) for names in tied_params if len({device_of(name, device_map) for name in names}) > 1]


def _owner(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    known = [*parameter_slots(owner), *buffer_slots(owner)]
    if name not in known:
        raise ConfigurationError(
            f"{type(owner).__name__} has no parameter or buffer {name!r}. Known: {', '.join(known) or 'none'}."
            f"{did_you_mean(name, known)}"
        )
    return owner, name


def _check_shape(name: str, current: Tensor | None, value: Tensor) -> None:
    if current is not None and current.shape != value.shape:
        raise ConfigurationError(
            f"{name} has the shape {tuple(current.shape)}, and value has {tuple(value.shape)}. Give one of its shape."
        )


def _moved(
    owner: nn.Module,
    current: Any,
    device: torch.device,
    value: Tensor | None,
    dtype: torch.dtype | None,
    scales: Tensor | None,
) -> nn.Parameter:
    """Return the weight of a layer of bitsandbytes on a device, with a new value if there is one."""
    if device.type == "meta":
        return on_meta(current)
    if value is None:
        return current.to(device)
    whole = value.to(dtype or value.dtype) if value.is_floating_point() else value
    return quantize(owner, current, whole, device, None if scales is None else {"SCB": scales})


def _assign(owner: nn.Module, name: str, value: Tensor) -> None:
    parameters = parameter_slots(owner)
    if name not in parameters:
        buffer_slots(owner)[name] = value
        return
    current = parameters[name]
    requires_grad = value.is_floating_point() if current is None else current.requires_grad
    parameters[name] = nn.Parameter(value, requires_grad=requires_grad)


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is not None and not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"{shown(value)} is not a torch dtype. Give one such as torch.float16 or 'bfloat16'.")
    return dtype


def _names(model: nn.Module) -> set[str]:
    """Return the names that a device map may have: those of modules, parameters and buffers."""
    kinds = (model.named_modules, model.named_parameters, model.named_buffers)
    return {name for named in kinds for name, _ in named(remove_duplicate=False)}


def _is_inside(name: str, place: str) -> bool:
    return place in ("", name) or name.startswith(f"{place}.")


def device_of(name: str, device_map: Mapping[str, _Device]) -> _Device | None:
    """Return the device of a tensor or module in a device map: that of the longest name that it is inside of.

    Example:
        >>> device_of("encoder.layer.weight", {"": "cpu", "encoder": 0})
        0
    """
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)
