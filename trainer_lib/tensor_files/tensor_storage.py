"""This file is the memory of tensors: which of them are one and the same, and which lend parts to one another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return what two tensors have in common if they share memory: device, address and size of it.

    All tensors on the meta device have the same address.
    """
    storage = tensor.untyped_storage()
    return tensor.device, 0 if tensor.device.type == "meta" else storage.data_ptr(), storage.nbytes()


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, under its first name, and for its further names that first one."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault(_view(tensor), name) if _has_memory(tensor) else name
        if first == name:
            kept[name] = tensor
        else:
            aliases[name] = first
    return kept, aliases


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict as `safetensors.torch.save_file` takes it: each tensor once, whole and in a row.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> list(clean_state_dict_for_safetensors({"embedding": weight, "head": weight, "turned": weight.T}))
        ['embedding', 'turned']
    """
    kept, _ = without_aliases(state_dict)
    cleaned: dict[str, Tensor] = {}
    taken: set[Any] = set()
    for name, tensor in kept.items():
        memory = id_tensor_storage(tensor)
        tensor = tensor.contiguous()
        # Part of a memory that another one has: a copy of its own.
        cleaned[name] = tensor.clone() if memory in taken and id_tensor_storage(tensor) == memory else tensor
        taken.add(memory)
    return cleaned


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return tensor.device.type != "meta" and tensor.numel() > 0


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
