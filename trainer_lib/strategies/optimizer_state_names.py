"""An optimizer's state by parameter names, so that it loads into any order of the parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.weights.names import canonical_name

_UNNAMED = "parameter of its own"  # the name of a parameter that is in no prepared model
# The entries of a group that belong to this process: the order of its parameters, and how it updates them.
_KEPT = ("params", "param_names", "foreach", "fused")
_SHOWN = 4
# The types of the parameters that have states of another type.
_DTYPES = "parameter_dtypes"


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of parameters by id; with several models, each name begins with the number of its model."""
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
    groups = [{**group, "params": in_group} for group, in_group in zip(state["param_groups"], names, strict=True)]
    named = {by_number[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    named_optimizer = {**state, "state": named, "param_groups": groups}
    if dtypes := _dtypes_beside_other_states(named_parameters(optimizer, models), named):
        named_optimizer[_DTYPES] = dtypes
    return named_optimizer


def load_named_state(optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
    """Load a state that `named_state` returned.

    Raises:
        StateError: If the groups differ; the optimizer is then unchanged.
    """
    names = _names_in_groups(optimizer, models)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    saved = match_groups(optimizer, names, state["param_groups"])
    groups = [
        {**{key: value for key, value in group.items() if key not in _KEPT}, **_kept(current)}
        for group, current in zip(saved, optimizer.state_dict()["param_groups"], strict=True)
    ]
    by_number = {numbers.get(key, key): value for key, value in state["state"].items()}
    loaded = {key: value for key, value in state.items() if key != _DTYPES}
    optimizer.load_state_dict({**loaded, "state": by_number, "param_groups": groups})
    _restore_dtypes(optimizer, named_parameters(optimizer, models), state["state"], state.get(_DTYPES, {}))


def named_gradients(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients of the optimizer's parameters, by name."""
    parameters = named_parameters(optimizer, models)
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


def load_named_gradients(optimizer: Optimizer, models: Sequence[nn.Module], gradients: Mapping[str, Tensor]) -> None:
    """Set the gradients that `named_gradients` returned."""
    parameters = named_parameters(optimizer, models)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.to(parameters[name])


def named_parameters(optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name."""
    names = _names_in_groups(optimizer, models)
    pairs = [
        pair
        for in_group, group in zip(names, optimizer.param_groups, strict=True)
        for pair in zip(in_group, group["params"], strict=True)
    ]
    return dict(pairs)


def _dtypes_beside_other_states(parameters: Mapping[str, Tensor], states: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of the parameters that have a floating state of another type."""
    return {
        name: str(parameter.dtype)
        for name, parameter in parameters.items()
        if any(value.dtype != parameter.dtype for value in _floating(states.get(name)).values())
    }


def _restore_dtypes(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Any], dtypes: Mapping[str, str]
) -> None:
    """Restore states that torch cast to the type of their parameter, unless that has changed since the save."""
    for name, parameter in parameters.items():
        if dtypes.get(name) != str(parameter.dtype):
            continue
        loaded = optimizer.state.get(parameter, {})
        for key, value in _floating(saved.get(name)).items():
            if key in loaded and loaded[key].dtype == parameter.dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _floating(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that torch casts."""
    values = state.items() if isinstance(state, Mapping) else ()
    return {
        key: value for key, value in values if key != "step" and isinstance(value, Tensor) and value.is_floating_point()
    }


def _names_in_groups(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    known = parameter_names(models)
    count = 0
    names: list[list[str]] = []
    for group in optimizer.param_groups:
        in_group: list[str] = []
        for parameter in group["params"]:
            name = known.get(id(parameter))
            if name is None:
                name, count = f"{_UNNAMED} {count}", count + 1
            in_group.append(name)
        names.append(in_group)
    return names


def match_groups(
    optimizer: Optimizer, names: list[list[str]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved groups in the order of this optimizer's groups.

    Raises:
        StateError: If a group has the parameters of no saved group.
    """
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    if len(saved) != len(names):
        raise StateError(
            f"The saved optimizer state has {len(saved)} parameter groups, and this {kind} has {len(names)}. Create "
            "the optimizer with the same groups as at the save."
        )
    remaining = [dict(group) for group in saved]
    matched: list[dict[str, Any]] = []
    for number, in_group in enumerate(names):
        match = next((group for group in remaining if set(group["params"]) == set(in_group)), None)
        if match is None:
            saved_names = [name for group in remaining for name in group["params"]]
            raise StateError(_difference(kind, number, in_group, saved_names))
        remaining = [group for group in remaining if group is not match]
        matched.append(match)
    return matched


def _difference(kind: str, number: int, current: list[str], saved: list[str]) -> str:
    new = [name for name in current if name not in set(saved)]
    gone = [name for name in saved if name not in set(current)]
    lists = [f"{text} {', '.join(names[:_SHOWN])}" for text, names in (("new:", new), ("only saved:", gone)) if names]
    return (
        f"Parameter group {number} of {kind} has the parameters of no saved group ({'; '.join(lists)}). Create the "
        "optimizer with the same groups as at the save."
    )


def _kept(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _KEPT if key in group}
