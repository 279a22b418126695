"""`update_shards`: torch's optimizers update this rank's parts of weights as plain tensors, many at once."""

import inspect
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.local_shards import laid_out, local_shard, with_part

# They compute each element by itself. Adafactor and Muon need whole matrices.
_ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


def updates_shards(kind: type[Optimizer]) -> bool:
    """Whether an optimizer of this class can update a part of a weight without the others.

    Example:
        >>> updates_shards(torch.optim.AdamW), updates_shards(torch.optim.Adafactor)
        (True, False)
    """
    base = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    return base is not None and all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name)) for name in ("step", "_init_group")
    )


def update_shards(optimizer: Optimizer) -> bool:
    """Have an optimizer update what this rank holds of each weight, and return whether it does so.

    The numbers are those of an update of DTensors. These go through torch's rules of layouts, which takes longer than
    the update: for each operation in each step, and the first time for each operation and list of shapes. And only
    plain tensors are updated many at once where neither `foreach` nor `fused` is given. State and parameter groups hold
    DTensors, as before.
    """
    if not updates_shards(type(optimizer)):
        return False
    if "_init_group" not in vars(optimizer):
        shards = _Shards(optimizer)
        vars(optimizer)["_init_group"] = shards.collect
        optimizer.register_step_post_hook(partial(_name_by_weights, shards.weights))
    return True


class _Shards:
    """What an optimizer calls for the weights, gradients and states of a group: gives it this rank's parts of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self.weights: list[tuple[Tensor, Any]] = []  # and their parts before them, of groups with SGD's momentum

    def collect(self, group: dict[str, Any], weights: list[Any], gradients: list[Any], *states: list[Any]) -> Any:
        """Do what the optimizer's own `_init_group` does, and replace the DTensors in the lists."""
        optimizer: Any = self._optimizer()
        facts = type(optimizer)._init_group(optimizer, group, weights, gradients, *states)
        if group.get("differentiable"):
            return facts
        has_momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"]
        for index, weight in enumerate(weights):
            if not hasattr(weight, "_local_tensor"):
                continue
            gradients[index] = local_shard(laid_out(gradients[index], weight))
            weights[index] = part = local_shard(weight)
            if has_momentum:
                self.weights.append((part, weight))
        for values in states:
            values[:] = map(_local, values)
        return facts


def _local(value: Tensor | None) -> Tensor | None:
    return None if value is None else local_shard(value)


def _name_by_weights(weights: list[tuple[Tensor, Any]], optimizer: Any, *arguments: Any) -> None:
    """Move the momentum that SGD has stored under the parts of weights to the weights, as DTensors."""
    del arguments
    for part, weight in weights:
        written, state = optimizer.state.pop(part, {}), optimizer.state[weight]
        momentum = written.get("momentum_buffer")  # not after an update that raised
        if momentum is not None and _local(state.get("momentum_buffer")) is not momentum:
            state["momentum_buffer"] = with_part(weight, momentum)
    weights.clear()
