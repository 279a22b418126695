"""State dicts under canonical names, and a check that a state dict fits a module."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.weights.names import canonical_name, class_name
from trainer_lib.modules.weights.tensor_slots import module_slots

_SHOWN = 4  # names in a message


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict under canonical names, with offloaded weights read from where they are kept.

    Example:
        >>> module = nn.Linear(2, 1, bias=False)
        >>> list(module_state(torch.compile(module, backend="eager")))
        ['weight']
    """
    from trainer_lib.modules.weights.offloaded_state import get_state_dict_offloaded_model

    state = get_state_dict_offloaded_model(inner_module(module))
    return {canonical_name(name): value for name, value in state.items()}


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load a state that `module_state` returned, whether or not the module is compiled now.

    Raises:
        StateError: If names (with `strict`) or shapes differ, or the values of offloaded weights, which cannot be
            replaced; the module is then unchanged.
    """
    from trainer_lib.modules.weights.offloaded_state import differing_offloaded_weights, offloaded_names

    module = inner_module(module)
    shapes = {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}
    check_fits(module, shapes, strict, state, resizes=True)
    names = {canonical_name(name): name for name in module.state_dict(keep_vars=True)}
    values = {names[name]: value for name, value in state.items() if name in names}
    if differing := differing_offloaded_weights(module, values):
        raise StateError(
            f"{', '.join(differing[:_SHOWN])}: offloaded weights of this {class_name(module)} have other values than "
            "the state, and cannot be replaced. Load it with load_checkpoint_and_dispatch into an empty model."
        )
    kept = offloaded_names(module)
    module.load_state_dict({name: value for name, value in values.items() if name not in kept}, strict=False)


def check_fits(
    module: nn.Module,
    shapes: Mapping[str, torch.Size],
    strict: bool = True,
    all_names: Iterable[str] | None = None,
    resizes: bool = False,
) -> None:
    """Raise unless a module has tensors of these names and shapes.

    Args:
        module: The module.
        shapes: The shape of each tensor.
        strict: The names must be equal; else only names that both have count.
        all_names: All names of the state, including those of values that are no tensors; by default those of `shapes`.
        resizes: Whether loading resizes a buffer of a module that accepts other shapes, such as an observer for
            quantization.
    """
    module = inner_module(module)
    state = module.state_dict(keep_vars=True)
    current = {canonical_name(name): value for name, value in state.items()}
    names = set(shapes) if all_names is None else set(all_names)
    mismatches = [
        f"{name} has the shape {tuple(shapes[name])} and here {tuple(value.shape)}"
        for full, value in state.items()
        if (name := canonical_name(full)) in shapes
        and isinstance(value, Tensor)
        and value.shape != shapes[name]
        and not (resizes and _accepts_shape(module, full, shapes[name]))
    ]
    message = _listed("other shapes", mismatches)
    if strict:
        # A tensor under several names needs only one of them in the state.
        loaded = {id(value) for name, value in current.items() if name in names}
        missing = [name for name, value in current.items() if name not in names and id(value) not in loaded]
        message = [
            *_listed("missing", missing),
            *_listed("not in this model", [name for name in names if name not in current]),
            *message,
        ]
    if message:
        raise StateError(f"These weights are of another model than this {class_name(module)}: {'; '.join(message)}.")


def inner_module(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`'s wrapper, or the module itself."""
    # Not getattr: some modules forward attributes to inner modules.
    modules = module_slots(module)
    if "_orig_mod" in modules:  # the slots of a scripted module have no get
        return modules["_orig_mod"] or module
    return module


def _accepts_shape(module: nn.Module, name: str, shape: torch.Size) -> bool:
    """Whether the module that has a buffer resizes it in a `_load_from_state_dict` of its own, found by a copy."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    is_buffer = attribute in owner._buffers  # pyright: ignore[reportPrivateUsage]
    if not is_buffer or type(owner)._load_from_state_dict is nn.Module._load_from_state_dict:  # pyright: ignore[reportPrivateUsage]
        return False
    trial, errors = copy.deepcopy(owner), list[str]()
    value = torch.zeros(shape, dtype=getattr(owner, attribute).dtype)
    trial._load_from_state_dict({attribute: value}, "", {}, False, [], [], errors)  # pyright: ignore[reportPrivateUsage]
    return not errors and getattr(trial, attribute).shape == shape


def _listed(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{kind}: {', '.join(sorted(names)[:_SHOWN])}{more}"]
