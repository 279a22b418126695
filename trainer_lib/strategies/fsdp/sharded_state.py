"""State dicts of sharded models and their optimizers: gathered to rank 0, and loaded again.

Whole tensors are gathered and broadcast one at a time, so a rank needs memory for its shards and one whole tensor.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.foundation.tensors.local_shards import local_shard, with_part
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.state_dicts import check_fits, module_state
from trainer_lib.options.parallel.fsdp1_translation import WholeState
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.optimizer_state_names import load_named_state, named_state, parameter_names
from trainer_lib.tensor_files.quantized_states import QuantizedState, quantized_kind

_ON_RANK_ZERO = WholeState()


def model_state(
    model: nn.Module, group: ProcessGroup, device: torch.device, whole: WholeState | None
) -> dict[str, Any]:
    """Return the model's tensors: shards, or whole tensors on the ranks that get them and none on the others."""
    state = module_state(model)
    if whole is None:
        return state
    seen: dict[int, Any] = {}  # gathers a tensor under several names once
    for name, value in module_state_with_variables(model).items():
        if id(value) not in seen:
            seen[id(value)] = _whole(state[name], group, device, whole)
        state[name] = seen[id(value)]
    return state if group.rank == 0 or whole.on_all_ranks else {}


def module_state_with_variables(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers themselves, whose identity shows which names share a tensor."""
    return {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def load_model_state(
    model: nn.Module, state: Mapping[str, Any], group: ProcessGroup, device: torch.device, strict: bool
) -> None:
    """Load whole tensors from rank 0, or each rank's own shards.

    Raises:
        StateError: On all ranks, if names (with `strict`) or shapes differ.
    """

    def checked() -> tuple[bool, list[str], dict[str, Any]]:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        check_fits(model, {name: value.shape for name, value in tensors.items()}, strict, state)
        return _holds_shards(tensors.values()), list(tensors), {k: v for k, v in state.items() if k not in tensors}

    are_shards, names, extras = run_on_main_process(group, "load_state_dict", checked)
    tensors = module_state_with_variables(model)
    targets = {id(tensors[name]): (name, tensors[name].detach()) for name in names if name in tensors}
    if are_shards:
        with torch.no_grad():
            for name, target in targets.values():
                _copy_shard(target, state[name])
    else:
        materialize.fill(dict(targets.values()), state, group, device)
    for name, value in extras.items():
        if name in tensors:
            owner, _, _ = name.rpartition(".")
            model.get_submodule(owner).set_extra_state(value)


def optimizer_state(
    optimizer: Optimizer, models: Sequence[nn.Module], group: ProcessGroup, device: torch.device, whole: bool
) -> dict[str, Any]:
    """Return the optimizer's state by names: shards, or whole tensors on rank 0 and nothing on the other ranks."""
    state = named_state(optimizer, models)
    if not whole:
        return state
    state["state"] = _mapped(state, lambda name, value: _whole(value, group, device))
    return state if group.rank == 0 else {}


def load_optimizer_state(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    state: Mapping[str, Any],
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Load whole tensors from rank 0, or each rank's own shards.

    Raises:
        StateError: On all ranks, if its groups hold other parameters.
    """
    by_id = {id(parameter): parameter for model in models for parameter in model.parameters()}
    parameters = {name: by_id[key] for key, name in parameter_names(models).items()}

    def skeleton_on_rank_zero() -> tuple[bool, dict[str, Any]]:
        tensors = [v for values in state["state"].values() if isinstance(values, dict) for v in values.values()]
        are_shards = _holds_shards(tensors)
        return are_shards, {} if are_shards else _skeleton(state, parameters)

    are_shards, skeleton = run_on_main_process(group, "load_state_dict", skeleton_on_rank_zero)
    if are_shards:
        load_named_state(optimizer, models, state)
        return
    for name, values in skeleton["state"].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, (QuantizedState, _TensorSpec)):
                whole = {key: state["state"][name][key]} if group.rank == 0 else {}
                values[key] = _filled(value, key, whole, parameters[name], group, device)
    load_named_state(optimizer, models, skeleton)


def _filled(
    spec: "QuantizedState | _TensorSpec",
    key: str,
    whole: Mapping[str, Any],
    parameter: Any,
    group: ProcessGroup,
    device: torch.device,
) -> Any:
    """Return this rank's part of a state tensor of a parameter, which rank 0 has as a `whole`."""
    if isinstance(spec, QuantizedState):
        parts = QuantizedState.of(whole[key]).parts if whole else {}
        return spec.split_like(parameter, functools.partial(materialize.fill, values=parts, group=group, device=device))
    target = spec.empty_for(parameter)
    materialize.fill({key: target}, whole, group, device)
    return target


class _TensorSpec:
    """The shape and type of a state tensor of a sharded parameter, sent to the other ranks."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def empty_for(self, parameter: Any) -> Tensor:
        if self.shape == parameter.shape:
            return with_part(parameter, torch.empty_like(local_shard(parameter), dtype=self.dtype, requires_grad=False))
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = parameter.device_mesh
        empty = torch.empty(self.shape, dtype=self.dtype, device=parameter._local_tensor.device)
        return distribute_tensor(empty, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def _skeleton(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state with a `_TensorSpec` for each tensor to shard; other values are small enough to broadcast."""

    def spec_or_value(name: str, value: Any) -> Any:
        sharded = hasattr(parameters.get(name), "_local_tensor")
        if sharded and quantized_kind(value) is not None:
            return QuantizedState.of(value).mapped(_TensorSpec)
        return _TensorSpec(value) if sharded and isinstance(value, Tensor) and value.dim() else value

    return {**state, "state": _mapped(state, spec_or_value)}


def _mapped(state: Mapping[str, Any], function: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the states of parameters with a function applied to each value; other entries stay unchanged."""
    return {
        name: {key: function(name, value) for key, value in values.items()} if isinstance(values, dict) else values
        for name, values in state["state"].items()
    }


def _whole(value: Any, group: ProcessGroup, device: torch.device, kept: WholeState = _ON_RANK_ZERO) -> Any:
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, "_local_tensor") and quantized_kind(value) is not None:
        parts = QuantizedState.of(value).mapped(lambda part: _whole(part, group, device, kept))
        return None if group.rank and not kept.on_all_ranks else parts.joined()
    sharded: Any = value.detach()
    if hasattr(sharded, "_local_tensor"):
        # Move to the device first: the backend may only communicate from there.
        sharded = sharded.to(device).full_tensor()
    if group.rank and not kept.on_all_ranks:
        return None
    return sharded.cpu() if kept.on_cpu else sharded.to(device)


def _holds_shards(values: Any) -> bool:
    return any(hasattr(value, "_local_tensor") for value in values)


def _copy_shard(target: Any, value: Any) -> None:
    if not hasattr(value, "_local_tensor"):
        target.copy_(value)
    elif (value.device_mesh, value.placements) == (target.device_mesh, target.placements):
        target._local_tensor.copy_(value._local_tensor)
    else:
        materialize.write(target, value.full_tensor())
