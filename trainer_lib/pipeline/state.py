"""Whole model and optimizer states, gathered from the stages by parameter name."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer_lib.foundation.errors import ConfigurationError


def merge_over_stages(part: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the entries of all ranks of a pipeline. All of them have to call."""
    if group is None:
        return dict(part)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, dict(part), group=group)
    return {name: value for part in parts for name, value in part.items()}


def named_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return each parameter's state and the settings of its group, by name."""
    return {
        names[id(weight)]: {
            "state": _on_cpu(optimizer.state.get(weight, {})),
            "group": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
        for weight in group["params"]
    }


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], whole: Mapping[str, Any]
) -> None:
    """Load the entries of an optimizer's own parameters.

    Raises:
        ConfigurationError: If the state lacks a parameter.
    """
    state = optimizer.state_dict()
    position = 0
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for weight in group["params"]:
            name = names[id(weight)]
            if name not in whole:
                raise ConfigurationError(f"The optimizer state has no {name!r}. Load the state of the same model.")
            state["state"][position] = whole[name]["state"]
            saved.update(whole[name]["group"])
            position += 1
    optimizer.load_state_dict(state)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
    }
