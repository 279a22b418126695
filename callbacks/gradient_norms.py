"""This file is the norms of gradients among what is logged, layer by layer or group by group."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from trainer_lib.events import Callback, Run
from trainer_lib.foundation.errors import ConfigurationError

_PREFIX = "grad_norm/"


class GradientNorms(Callback):
    """Adds `grad_norm/<group>` to what is logged: the norm of a group's gradients, before they are clipped.

    It is the root of the mean of squares over the updates since the last log. With shards each process measures its
    own, and the log puts them together. Nothing is read from an accelerator before the log.

    Args:
        by: What a group is: "layer", the module that holds the weights; "parameter", each for itself; a number, the
            first so many parts of a weight's name; or patterns of names by the name of the group, of which the first
            that fits counts.

    Example:
        >>> monitor = GradientNorms({"norms": "*norm*", "all others": "*"})
        >>> from trainer_lib.callbacks import every
        >>> now_and_then = every("50 steps", GradientNorms(by=2))
    """

    order = -100  # before those who show what is logged

    def __init__(self, by: str | int | Mapping[str, str] = "layer") -> None:
        self._group_of = _grouping(by)
        self._summed = f"grad_norm_squares {by!r}/"  # until the log, by a name that no other has
        self._groups: dict[str, str | None] = {}  # of the names met so far

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
    """Return the square of the norm; of shards what has the right mean over all processes."""
    norms = torch._foreach_norm([_local(gradient) for gradient in gradients], dtype=torch.float32)
    device = norms[0].device
    squares = [norm.to(device).square() * _shards(one) for norm, one in zip(norms, gradients, strict=True)]
    return torch.stack(squares).sum()


def _local(gradient: Any) -> Tensor:
    gradient = getattr(gradient, "_local_tensor", gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _shards(gradient: Any) -> int:
    """Return into how many parts a gradient is cut, each of which is on as many processes."""
    shards = 1
    for dimension, placement in enumerate(getattr(gradient, "placements", ())):
        if placement.is_shard():
            shards *= gradient.device_mesh.size(dimension)
    return shards


def _grouping(by: Any) -> Callable[[str], str | None]:
    """Return the function that tells a weight's group by its name; `None`: it is in none."""
    if by == "parameter":
        return lambda name: name
    if by == "layer":
        return lambda name: name.rpartition(".")[0] or name
    if isinstance(by, int) and not isinstance(by, bool) and by > 0:
        return lambda name: ".".join(name.split(".")[:by])
    if isinstance(by, Mapping) and by and all(isinstance(one, str) for pair in by.items() for one in pair):
        patterns: dict[str, str] = dict(by)
        return lambda name: next((group for group, like in patterns.items() if fnmatchcase(name, like)), None)
    raise ConfigurationError(
        f'GradientNorms(by={by!r}): give "layer", "parameter", a number of parts of a name from 1 on, or patterns by '
        'the name of a group, such as {"encoder": "encoder.*"}.'
    )
