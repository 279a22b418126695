"""State dicts of models and optimizers under ZeRO: whole tensors on rank 0, under the names of the user's model.

They are those of any other strategy, so a checkpoint loads into another world, another stage, DDP or FSDP. One tensor
at a time is whole, so a rank needs memory for its shards and one whole tensor.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.state_dicts import check_fits
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.deepspeed.zero_shards import ZeroShards
from trainer_lib.strategies.optimizer_state_names import match_groups, parameter_names


class _Spec(NamedTuple):
    """The shape and type of a tensor that is broadcast next."""

    shape: torch.Size
    dtype: torch.dtype


def whole_shapes(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device, with the shapes of whole weights."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(_shape(parameter), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def model_state(model: nn.Module, shards: ZeroShards) -> dict[str, Any]:
    """Return the whole tensors on rank 0, weights in fp32, and nothing on the other ranks."""
    seen: dict[int, Any] = {}  # gathers a tensor under several names once
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = _whole(value, shards)
            state[canonical_name(name)] = seen[id(value)]
        else:
            state[canonical_name(name)] = value
    return state if shards.group.rank == 0 else {}


def load_model_state(model: nn.Module, shards: ZeroShards, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors from rank 0.

    Raises:
        StateError: On all ranks, if names (with `strict`) or shapes differ.
    """
    group = shards.group

    def checked() -> tuple[dict[str, _Spec], dict[str, Any]]:
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        check_fits(whole_shapes(model), {name: value.shape for name, value in tensors.items()}, strict, state)
        specs = {name: _Spec(value.shape, value.dtype) for name, value in tensors.items()}
        return specs, {name: value for name, value in state.items() if name not in tensors}

    specs, extras = run_on_main_process(group, "load_state_dict", checked)
    targets = {canonical_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, spec in specs.items():
        if name in targets:
            _write(targets[name], shards, _broadcast(state.get(name), spec, shards))
    for name, value in extras.items():
        if name in targets:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def optimizer_state(
    optimizer: Optimizer, models: Sequence[nn.Module], shards: ZeroShards, groups: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names on rank 0, and nothing on the other ranks.

    Args:
        optimizer: The wrapped optimizer.
        models: The users' models.
        shards: This rank's shards.
        groups: The parameters of the model in each group of the optimizer.
    """
    names = parameter_names(models)
    state: dict[str, Any] = {}
    for tensor, parameters in zip(shards.tensors, shards.parameters, strict=True):
        values: dict[str, Any] = optimizer.state.get(tensor, {})
        for parameter in parameters:
            of_parameter = {key: _state_value(value, parameter, tensor, shards) for key, value in values.items()}
            if of_parameter:
                state[names[id(parameter)]] = of_parameter
    settings = [
        {**group, "params": [names[id(parameter)] for parameter in parameters]}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": settings} if shards.group.rank == 0 else {}


def load_optimizer_state(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    shards: ZeroShards,
    groups: Sequence[Sequence[Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Load a state that `optimizer_state` returned on rank 0, of any strategy.

    Raises:
        StateError: On all ranks, if its groups hold other parameters.
    """
    names = parameter_names(models)

    def skeleton_on_rank_zero() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        in_groups = [[names[id(parameter)] for parameter in parameters] for parameters in groups]
        matched = match_groups(optimizer, in_groups, state["param_groups"])
        specs = {
            name: {key: _spec_or_value(value) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        return [{k: v for k, v in group.items() if k not in ("params", "foreach", "fused")} for group in matched], specs

    settings, specs = run_on_main_process(shards.group, "load_state_dict", skeleton_on_rank_zero)
    for group, loaded in zip(optimizer.param_groups, settings, strict=True):
        group.update(loaded)
    for tensor, parameters in zip(shards.tensors, shards.parameters, strict=True):
        held: dict[str, Any] = {}
        for parameter in parameters:
            name = names[id(parameter)]
            for key, spec in specs.get(name, {}).items():
                value = state["state"][name][key] if shards.group.rank == 0 else None
                _load_value(held, key, spec, value, parameter, tensor, shards)
        if held or optimizer.state.get(tensor):
            _replace(optimizer.state[tensor], held)


def _replace(kept: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copy values into tensors of an optimizer that DeepSpeed holds too, and add the others."""
    for key in [key for key in kept if key not in loaded]:
        del kept[key]
    for key, value in loaded.items():
        current = kept.get(key)
        if isinstance(current, Tensor) and isinstance(value, Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            kept[key] = value


def _load_value(
    held: dict[str, Any], key: str, spec: Any, value: Any, parameter: Tensor, tensor: Tensor, shards: ZeroShards
) -> None:
    if not isinstance(spec, _Spec):
        held[key] = spec.clone() if isinstance(spec, Tensor) else spec
        return
    if spec.shape != shards.shape_of(parameter):
        raise StateError(
            f"The optimizer's {key!r} has the shape {tuple(spec.shape)} for a weight of "
            f"{tuple(shards.shape_of(parameter))}, and ZeRO shards states of the shape of their weight only. Use an "
            "optimizer such as AdamW, or train without DeepSpeed."
        )
    shard = held.setdefault(key, torch.zeros_like(tensor, dtype=spec.dtype, requires_grad=False))
    shards.write(parameter, shard, _broadcast(value, spec, shards))


def _state_value(value: Any, parameter: Tensor, tensor: Tensor, shards: ZeroShards) -> Any:
    if isinstance(value, Tensor) and value.shape == tensor.shape:
        return _on_rank_zero(shards.whole(parameter, value), shards.group)
    return value.clone() if isinstance(value, Tensor) else value


def _spec_or_value(value: Any) -> Any:
    return _Spec(value.shape, value.dtype) if isinstance(value, Tensor) and value.dim() else value


def _broadcast(value: Any, spec: _Spec, shards: ZeroShards) -> Tensor:
    device = shards.engine.device
    if shards.group.rank == 0:
        whole = value.detach().to(device).contiguous()
    else:
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    return shards.group.broadcast(whole)


def _whole(value: Tensor, shards: ZeroShards) -> Any:
    if shards.holds(value) and (shards.stage == 3 or value.dtype != torch.float32):
        whole = shards.whole(value, shards.tensors[shards.shard_of(value)])
    elif (part := _partition(value)) is not None:  # a frozen weight
        parts = torch.cat(shards.group.all_gather(part.to(shards.engine.device)))
        whole = parts[: _shape(value).numel()].view(_shape(value))
    else:
        return value.detach()
    return _on_rank_zero(whole, shards.group)


@torch.no_grad()
def _write(target: Any, shards: ZeroShards, values: Tensor) -> None:
    """Overwrite a weight or buffer: its shard, what forwards gather from, and what is whole now."""
    if shards.holds(target):
        shards.write(target, shards.tensors[shards.shard_of(target)], values)
    part = _partition(target)
    if part is not None:
        start = min(part.numel() * shards.group.rank, values.numel())
        length = min(part.numel(), values.numel() - start)
        part.view(-1)[:length].copy_(values.reshape(-1)[start : start + length])
    if target.shape == values.shape:
        target.data.copy_(values)


def _partition(parameter: Any) -> Tensor | None:
    """Return this rank's part of a weight that ZeRO-3 shards."""
    return getattr(parameter, "ds_tensor", None)


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _on_rank_zero(value: Tensor, group: ProcessGroup) -> Tensor | None:
    return value.cpu() if group.rank == 0 else None
