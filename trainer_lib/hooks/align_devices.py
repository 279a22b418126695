"""A hook that has a module's weights and inputs on one device for its forward, and keeps the weights elsewhere."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import UnsupportedError
from trainer_lib.foundation.tensors.pytree import find_device, send_to_device
from trainer_lib.hooks.model_hook import ModelHook
from trainer_lib.hooks.offloaded_tensor import offloaded_tensor
from trainer_lib.hooks.weight_prefetch import WeightPrefetcher
from trainer_lib.modules.device_placement import Device, move_tensors, set_module_tensor_to_device
from trainer_lib.modules.quantized_layers import is_quantized, on_meta, quantize, release_statistics, weight_of
from trainer_lib.modules.weights.tensor_sizes import named_module_tensors
from trainer_lib.modules.weights.tensor_slots import buffer_slots, parameter_slots
from trainer_lib.modules.weights.tied_parameters import TiedTensors


class AlignDevicesHook(ModelHook):
    """Puts a module's inputs, and the weights that are offloaded, on the device of its forward.

    Args:
        execution_device: The device of the forward; by default inputs and weights stay where they are.
        offload: Whether weights are kept elsewhere between forwards.
        io_same_device: Whether the output goes to the device that the inputs came from.
        weights_map: The offloaded weights by name; by default copies on the CPU.
        offload_buffers: Whether buffers are offloaded too.
        place_submodules: Whether the weights of modules inside this one count as its own.
        skip_keys: Names of arguments that stay where they are.
        tied_params_map: Copies of tied tensors by address and device, which share one copy on a device.

    Example:
        >>> from trainer_lib.hooks import add_hook_to_module
        >>> layer = add_hook_to_module(nn.Linear(2, 1), AlignDevicesHook("cpu", offload=True))
        >>> layer.weight.device, layer(torch.ones(1, 2)).device
        (device(type='meta'), device(type='cpu'))
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
        *,
        prefetcher: WeightPrefetcher | None = None,
        name: str = "",
        ties: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map: Mapping[str, Tensor] | None = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self._device = None if execution_device is None else torch.device(execution_device)
        self._prefetcher, self._name, self._ties = prefetcher, name, ties
        self._offloaded: list[str] = []
        self._kept: dict[str, Tensor] = {}  # what is in the module between forwards, on the meta device
        self._devices: dict[str, torch.device] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights: to the execution device, or out of the module."""
        if self.offload:
            self._offload(module)
        elif self._device is not None:
            tensors = named_module_tensors(module, recurse=self.place_submodules, remove_duplicate=False)
            # What another hook has offloaded comes to its device for the forward.
            names = [name for name, tensor in tensors if tensor.device.type != "meta"]
            move_tensors(module, names, self._device, self.tied_params_map)
        return module

    def _offload(self, module: nn.Module) -> None:
        """Move the weights out of the module, and register them with the prefetcher."""
        self._ties = self._ties or TiedTensors(module, self._name)
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules, remove_duplicate=False))
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        # What a state dict does not have is nowhere else to fetch it from.
        offloaded = dict(
            named_module_tensors(
                module,
                self.offload_buffers,
                self.place_submodules,
                remove_non_persistent=True,
                remove_duplicate=False,
            )
        )
        if self.weights_map is None:
            self.weights_map = _host_copies(module, offloaded)
        self._offloaded = list(offloaded)
        quantized = {name for name, tensor in offloaded.items() if is_quantized(tensor)}
        for name, tensor in offloaded.items():
            self._kept[name] = (
                on_meta(tensor) if name in quantized else offloaded_tensor(tensor, partial(self._read, name))
            )
            _put(module, name, self._kept[name])
            if name in quantized:
                release_statistics(_owner(module, name))
        if self._device is not None:
            move_tensors(module, [name for name in tensors if name not in offloaded], self._device)
        if self._prefetcher is None:
            self._prefetcher = WeightPrefetcher(self._device or torch.device("cpu"))
        statistics = [name for name in self.weights_map if weight_of(name) in quantized] if quantized else []
        self._prefetcher.add(self._name, self.weights_map, [*self._offloaded, *statistics])

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Put weights and inputs on the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload and self._prefetcher is not None:
            weights, trains = self._prefetcher.take(self._name), torch.is_grad_enabled()
            for name in self._offloaded:
                _put(module, name, self._fetched(module, name, weights, trains))
        if self._device is None:
            return args, kwargs
        return send_to_device(args, self._device), send_to_device(kwargs, self._device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights out of the module again."""
        for name in self._offloaded:
            _put(module, name, self._kept[name])
            # A backward still needs the scales.
            if is_quantized(self._kept[name]) and not torch.is_grad_enabled():
                release_statistics(_owner(module, name))
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the weights back into the module, where they were before; those that were tied are one again."""
        for name in self._offloaded:
            device = torch.device("cpu") if self._devices[name].type == "meta" else self._devices[name]
            weights = self.weights_map or {}
            if is_quantized(self._kept[name]):
                found = {part: weights[part] for part in weights if part == name or weight_of(part) == name}
                _put(module, name, self._fetched(module, name, found, False).to(device))
            else:
                self._restore(module, name, device, weights[name])
        return module

    def _restore(self, module: nn.Module, name: str, device: torch.device, value: Tensor) -> None:
        set_module_tensor_to_device(module, name, device, value=value, dtype=value.dtype)
        tied = None if self._ties is None else self._ties.find(f"{self._name}.{name}" if self._name else name)
        if tied is not None:
            _put(module, name, tied)

    def _read(self, name: str) -> Tensor:
        """Return the values of a weight outside of the module's forward."""
        value = (self.weights_map or {})[name].to(self._device or "cpu")
        return _like(self._kept[name], value, torch.is_grad_enabled())

    def _fetched(self, module: nn.Module, name: str, weights: Mapping[str, Tensor], trains: bool) -> Tensor:
        """Return fetched values as the parameter or buffer of this name."""
        kept = self._kept[name]
        if not is_quantized(kept):
            return _like(kept, weights[name], trains)
        statistics = {part: tensor for part, tensor in weights.items() if weight_of(part) == name}
        return quantize(_owner(module, name), kept, weights[name], weights[name].device, statistics)


def _like(kept: Tensor, value: Tensor, trains: bool) -> Tensor:
    """Return a fetched value as the parameter or buffer that it stands for."""
    if not isinstance(kept, nn.Parameter):
        return value
    # Also without gradients: which kernel a product takes can depend on it.
    parameter = nn.Parameter(value, requires_grad=kept.requires_grad)
    if parameter.requires_grad and trains:
        parameter.register_hook(_refuse_gradient)
    return parameter


def _refuse_gradient(gradient: Tensor) -> Tensor:
    del gradient
    raise UnsupportedError(
        "A gradient has reached an offloaded weight, which is only a copy for one forward and would not be trained. "
        "Freeze offloaded weights (requires_grad_(False)), or keep the trained modules on a device in device_map."
    )


def _owner(module: nn.Module, name: str) -> nn.Module:
    path = name.rpartition(".")[0]
    return module.get_submodule(path) if path else module


def _host_copies(module: nn.Module, offloaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return these tensors on the host, with the statistics of quantized ones."""
    state = {**offloaded, **(module.state_dict() if any(map(is_quantized, offloaded.values())) else {})}
    return {
        name: tensor.detach().to("cpu")
        for name, tensor in state.items()
        if name in offloaded or weight_of(name) in offloaded
    }


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, last = _owner(module, name), name.rpartition(".")[2]
    slots = parameter_slots(owner) if last in parameter_slots(owner) else buffer_slots(owner)
    slots[last] = tensor  # type: ignore[assignment]
