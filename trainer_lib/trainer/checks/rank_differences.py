"""Errors for models, callbacks, losses, optimizers and schedules that differ between ranks, before the first step."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.collectives.agreement import check_same_on_all_ranks
from trainer_lib.events import Callback
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import DistributedOperationException
from trainer_lib.process_group import ProcessGroup

_MISSING = "nothing"


def check_models(group: ProcessGroup, models: Mapping[str, nn.Module]) -> None:
    """Check that all ranks have the same weights and buffers, in the same order: ranks reduce them in this order.

    Raises:
        DistributedOperationException: If a rank has others; on all ranks.
    """
    tensors = list(_tensors(models))
    digests = group.all_gather_objects(blake2b(repr(tensors).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    by_rank: list[list[str]] = group.all_gather_objects(tensors)
    first = by_rank[0]
    rank, other = next((rank, tensors) for rank, tensors in enumerate(by_rank) if tensors != first)
    pairs = [(_at(first, i), _at(other, i)) for i in range(max(len(first), len(other)))]
    number, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    raise DistributedOperationException(
        f"Rank {rank} has another model than rank 0: number {number} of its weights and buffers is {theirs}, and on "
        f"rank 0 {ours}. Make the same model on all ranks, with its layers in the same order (the order of a set "
        "differs between processes)."
    )


def check_callbacks(group: ProcessGroup, callbacks: Iterable[Callback], loss_fn: Any) -> None:
    """Check that the loss function is the same on all ranks, and the callbacks that all ranks need.

    Raises:
        DistributedOperationException: If they differ; on all ranks.
    """
    inner = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    needed = [callback for callback in callbacks if callback.runs_on_all_ranks]
    facts = {
        "the loss function": getattr(inner, "__name__", type(inner).__name__),
        "the callbacks that all ranks need": [f"{type(each).__name__}{_arguments(each)}" for each in needed],
    }
    check_same_on_all_ranks(group, facts)


def check_optimizers(group: ProcessGroup, optimizers: Mapping[str, Optimizer], schedules: Mapping[str, Any]) -> None:
    """Check that optimizers and schedules are the same on all ranks: weights would differ after the first update.

    Args:
        group: The ranks that train the same weights.
        optimizers: The optimizers by name.
        schedules: The schedules by the names of their optimizers.

    Raises:
        DistributedOperationException: If they differ; on all ranks.
    """
    facts: dict[str, Any] = {"the optimizers": [f"{name}: {_optimizer(each)}" for name, each in optimizers.items()]}
    facts["the schedules"] = [f"{name}: {_schedule(each)}" for name, each in schedules.items()]
    check_same_on_all_ranks(group, facts)


def _tensors(models: Mapping[str, nn.Module]) -> Iterator[str]:
    for prefix, model in models.items():
        start = f"{prefix}." if prefix else ""
        for name, parameter in model.named_parameters():
            yield f"{start}{name} ({_kind(parameter)}{'' if parameter.requires_grad else ', frozen'})"
        for name, buffer in model.named_buffers():
            yield f"{start}{name} ({_kind(buffer)}, a buffer)"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _at(tensors: list[str], index: int) -> str:
    return tensors[index] if index < len(tensors) else _MISSING


def _arguments(callback: Callback) -> str:
    """Return what a callback of this library was given; others may hold values of their rank."""
    if not type(callback).__module__.startswith("trainer_lib."):
        return ""
    public = {name: value for name, value in vars(callback).items() if not name.startswith("_")}
    return f"({_listed(public)})"


def _optimizer(optimizer: Optimizer) -> str:
    groups = [
        f"{len(group['params'])} parameters with {_listed({k: v for k, v in group.items() if k != 'params'})}"
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} of {', and '.join(groups)}"


def _schedule(schedule: Any) -> str:
    state: Any = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
    return f"{type(schedule).__name__} with {_listed(state if isinstance(state, dict) else {})}"


def _listed(values: Mapping[str, Any]) -> str:
    known = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in values.items()
    }
    return ", ".join(f"{name}={value!r}" for name, value in known.items() if _is_simple(value))


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) < 100 and all(isinstance(each, (int, float, str)) for each in value)
    return value is None or isinstance(value, (int, float, str, Every))
