"""States of this library in the form that Accelerate and Hugging Face's Trainer read."""

from collections.abc import Mapping
from typing import Any


def numbered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the numbers of its parameters, in the order of its groups, in place of names.

    Example:
        >>> numbered_state({"state": {"w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["b", "w"]}]})
        {'state': {1: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    names = list(dict.fromkeys(name for group in state["param_groups"] for name in group["params"]))
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **state,
        "state": {numbers.get(name, name): values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def accelerate_generators(state: Mapping[str, Any], step: int, device: int) -> dict[str, Any]:
    """Return a rank's generators as in `random_states_N.pkl`.

    Args:
        state: The state of the generators.
        step: The backward passes that were made.
        device: The number of the rank's device on its machine.
    """
    states = {
        "step": step,
        "random_state": state["python"],
        "numpy_random_seed": _numpy_tuple(state["numpy"]),
        "torch_manual_seed": state["torch"].cpu(),
    }
    # That of each device up to the rank's own: Accelerate sets them by their order.
    devices = {
        f"torch_{kind}_manual_seed": [value.cpu()] * (device + 1) for kind, value in state.get("device", {}).items()
    }
    return states | devices


def transformers_generators(state: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's generators as in `rng_state.pth`, or of several ranks in `rng_state_N.pth`."""
    devices = {
        kind: value.cpu() if world_size == 1 else [value.cpu()] * (rank + 1)
        for kind, value in state.get("device", {}).items()
    }
    return {"python": state["python"], "numpy": _numpy_tuple(state["numpy"]), "cpu": state["torch"].cpu(), **devices}


def _numpy_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    inner = state["state"]
    return (state["bit_generator"], inner["key"], inner["pos"], state["has_gauss"], state["gauss"])
