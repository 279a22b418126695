"""Gradient norms by layer or parameter group, in the log."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError
from trainer_lib.foundation.tensors.tensor_operations import foreach_norm

_PREFIX = "grad_norm/"


class GradientNorms(Callback):
    """Adds `grad_norm/<group>` to the log: the norm of each group's gradients before clipping.

    The value is the root mean square of the norm over the updates since the last log. With a sharded model each rank
    measures its shards, and the log combines them. Nothing is read from the device before the log.

    Args:
        by: How to group the weights: "layer" (by module), "parameter" (each alone), a number (by that many leading
            parts of the name), or a mapping from group names to name patterns, where the first match counts.

    Example:
        >>> monitor = GradientNorms({"norms": "*norm*", "all others": "*"})
        >>> from trainer_lib.callbacks import every
        >>> now_and_then = every("50 steps", GradientNorms(by=2))
    """

    order = -100  # before the callbacks that show the log

    def __init__(self, by: str | int | Mapping[str, str] = "layer") -> None:
        self._group_of = _grouping(by)
        self._summed = f"grad_norm_squares {by!r}/"  # a unique prefix, renamed in the log
        self._groups: dict[str, str | None] = {}  # by parameter name

    def on_backward_end(self, run: Run) -> None:
        grouped: dict[str, list[Any]] = {}
        for name, parameter in run.parameters.items():
            if parameter.grad is not None:
                if name not in self._groups:
                    self._groups[name] = self._group_of(name)
                group = self._groups[name]
                if group is not None:
                    grouped.setdefault(group, []).append(parameter.grad)
        for group, gradients in grouped.items():
            run.log(self._summed + group, squared_norm(gradients))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        del run
        for name in [name for name in values if name.startswith(self._summed)]:
            values[_PREFIX + name.removeprefix(self._summed)] = values.pop(name) ** 0.5


@torch.no_grad()
def squared_norm(gradients: list[Any]) -> Tensor:
    """Return the squared norm; for shards, a value whose mean over all ranks is the squared norm."""
    norms = foreach_norm([_local(gradient) for gradient in gradients], dtype=torch.float32)
    device = norms[0].device
    squares = [norm.to(device).square() * _shards(gradient) for norm, gradient in zip(norms, gradients, strict=True)]
    return torch.stack(squares).sum()


def _local(gradient: Any) -> Tensor:
    gradient = getattr(gradient, "_local_tensor", gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _shards(gradient: Any) -> int:
    """Return the number of shards of a gradient."""
    shards = 1
    for dimension, placement in enumerate(getattr(gradient, "placements", ())):
        if placement.is_shard():
            shards *= gradient.device_mesh.size(dimension)
    return shards


def _grouping(by: Any) -> Callable[[str], str | None]:
    """Return the function from a weight's name to its group; `None`: the weight is in no group."""
    if by == "parameter":
        return lambda name: name
    if by == "layer":
        return lambda name: name.rpartition(".")[0] or name
    if isinstance(by, int) and not isinstance(by, bool) and by > 0:
        return lambda name: ".".join(name.split(".")[:by])
    if isinstance(by, Mapping) and by and all(isinstance(text, str) for pair in by.items() for text in pair):
        patterns: dict[str, str] = dict(by)
        return lambda name: next((group for group, like in patterns.items() if fnmatchcase(name, like)), None)
    raise ConfigurationError(
        'GradientNorms(by) must be "layer", "parameter", a number of name parts of at least 1, or a mapping from '
        "group "
        f'names to patterns, such as {{"encoder": "encoder.*"}} (got {by!r}).'
    )
