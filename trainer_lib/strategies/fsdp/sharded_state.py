"""This file is the states of sharded models and their optimizers: made whole in the main process, and taken up again.

Whole tensors travel one at a time, so no process needs more memory than its shards and one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.modules.names import canonical_name
from trainer_lib.modules.state import check_fits, module_state
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.optimizer_state_names import load_named_state, named_state, parameter_names


def model_state(model: nn.Module, group: ProcessGroup, device: torch.device, whole: bool) -> dict[str, Any]:
    """Return the model's tensors: shards, or whole ones on the CPU of the main process and none elsewhere."""
    state = module_state(model)
    if not whole:
        return state
    seen: dict[int, Any] = {}  # a tensor under several names travels once
    for name, value in module_state_with_variables(model).items():
        if id(value) not in seen:
            seen[id(value)] = _whole(state[name], group, device)
        state[name] = seen[id(value)]
    return state if group.rank == 0 else {}


def module_state_with_variables(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers themselves, whose identity tells which names are one tensor."""
    return {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def load_model_state(
    model: nn.Module, state: Mapping[str, Any], group: ProcessGroup, device: torch.device, strict: bool
) -> None:
    """Take up whole tensors from the main process, or each process its own shards.

    Raises:
        StateError: On all processes, if names (with `strict`) or shapes differ.
    """

    def checked() -> tuple[bool, list[str], dict[str, Any]]:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        check_fits(model, {name: value.shape for name, value in tensors.items()}, strict, state)
        return _holds_shards(tensors.values()), list(tensors), {k: v for k, v in state.items() if k not in tensors}

    are_shards, names, extras = run_on_main_process(group, "load_state_dict", checked)
    own = module_state_with_variables(model)
    targets = {id(own[name]): (name, own[name].detach()) for name in names if name in own}
    if are_shards:
        with torch.no_grad():
            for name, target in targets.values():
                _copy_shard(target, state[name])
    else:
        materialize.fill(dict(targets.values()), state, group, device)
    for name, value in extras.items():
        if name in own:
            owner, _, _ = name.rpartition(".")
            model.get_submodule(owner).set_extra_state(value)


def optimizer_state(
    optimizer: Optimizer, models: Sequence[nn.Module], group: ProcessGroup, device: torch.device, whole: bool
) -> dict[str, Any]:
    """Return the optimizer's state by names: shards, or whole tensors in the main process and nothing elsewhere."""
    state = named_state(optimizer, models)
    if not whole:
        return state
    state["state"] = _by_name(state, lambda name, value: _whole(value, group, device))
    return state if group.rank == 0 else {}


def load_optimizer_state(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    state: Mapping[str, Any],
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Take up whole tensors from the main process, or each process its own shards.

    Raises:
        StateError: On all processes, if its groups hold other parameters.
    """
    by_id = {id(parameter): parameter for model in models for parameter in model.parameters()}
    parameters = {name: by_id[key] for key, name in parameter_names(models).items()}

    def described() -> tuple[bool, dict[str, Any]]:
        tensors = [v for values in state["state"].values() if isinstance(values, dict) for v in values.values()]
        are_shards = _holds_shards(tensors)
        return are_shards, {} if are_shards else _described(state, parameters)

    are_shards, skeleton = run_on_main_process(group, "load_state_dict", described)
    if are_shards:
        load_named_state(optimizer, models, state)
        return
    for name, values in skeleton["state"].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, _Description):
                target = value.made_like(parameters[name])
                whole = {key: state["state"][name][key]} if group.rank == 0 else {}
                materialize.fill({key: target}, whole, group, device)
                values[key] = target
    load_named_state(optimizer, models, skeleton)


class _Description:
    """A tensor that belongs to a sharded parameter, as the other processes hear of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def made_like(self, parameter: Any) -> Tensor:
        if self.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = parameter.device_mesh
        empty = torch.empty(self.shape, dtype=self.dtype, device=parameter._local_tensor.device)
        return distribute_tensor(empty, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def _described(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state with descriptions in the place of what is to be sharded; the rest can travel as it is."""

    def described(name: str, value: Any) -> Any:
        sharded = hasattr(parameters.get(name), "_local_tensor")
        return _Description(value) if sharded and isinstance(value, Tensor) and value.dim() else value

    return {**state, "state": _by_name(state, described)}


def _by_name(state: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the part of each parameter with its values changed; what optimizers note for themselves stays."""
    return {
        name: {key: change(name, value) for key, value in values.items()} if isinstance(values, dict) else values
        for name, values in state["state"].items()
    }


def _whole(value: Any, group: ProcessGroup, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    sharded: Any = value.detach()
    if hasattr(sharded, "_local_tensor"):
        # To the device first: the processes may only be able to talk from there.
        sharded = sharded.to(device).full_tensor()
    return sharded.cpu() if group.rank == 0 else None


def _holds_shards(values: Any) -> bool:
    return any(hasattr(value, "_local_tensor") for value in values)


def _copy_shard(target: Any, value: Any) -> None:
    if not hasattr(value, "_local_tensor") or value.shape != target.shape:
        target.copy_(value)
    elif (value.device_mesh, value.placements) == (target.device_mesh, target.placements):
        target._local_tensor.copy_(value._local_tensor)
    else:
        materialize.write(target, value.full_tensor())
