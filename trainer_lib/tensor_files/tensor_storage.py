"""The memory of tensors: which tensors are aliases of each other, and which share storage."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer_lib.foundation.tensors.tensor_operations import plain

_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_COMPRESSED = {
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS, torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS
}  # fmt: skip


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the device, address and size of a tensor's storage; equal for tensors that share memory.

    All tensors on the meta device have the same address.
    """
    storage = tensor.untyped_storage()
    return tensor.device, 0 if tensor.device.type == "meta" else storage.data_ptr(), storage.nbytes()


def stored_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor that are stored; of another tensor, the tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()  # that of the public name has to be coalesced
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values, and of the indices of a sparse one.

    Example:
        >>> bytes_of(torch.eye(3)), bytes_of(torch.eye(3).to_sparse())
        (36, 60)
    """
    values = stored_values(tensor)
    if tensor.layout is torch.sparse_coo:
        return values.nbytes + tensor._indices().nbytes
    if tensor.layout in _COMPRESSED:
        return values.nbytes + sum(getattr(tensor, name)().nbytes for name in _COMPRESSED[tensor.layout])
    return tensor.nbytes


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, under its first name, and a map from its other names to the first."""
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
    """Return a state dict that `safetensors.torch.save_file` accepts: each tensor once, contiguous, sharing no memory.

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
        tensor = plain(tensor)
        # It shares memory with an earlier tensor, so it is copied.
        cleaned[name] = tensor.clone() if memory in taken and id_tensor_storage(tensor) == memory else tensor
        taken.add(memory)
    return cleaned


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return tensor.device.type != "meta" and tensor.numel() > 0


def _view(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return *id_tensor_storage(tensor), *place, tensor.is_conj(), tensor.is_neg()
