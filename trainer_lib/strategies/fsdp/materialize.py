"""This file is how values come into a sharded model: from the main process, one tensor at a time.

A model is emptied before it is sharded and filled afterwards, so no process ever holds more of it on its device than
its shards and the one tensor that is on the way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import PreparationError
from trainer_lib.modules.ties import find_tied_parameters, retie_parameters
from trainer_lib.process_group import ProcessGroup


def materialize(model: nn.Module, initialize: Callable[[nn.Module], Any] | None) -> None:
    """Give values to the modules of a whole model whose weights are on the meta device.

    Raises:
        PreparationError: If a module does not say how.
    """
    initialize = initialize or getattr(model, "_init_weights", None)  # transformers' models know for all inside
    tied = find_tied_parameters(model)
    for name, module in model.named_modules():
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            reset: Any = initialize or getattr(module, "reset_parameters", None)
            if reset is None:
                raise PreparationError(
                    f"{name or 'The model itself'} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(). Give FullyShardedDataParallelPlugin(param_init_fn=…), a function that gives "
                    "values to a module, or build the model on the CPU in the main process."
                )
            module.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                reset(module) if initialize else reset()
    retie_parameters(model, tied)


def empty(model: nn.Module, kept: set[nn.Parameter]) -> dict[str, Tensor]:
    """Take the values of all parameters but the `kept` ones out of a model.

    Returns:
        Its parameters and buffers as they were, by name; those under several names by the first of them.
    """
    taken = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes: dict[Tensor, Tensor] = {}
    for parameter in model.parameters():
        if parameter not in kept:
            # Contiguous, whatever the strides of the whole: shards have to be.
            shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            shapes[parameter] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    replace(model, shapes)
    return taken


def allocate(model: nn.Module, device: torch.device, shards_on: torch.device) -> None:
    """Give memory to all that is still on the meta device."""
    storage: dict[Tensor, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = shards_on if hasattr(tensor, "_local_tensor") else device
        if tensor.is_meta:
            storage[tensor] = torch.empty_like(tensor, device=place)
            if isinstance(tensor, nn.Parameter):
                storage[tensor] = nn.Parameter(storage[tensor], requires_grad=tensor.requires_grad)
        elif tensor.device != place:
            tensor.data = tensor.data.to(place)
    replace(model, storage)


def replace(model: nn.Module, new: Mapping[Tensor, Tensor]) -> None:
    """Put new tensors in the places of old ones, under each of their names."""
    for places, name, tensor in list(_places(model)):
        if tensor in new:
            places[name] = new[tensor]


@torch.no_grad()
def fill(
    targets: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Give tensors their values, by name: those of the main process, or without a `group` each process its own."""
    for name, target in targets.items():
        if group is None or group.rank == 0:
            whole = values[name].detach().to(device, target.dtype)
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if group is not None:
            group.broadcast(whole)
        write(target, whole)


def write(target: Any, whole: Tensor) -> None:
    """Overwrite a tensor, or this process's shard of one, with a whole one."""
    if not hasattr(target, "_local_tensor"):
        target.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank: all have the whole by now, so each cuts its shard out of its own.
    shard: Any = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target._local_tensor.copy_(shard._local_tensor)


def _places(model: nn.Module) -> Iterable[tuple[dict[str, Any], str, Tensor]]:
    def all_places() -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        for module in model.modules():
            for places in (module._parameters, module._buffers):
                for name, tensor in places.items():
                    if tensor is not None:
                        yield places, name, tensor

    return all_places()
