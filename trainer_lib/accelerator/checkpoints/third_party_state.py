"""Translate the states of another library's checkpoint for the objects prepared here."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainer_lib.accelerator.engine import Engine
from trainer_lib.checkpointing.format.layout import ENGINE_NAME, OPTIMIZER_NAME, SAMPLER_NAME, SCHEDULER_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part, missing_weights
from trainer_lib.checkpointing.third_party.third_party import TRAINER
from trainer_lib.checkpointing.third_party.transformers_layout import NOT_DECAYED
from trainer_lib.filesystem.remote_paths import AnyPath
from trainer_lib.foundation.errors import StateError
from trainer_lib.foundation.lengths import length_of
from trainer_lib.logging import get_logger
from trainer_lib.modules.weights.names import canonical_name
from trainer_lib.strategies.optimizer_state_names import named_parameters, parameter_names
from trainer_lib.tensor_files.weight_names import SAFE_MODEL_NAME

_logger = get_logger(__name__)

# Options of an optimizer's implementation: the script that creates the optimizer sets them, not a checkpoint.
_IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_SHOWN = 4


def translated(engine: Engine, part: Part, state: Any) -> Any:
    """Return the imported state of a part in the form that the prepared object loads.

    Args:
        engine: The engine that loads the checkpoint.
        part: The part.
        state: The imported state.

    Raises:
        StateError: If the state does not fit the prepared object.
    """
    if part.kind == OPTIMIZER_NAME and state:
        return _optimizer_state(engine.prepared.optimizers[part.index].optimizer, engine.bare_models(), state)
    if part.kind == SCHEDULER_NAME:
        return _schedule_state(part, state)
    if part.kind == SAMPLER_NAME:
        return _loader_position(engine.prepared.dataloaders[part.index], state)
    return state


def required_parts(parts: Sequence[Part], manifest: Manifest) -> list[str]:
    """Return the names of the parts that the checkpoint must have: all but those that an import left out."""
    if manifest.origin is None:
        return [part.name for part in parts]
    left_out = manifest.origin["left_out"]
    return [
        part.name
        for part in parts
        if part.kind not in left_out
        and (part.kind not in (SAMPLER_NAME, SAFE_MODEL_NAME) or part.name in manifest.parts)
    ]


def report_left_out(manifest: Manifest, folder: AnyPath) -> None:
    """Log what is not read from a checkpoint of another library."""
    left_out = {} if manifest.origin is None else manifest.origin["left_out"]
    for name, reason in left_out.items():
        _logger.info("From %s, without %s: %s.", folder, name, reason)


def warn_missing(part: Part, manifest: Manifest, folder: Path) -> None:
    """Warn that the checkpoint does not have a part, and why, if an import left it out.

    Raises:
        CheckpointError: If the part is a model.
    """
    if part.kind == SAFE_MODEL_NAME:
        raise missing_weights(folder, part.name)
    reason = "" if manifest.origin is None else manifest.origin["left_out"].get(part.kind, "")
    if manifest.origin is None or part.kind != ENGINE_NAME:
        suffix = f" ({reason})" if reason else ""
        _logger.warning("The checkpoint %s has no %s: the prepared one keeps its state%s.", folder, part.name, suffix)


# -- optimizers: the states of parameters by their numbers ------------------------------------------------------------


def _optimizer_state(optimizer: Any, models: Sequence[nn.Module], imported: Mapping[str, Any]) -> dict[str, Any]:
    state = {key: value for key, value in imported.items() if key != "in_order_of"}
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(optimizer, models).items()}
    saved = [key for group in state["param_groups"] for key in group["params"]]
    if len(saved) != len(shapes):
        raise StateError(
            f"The imported optimizer state has {len(saved)} parameters, and this {type(optimizer).__name__} has "
            f"{len(shapes)}. Create the same model, and freeze the same parameters, as in the original training."
        )
    for names in _candidate_orders(optimizer, models, list(shapes), imported, saved):
        name_of = dict(zip(saved, names, strict=True))
        if all(_fits(state["state"].get(key, {}), shapes[name]) for key, name in name_of.items()):
            break
    else:
        raise StateError(
            f"The imported states of {len(saved)} parameters fit the shapes of this {type(optimizer).__name__}'s "
            "parameters in no known order. Create the optimizer for the same model, with the same parameter groups."
        )
    by_name = {name_of[key]: values for key, values in state["state"].items()}
    return {**state, "state": by_name, "param_groups": _groups(optimizer, models, state["param_groups"], name_of)}


def _candidate_orders(
    optimizer: Any, models: Sequence[nn.Module], flat: list[str], imported: Mapping[str, Any], saved: list[Any]
) -> Iterator[list[str]]:
    """Yield the names here of the saved parameters, in the orders that are possible, the likeliest first."""
    if any(isinstance(key, str) for key in saved):  # FSDP saves names, and here those of several models have numbers
        names = [canonical_name(str(key)) for key in saved]
        prefixes = [prefix for prefix, _ in _prefixed(models)]
        orders = [[f"{prefix}{name}" for name in names] for prefix in prefixes]
        yield from (order for order in orders if set(order) == set(flat))
        return
    of_models = [name for name in parameter_names(models).values() if name in set(flat)]
    decayed = {
        f"{prefix}{canonical_name(name)}" for prefix, model in _prefixed(models) for name in _decayed_names(model)
    }
    of_transformers = sorted(of_models, key=lambda name: name not in decayed)
    orders = (of_transformers, flat) if imported["in_order_of"] == TRAINER else (flat, of_models, of_transformers)
    yield from (names for names in orders if len(names) == len(flat))


def _prefixed(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(f"{index}." if len(models) > 1 else "", model) for index, model in enumerate(models)]


def _decayed_names(model: nn.Module) -> set[str]:
    norms = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.LayerNorm))
    return {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(norms) and not NOT_DECAYED.search(canonical_name(name).lower())
    }


def _fits(values: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return all(tuple(value.shape) == shape for value in values.values() if isinstance(value, Tensor) and value.ndim)


def _groups(
    optimizer: Any, models: Sequence[nn.Module], imported: Sequence[Mapping[str, Any]], name_of: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return this optimizer's groups, with the options that the checkpoint has for their parameters."""
    group_of = {name_of[number]: group for group in imported for number in group["params"]}
    names = iter(named_parameters(optimizer, models))
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        group_names = [next(names) for _ in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        sources = list({id(group_of[name]): group_of[name] for name in group_names}.values())
        imported_keys = {key for source in sources for key in source}
        unknown = sorted(imported_keys - {*options, *_IMPLEMENTATION, "initial_lr"})
        if unknown:
            raise StateError(
                f"The imported optimizer state has {', '.join(unknown)}, which this {type(optimizer).__name__} does "
                "not have. Create an optimizer of the class that was saved."
            )
        for key in imported_keys - {*_IMPLEMENTATION}:
            values = [source[key] for source in sources if key in source]
            if all(value == values[0] for value in values):
                options[key] = values[0]
            else:
                _logger.warning(
                    "Parameter group %d of %s joins parameters that were saved with several values of %s (%s). It "
                    "keeps its own: %s.",
                    number,
                    type(optimizer).__name__,
                    key,
                    ", ".join(map(str, values[:_SHOWN])),
                    options.get(key),
                )
        groups.append({**options, "params": group_names})
    return groups


# -- schedules ---------------------------------------------------------------------------------------------------------


def _schedule_state(part: Part, state: Any) -> Any:
    current = part.stateful.state_dict()
    if "lr_lambdas" in state and "lr_lambdas" in current:
        # Take the position only: the lambdas are the script's, whose parameter groups may differ.
        return {**current, **{name: state[name] for name in ("last_epoch", "_step_count")}}
    if state.keys() - {"_is_initial", "_initial_step"} != current.keys() - {"_is_initial", "_initial_step"}:
        raise StateError(
            f"The imported schedule state has {', '.join(sorted(state))}, and {part.class_name} has "
            f"{', '.join(sorted(current))}. Create a schedule of the class that was saved, or convert again with "
            "--without scheduler."
        )
    return state


# -- the position in the data ------------------------------------------------------------------------------------------


def _loader_position(loader: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    batches = state.get("batches") or 0
    if state["part_of_pass"]:
        length = length_of(loader)
        if length is None:
            _logger.warning(
                "The data has no length, so the position in the epoch cannot be restored: the epoch restarts, and "
                "samples come twice."
            )
        batches = round(state["part_of_pass"] * (length or 0))
    return loader.state_at(state["epoch"], batches)
