"""`update_shards`: torch's optimizers update parts of weights as plain tensors; Adafactor gathers whole ones."""

import inspect
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.tensors.local_shards import laid_out, local_shard, with_part

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
    return _steps_like(kind, _ELEMENTWISE)


def _steps_like(kind: type[Optimizer], bases: tuple[type[Optimizer], ...]) -> bool:
    """Whether a class is one of `bases`, or inherits its step."""
    base = next((base for base in kind.__mro__ if base in bases), None)
    return base is not None and all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name)) for name in ("step", "_init_group")
    )


def update_shards(optimizer: Optimizer) -> bool:
    """Have an optimizer update what this rank holds of each weight, and return whether it does so.

    The numbers are those of an update of DTensors. These go through torch's rules of layouts, which takes longer than
    the update: for each operation in each step, and the first time for each operation and list of shapes. And only
    plain tensors are updated many at once where neither `foreach` nor `fused` is given. State and parameter groups hold
    DTensors, as before. Adafactor needs whole weights and gradients, which are gathered one after the other.
    """
    if _steps_like(type(optimizer), (torch.optim.Adafactor,)):
        vars(optimizer).setdefault("_init_group", partial(_update_whole, ref(optimizer)))
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


def _update_whole(
    reference: Any, group: dict[str, Any], weights: list[Any], gradients: list[Any], *states: list[Any]
) -> Any:
    """Gather and update the sharded weights of a group of Adafactor one after the other, and leave it the plain ones.

    It scales an update by norms of the weight and of the update, of which DTensors would give each rank its own part.
    """
    from torch.optim._adafactor import adafactor  # pyright: ignore[reportPrivateUsage]

    optimizer = reference()
    facts = type(optimizer)._init_group(optimizer, group, weights, gradients, *states)
    rows = [list(row) for row in zip(weights, gradients, *states, strict=True)]
    options = {name: group[name] for name in ("d", "lr", "beta2_decay", "weight_decay", "maximize")}
    eps1, eps2 = group["eps"]
    for row in rows:
        if hasattr(row[0], "_local_tensor"):
            whole = [value.full_tensor() if hasattr(value, "_local_tensor") else value for value in row]
            adafactor(*([value] for value in whole), eps1=eps1, eps2=eps2, foreach=False, **options)
            del row[1], whole[1]
            for value, result in zip(row, whole, strict=True):
                if hasattr(value, "_local_tensor"):
                    _keep_part(value, result)
    plain = [row for row in rows if not hasattr(row[0], "_local_tensor")]
    for index, values in enumerate((weights, gradients, *states)):
        values[:] = [row[index] for row in plain]
    return facts


def _keep_part(shards: Any, whole: Tensor) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shards.device_mesh
    shards.copy_(DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False))
