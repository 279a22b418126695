"""Fill a sharded model with rank 0's weights, one tensor at a time.

A model is emptied before it is sharded and filled afterwards, so a rank's device holds at most its shards and the one
tensor that is being broadcast.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.foundation.tensors.local_shards import with_part
from trainer_lib.modules.weights.tensor_slots import buffer_slots, parameter_slots
from trainer_lib.modules.weights.tied_parameters import find_tied_parameters, retie_parameters
from trainer_lib.process_group import ProcessGroup


def materialize(model: nn.Module, initialize: Callable[[nn.Module], Any] | None) -> None:
    """Initialize the modules of a whole model whose weights are on the meta device; those that have values keep them.

    Raises:
        PreparationError: If a module has no way to initialize itself.
    """
    initialize = initialize or getattr(model, "_init_weights", None)  # transformers' models initialize all modules
    tied = find_tied_parameters(model)
    for name, module in model.named_modules():
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            reset: Any = initialize or getattr(module, "reset_parameters", None)
            if reset is None:
                raise PreparationError(
                    f"{name or 'The model itself'} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(). Give FullyShardedDataParallelPlugin(param_init_fn=…), a function that "
                    "initializes a module, or build the model on the CPU of rank 0."
                )
            named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            loaded = {key: tensor.detach() for key, tensor in named if not tensor.is_meta}
            module.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                reset(module) if initialize else reset()
                for key, value in loaded.items():
                    getattr(module, key).copy_(value)
    retie_parameters(model, tied)


def empty(model: nn.Module, kept: set[nn.Parameter]) -> dict[str, Tensor]:
    """Replace all parameters of a model but the `kept` ones by parameters on the meta device.

    Returns:
        The original parameters and buffers by name; a tensor under several names has the first of them.
    """
    originals = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes: dict[Tensor, Tensor] = {}
    for parameter in model.parameters():
        if parameter not in kept:
            # Contiguous, whatever the strides of the whole tensor: shards must be contiguous.
            shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            shapes[parameter] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    replace(model, shapes)
    return originals


def allocate(model: nn.Module, device: torch.device, shards_on: torch.device) -> None:
    """Allocate memory for all tensors that are still on the meta device."""
    storage: dict[Tensor, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = shards_on if hasattr(tensor, "_local_tensor") else device
        if tensor.is_meta:
            part = torch.empty_like(getattr(tensor, "_local_tensor", tensor), device=place)
            storage[tensor] = with_part(tensor, part)
            if isinstance(tensor, nn.Parameter):
                storage[tensor] = nn.Parameter(storage[tensor], requires_grad=tensor.requires_grad)
        elif tensor.device != place:
            tensor.data = tensor.data.to(place)
    replace(model, storage)


def replace(model: nn.Module, new: Mapping[Tensor, Tensor]) -> None:
    """Replace old tensors by new ones, under each of their names."""
    for owner, name, tensor in list(_named_slots(model)):
        if tensor in new:
            owner[name] = new[tensor]


@torch.no_grad()
def fill(
    targets: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Copy values into tensors, by name: rank 0's values, or without a `group` each rank's own values."""
    for name, target in targets.items():
        if group is None or group.rank == 0:
            whole = values[name].detach().to(device, target.dtype)
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if group is not None:
            group.broadcast(whole)
        write(target, whole)


def fill_held(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], group: ProcessGroup | None, device: torch.device
) -> None:
    """Copy values like `fill`, where each rank has `targets` for some of the names only. All ranks name all values."""
    for name, value in values.items():
        if name in targets:
            fill({name: targets[name]}, values, group, device)
        elif group is not None:
            fill({name: torch.empty(value.shape, dtype=value.dtype, device=device)}, values, group, device)


def write(target: Any, whole: Tensor) -> None:
    """Overwrite a tensor, or this rank's shard of it, with a whole tensor."""
    if not hasattr(target, "_local_tensor"):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: each rank has the whole tensor by now, and cuts its shard out of it.
    shard: Any = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target._local_tensor.copy_(shard._local_tensor)


def _named_slots(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        for owner in (parameter_slots(module), buffer_slots(module)):
            for name, tensor in owner.items():
                if tensor is not None:
                    yield owner, name, tensor
