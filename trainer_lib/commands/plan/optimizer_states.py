"""The memory of an optimizer's state, found by a step without values, or from what packages document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.commands.plan.simulated_world import no_values
from trainer_lib.commands.plan.training_job import TrainingJob
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.pytree import tensors
from trainer_lib.trainer.optim.hidden_matrices import HIDDEN, OPTIMIZERS, split_hidden_matrices
from trainer_lib.trainer.optim.optimizer_packages import PATHS
from trainer_lib.trainer.optim.optimizers import build_optimizer
from trainer_lib.trainer.optim.parameter_groups import group_parameters

# States for each weight, and the bytes of each, of optimizers that cannot step without values, or are not installed.
_OF_PACKAGES: Mapping[str, tuple[int, float]] = {
    "AdamW8bit": (2, 1.0),
    "PagedAdamW8bit": (2, 1.0),
    "AdamW4bit": (2, 0.5),
    "AdamWFp8": (2, 1.0),
    "PagedAdamW32bit": (2, 4.0),
    "AdEMAMix": (3, 4.0),
    "AdEMAMix8bit": (3, 1.0),
    "PagedAdEMAMix": (3, 4.0),
    "PagedAdEMAMix8bit": (3, 1.0),
    "Lion": (1, 4.0),
    "Lion8bit": (1, 1.0),
    "PagedLion": (1, 4.0),
    "PagedLion8bit": (1, 1.0),
    "RMSprop": (1, 4.0),
    "RMSprop32bit": (1, 4.0),
    "RMSprop8bit": (1, 1.0),
    "AdamWScheduleFree": (2, 4.0),
    "RAdamScheduleFree": (2, 4.0),
    "SGDScheduleFree": (1, 4.0),
}
_OURS = "trainer_lib."
_SMALL = 4096  # weights of fewer values have states of 32 bits
_BLOCK = 256  # values of a quantized state that share a factor of 32 bits

Shape = Callable[[Tensor], tuple[int, ...]]


def optimizer_bytes(job: TrainingJob, model: nn.Module, shape: Shape) -> int:
    """Return the bytes of the states for a model's trained weights.

    Args:
        job: The training, whose optimizer it is.
        model: The weights of a rank.
        shape: Returns the shape of the part of a weight that the optimizer updates.

    Raises:
        ConfigurationError: If the state of the optimizer is not known.
    """
    args = job.args
    groups = group_parameters(model, args.weight_decay, args.parameter_groups)
    if args.optimizer.lower() in OPTIMIZERS and job.make_optimizer is None:
        groups = split_hidden_matrices(model, groups)
    known: dict[tuple[Any, ...], int] = {}
    total = 0
    with no_values():
        for group in groups:
            for parameter in group["params"]:
                kind = (shape(parameter), parameter.dtype, group.get(HIDDEN))
                if kind not in known:
                    known[kind] = _state_bytes(job, group, *kind[:2])
                total += known[kind]
    return total


def _state_bytes(job: TrainingJob, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    path = PATHS.get(job.args.optimizer.lower(), _OURS)
    if job.make_optimizer is None and not path.startswith(_OURS):
        return _documented(path.rpartition(".")[2], shape)
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    optimizer = _made(job, [{**group, "params": [parameter]}])
    parameter.grad = torch.empty_like(parameter)
    error: Exception | None = None
    try:
        optimizer.step()
    except Exception as raised:  # noqa: BLE001 - the state is there before an operation that needs values
        error = raised
    state = optimizer.state.get(parameter, {})
    if error is not None and not state:
        raise ConfigurationError(
            f"The state of {type(optimizer).__name__} is not known: it cannot step without values ({error}). Name "
            "another one with --optimizer, whose state has the same size."
        ) from error
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(dict(state)) if tensor.dim())


def _made(job: TrainingJob, groups: Sequence[dict[str, Any]]) -> Any:
    args = job.args
    if job.make_optimizer is not None:
        return job.make_optimizer(groups)
    options: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        **args.optimizer_kwargs,
    }
    return build_optimizer(args.optimizer, groups, **options)


def _documented(name: str, shape: tuple[int, ...]) -> int:
    states, size = _OF_PACKAGES[name]
    values = torch.Size(shape).numel()
    if size < 4 and values < _SMALL:
        size = 4.0
    factors = 4 * -(-values // _BLOCK) if size < 4 else 0
    return states * (int(values * size) + factors)
