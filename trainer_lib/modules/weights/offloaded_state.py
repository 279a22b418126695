"""The state dict of a model whose weights are offloaded."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.modules.device_placement import align_module_device, has_offloaded_params


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model in memory, with offloaded weights read from where they are kept.

    Example:
        >>> from trainer_lib import cpu_offload
        >>> layer = cpu_offload(nn.Linear(2, 1))
        >>> layer.state_dict()["weight"].device, get_state_dict_offloaded_model(layer)["weight"].device
        (device(type='meta'), device(type='cpu'))
    """
    state: dict[str, Any] = {}
    for inside in _offloaded(model):
        state |= inside
    return {key: state.get(key, value) for key, value in model.state_dict().items()}


def differing_offloaded_weights(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the names of offloaded weights that have another value in a state; one module is in memory at a time."""
    return [
        name
        for inside in _offloaded(model)
        for name, value in inside.items()
        if isinstance(other := state.get(name), Tensor) and not torch.equal(value, other.to(value))
    ]


def offloaded_names(model: nn.Module) -> set[str]:
    """Return the names of weights that are kept elsewhere between forwards."""
    return {
        key
        for name, module in model.named_modules(remove_duplicate=False)
        if has_offloaded_params(module)
        for key, value in module.state_dict(prefix=f"{name}." if name else "", keep_vars=True).items()
        if value.device.type == "meta"
    }


def _offloaded(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the offloaded weights of one module after the other."""
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            with align_module_device(module):
                inside = module.state_dict(prefix=f"{name}." if name else "")
                yield {key: value for key, value in inside.items() if value.device.type != "meta"}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device | None = "cpu",
) -> dict[str, Any]:
    """Replace the entries of one module in a state dict, in place, by its values, and return the dict.

    Args:
        module: The module; the values of an offloaded one are read from where they are kept.
        module_name: The name of one of its tensors in the model, such as "encoder.weight".
        state_dict: The state dict of the model.
        device_to_put_offload: The device of offloaded values.
    """
    is_offloaded = has_offloaded_params(module)
    prefix = f"{module_name.rpartition('.')[0]}."
    with align_module_device(module):
        for name, value in module.state_dict(prefix=prefix if prefix != "." else "").items():
            if name in state_dict:
                state_dict[name] = value.to(device_to_put_offload) if is_offloaded else value
    return state_dict
