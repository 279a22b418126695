"""This file is an optimizer's state by the names of parameters, so that it fits whatever order loads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.names import canonical_name

_OWN = "parameter of its own"  # one that no prepared model has
_ORDER = ("params", "param_names")  # what of a group belongs to the order of parameters here
_SHOWN = 4


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of parameters by their ids: with several models, each begins with the number of its model."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + canonical_name(name))
    return names


def named_state(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the optimizer's `state_dict` with names instead of numbers."""
    names = _names_in_groups(optimizer, models)
    by_number = [name for group in names for name in group]
    state = optimizer.state_dict()
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)]
    named = {by_number[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    return {**state, "state": named, "param_groups": groups}


def load_named_state(optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
    """Load what `named_state` returned.

    Raises:
        StateError: If the groups differ; the optimizer is then as it was.
    """
    names = _names_in_groups(optimizer, models)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    saved = _matched(optimizer, names, state["param_groups"])
    groups = [
        {**{key: value for key, value in group.items() if key not in _ORDER}, **_order_of(own)}
        for group, own in zip(saved, optimizer.state_dict()["param_groups"], strict=True)
    ]
    by_number = {numbers.get(key, key): value for key, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": by_number, "param_groups": groups})


def named_gradients(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients that wait for the optimizer, by names of parameters."""
    return {name: one.grad for name, one in named_parameters(optimizer, models).items() if one.grad is not None}


def load_named_gradients(optimizer: Optimizer, models: Sequence[nn.Module], gradients: Mapping[str, Tensor]) -> None:
    """Take up what `named_gradients` returned."""
    parameters = named_parameters(optimizer, models)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(parameters[name])


def named_parameters(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name."""
    names = _names_in_groups(optimizer, models)
    pairs = [
        pair
        for own, group in zip(names, optimizer.param_groups, strict=True)
        for pair in zip(own, group["params"], strict=True)
    ]
    return dict(pairs)


def _names_in_groups(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    known = parameter_names(models)
    count = 0
    names: list[list[str]] = []
    for group in optimizer.param_groups:
        own: list[str] = []
        for parameter in group["params"]:
            name = known.get(id(parameter))
            if name is None:
                name, count = f"{_OWN} {count}", count + 1
            own.append(name)
        names.append(own)
    return names


def _matched(optimizer: Optimizer, names: list[list[str]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups in the order in which they are here."""
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if len(saved) != len(names):
        raise StateError(
            f"The state is of an optimizer with {len(saved)} parameter groups, and {kind} has {len(names)}."
        )
    remaining = [dict(group) for group in saved]
    matched: list[dict[str, Any]] = []
    for number, own in enumerate(names):
        fitting = next((group for group in remaining if set(group["params"]) == set(own)), None)
        if fitting is None:
            raise StateError(_difference(kind, number, own, [name for group in remaining for name in group["params"]]))
        remaining = [group for group in remaining if group is not fitting]
        matched.append(fitting)
    return matched


def _difference(kind: str, number: int, own: list[str], saved: list[str]) -> str:
    new = [name for name in own if name not in set(saved)]
    gone = [name for name in saved if name not in set(own)]
    what = [f"{text} {', '.join(names[:_SHOWN])}" for text, names in (("new:", new), ("only saved:", gone)) if names]
    return (
        f"Parameter group {number} of {kind} holds other parameters than any group that was saved "
        f"({'; '.join(what)}). Make the optimizer as it was made for the state."
    )


def _order_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _ORDER if key in group}
