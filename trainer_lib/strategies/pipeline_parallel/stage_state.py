"""States of models and optimizers whose stages are on several ranks: whole on rank 0, and loaded from there.

Tensors travel one at a time, so rank 0 needs memory for the whole state, and the others for one tensor more.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_lib.collectives.agreement import run_on_main_process
from trainer_lib.foundation.errors import StateError
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.modules.weights.state_dicts import check_fits
from trainer_lib.modules.weights.tied_parameters import first_names
from trainer_lib.process_group import ProcessGroup
from trainer_lib.strategies.fsdp import materialize
from trainer_lib.strategies.fsdp.sharded_state import module_state_with_variables
from trainer_lib.strategies.optimizer_state_names import load_named_state
from trainer_lib.strategies.pipeline_parallel.stage_exchange import StageExchange, TensorSpec

_SHOWN = 4


class WholeModel:
    """The names and shapes of a whole model, of which this rank holds some stages.

    Args:
        model: The model before it is cut.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        empty: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in tensors}
        for parameter in model.parameters():
            empty[id(parameter)] = nn.Parameter(empty[id(parameter)], parameter.requires_grad)
        self.model: nn.Module = copy.deepcopy(model, empty)
        self.first: dict[str, str] = {
            canonical_name(name): canonical_name(first) for name, first in first_names(model).items()
        }
        self.tensors: dict[str, Any] = module_state_with_variables(self.model)

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of this rank's part, each by its first name in the whole model."""
        return {self.first[canonical_name(name)]: parameter for name, parameter in module.named_parameters()}

    def with_all_names(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state in the order of the model, in which tied weights share a tensor again."""
        by_first = {self.first.get(name, name): value for name, value in reversed(list(state.items()))}
        return {name: by_first[self.first.get(name, name)] for name in self.tensors}

    def load(self, module: nn.Module, state: Mapping[str, Any], group: ProcessGroup, device: Any, strict: bool) -> None:
        """Load rank 0's whole state into the part that this rank holds.

        Raises:
            StateError: On all ranks, if names (with `strict`) or shapes differ.
        """

        def checked() -> tuple[list[str], dict[str, Any]]:
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            check_fits(self.model, {name: value.shape for name, value in tensors.items()}, strict, state)
            return list(tensors), {name: value for name, value in state.items() if name not in tensors}

        names, extras = run_on_main_process(group, "load_state_dict", checked)
        held = module_state_with_variables(module)
        targets = {
            self.first.get(name, name): value.detach() for name, value in held.items() if isinstance(value, Tensor)
        }
        saved = {self.first.get(name, name): name for name in names if name in self.tensors}
        values = {
            first: state[name].to(self.tensors[name].dtype) if group.rank == 0 else self.tensors[name]
            for first, name in saved.items()
        }
        materialize.fill_held(targets, values, group, device)
        for name, value in extras.items():
            if name in held:
                module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def merged(part: Mapping[str, Any], exchange: StageExchange) -> dict[str, Any]:
    """Return the entries of all stages on the first rank of a pipeline, and none on the others. All have to call."""
    by_rank = exchange.gather_objects({name: _spec_or_value(value) for name, value in part.items()})
    whole: dict[str, Any] = {}
    for rank, entries in enumerate(by_rank):
        for name, entry in entries.items():
            if any(name in earlier for earlier in by_rank[:rank]):
                continue
            if exchange.rank == 0:
                whole[name] = part[name] if rank == 0 else _received(entry, rank, exchange)
            elif exchange.rank == rank and isinstance(entry, TensorSpec):
                exchange.send(part[name], 0)
    return whole


def merged_optimizer_state(
    state: Mapping[str, Any], first: Mapping[str, str], exchange: StageExchange
) -> dict[str, Any]:
    """Return the state of an optimizer on all stages by names, on the first rank of a pipeline."""
    flat: dict[Any, Any] = {("group", number): group for number, group in enumerate(state["param_groups"])}
    for name, values in state["state"].items():
        entries = values.items() if isinstance(values, dict) else [(None, values)]
        flat |= {("state", _first(name, first), key): value for key, value in entries}
    groups = exchange.gather_objects([[_first(name, first) for name in g["params"]] for g in state["param_groups"]])
    whole = merged(flat, exchange)
    if exchange.rank:
        return {}
    result: dict[str, Any] = {**state, "state": {}, "param_groups": []}
    for key, value in whole.items():
        if key[0] == "group":
            names = dict.fromkeys(name for of_rank in groups for name in of_rank[key[1]])
            result["param_groups"].append({**value, "params": list(names)})
        elif key[2] is None:
            result["state"][key[1]] = value
        else:
            result["state"].setdefault(key[1], {})[key[2]] = value
    return result


def load_optimizer_state(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    parameters: Mapping[str, tuple[str, Tensor]],
    state: Mapping[str, Any],
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Load rank 0's whole state into an optimizer of this rank's stages.

    Args:
        optimizer: The optimizer.
        models: The parts of the models that this rank holds.
        parameters: This rank's names and parameters, by their first names in the whole models.
        state: The whole state, on rank 0.
        group: All ranks.
        device: The device of this rank.

    Raises:
        StateError: On all ranks, if the groups hold other parameters.
    """
    held = {id(parameter): first for first, (_, parameter) in parameters.items()}
    here = [[held[id(p)] for p in settings["params"] if id(p) in held] for settings in optimizer.param_groups]
    everywhere = _united(group.all_gather_objects(here))

    def skeleton_on_rank_zero() -> dict[str, Any]:
        _check_groups(state["param_groups"], everywhere, type(optimizer).__name__)
        values = {name: _skeleton(value) for name, value in state["state"].items()}
        return {**state, "state": values}

    skeleton = run_on_main_process(group, "load_state_dict", skeleton_on_rank_zero)
    mine: dict[str, Any] = {}
    for first, values in skeleton["state"].items():
        name, parameter = parameters.get(first, ("", None))
        filled = values
        if isinstance(values, dict):
            saved = state["state"][first] if group.rank == 0 else {}
            filled = {key: _sent(value, saved.get(key), parameter, group, device) for key, value in values.items()}
        if parameter is not None:
            mine[name] = filled
    groups = [
        {**saved, "params": [parameters[name][0] for name in saved["params"] if name in parameters]}
        for saved in skeleton["param_groups"]
    ]
    load_named_state(optimizer, models, {**skeleton, "state": mine, "param_groups": groups})


def _sent(value: Any, saved: Any, parameter: Tensor | None, group: ProcessGroup, device: torch.device) -> Any:
    """Return a value of the state; a tensor travels from rank 0 to the ranks that have the parameter."""
    if not isinstance(value, TensorSpec):
        return value
    target = {} if parameter is None else {"": _empty_like(parameter, value, device)}
    materialize.fill_held(target, {"": value.empty(torch.device("meta")) if saved is None else saved}, group, device)
    return target.get("")


def _first(name: str, first: Mapping[str, str]) -> str:
    return first.get(name, name)


def _united(by_rank: Sequence[list[list[str]]]) -> list[set[str]]:
    return [{name for names in of_group for name in names} for of_group in zip(*by_rank, strict=True)]


def _check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[set[str]], kind: str) -> None:
    for number, (settings, names) in enumerate(zip(saved, groups, strict=False)):
        other = sorted(set(settings["params"]) ^ names)
        if other:
            raise StateError(
                f"Parameter group {number} of {kind} and the saved one differ in {', '.join(other[:_SHOWN])}. Create "
                "the optimizer with the same groups as at the save."
            )
    if len(saved) != len(groups):
        raise StateError(
            f"The saved optimizer state has {len(saved)} parameter groups, and this {kind} has {len(groups)}. Create "
            "the optimizer with the same groups as at the save."
        )


def _skeleton(values: Any) -> Any:
    return {key: _spec_or_value(value) for key, value in values.items()} if isinstance(values, dict) else values


def _spec_or_value(value: Any) -> Any:
    is_large = isinstance(value, Tensor) and value.dim()
    return TensorSpec(tuple(value.shape), value.dtype, False) if is_large else value


def _received(entry: Any, rank: int, exchange: StageExchange) -> Any:
    return exchange.receive(entry, rank).cpu() if isinstance(entry, TensorSpec) else entry


def _empty_like(parameter: Any, spec: TensorSpec, device: torch.device) -> Tensor:
    if hasattr(parameter, "_local_tensor") and spec.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
    return spec.empty(device)
