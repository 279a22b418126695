"""This file is taking up what another library saved: its states in the terms of what is prepared here."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_lib.checkpointing.format.layout import ENGINE_NAME, OPTIMIZER_NAME, SAMPLER_NAME, SCHEDULER_NAME
from trainer_lib.checkpointing.format.manifest import Manifest
from trainer_lib.checkpointing.format.state_parts import Part
from trainer_lib.checkpointing.third_party.third_party import TRAINER
from trainer_lib.foundation.errors import StateError
from trainer_lib.logging import get_logger
from trainer_lib.modules.names import canonical_name
from trainer_lib.strategies.optimizer_state_names import named_parameters, parameter_names

if TYPE_CHECKING:
    from trainer_lib.accelerator.checkpoints import Persistence

_logger = get_logger(__name__)

# How an optimizer computes, which is for whoever made it to say, and not a state.
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# Which parameters transformers' Trainer spares weight decay, by their names; besides those of LayerNorm.
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
_SHOWN = 4


def taken_up(engine: "Persistence", part: Part, state: Any) -> Any:
    """Return the state of a part in the terms of here.

    Args:
        engine: The `Accelerator`.
        part: The part.
        state: What was imported.

    Raises:
        StateError: If it is of something else than is prepared here.
    """
    if part.kind == OPTIMIZER_NAME and state:
        optimizer = engine._optimizers[part.index]
        return _optimizer_state(optimizer.optimizer, [engine.strategy.bare(one) for one in engine._models], state)
    if part.kind == SCHEDULER_NAME:
        return _schedule(part, state)
    if part.kind == SAMPLER_NAME:
        return _place(engine._dataloaders[part.index], state)
    return state


def counted(parts: Sequence[Part], manifest: Manifest) -> list[str]:
    """Return the names of parts that have to be as many as were saved; what an import left out need not be."""
    if manifest.origin is None:
        return [part.name for part in parts]
    left_out = manifest.origin["left_out"]
    return [
        part.name
        for part in parts
        if part.kind not in left_out and (part.kind != SAMPLER_NAME or part.name in manifest.parts)
    ]


def tell_missing(part: Part, manifest: Manifest, folder: Path) -> None:
    """Say that a part was not saved, and why, if it was left out by an import."""
    reason = "" if manifest.origin is None else manifest.origin["left_out"].get(part.kind, "")
    if manifest.origin is None or part.kind != ENGINE_NAME:
        told = f" ({reason})" if reason else ""
        _logger.warning("The state in %s has no %s, which stays as it is%s.", folder, part.name, told)


# -- optimizers: the states of parameters by their numbers ------------------------------------------------------------


def _optimizer_state(optimizer: Any, models: Sequence[nn.Module], given: Mapping[str, Any]) -> dict[str, Any]:
    state = {key: value for key, value in given.items() if key != "in_order_of"}
    shapes = {name: tuple(one.shape) for name, one in named_parameters(optimizer, models).items()}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if sorted(numbers) != list(range(len(shapes))):
        raise StateError(
            f"The state is of an optimizer with {len(numbers)} parameters, and {type(optimizer).__name__} has "
            f"{len(shapes)} here. Make the model, and freeze what was frozen, as it was there."
        )
    for names in _orders(optimizer, models, list(shapes), given):
        of_number = dict(zip(numbers, names, strict=True))
        if all(_fits(state["state"].get(number, {}), shapes[name]) for number, name in of_number.items()):
            break
    else:
        raise StateError(
            f"The states of the {len(numbers)} parameters have other shapes than the parameters of "
            f"{type(optimizer).__name__} here, in whichever order. Make the optimizer of the same model, with the same "
            "groups of parameters."
        )
    by_name = {of_number[number]: values for number, values in state["state"].items()}
    return {**state, "state": by_name, "param_groups": _groups(optimizer, models, state["param_groups"], of_number)}


def _orders(
    optimizer: Any, models: Sequence[nn.Module], flat: list[str], given: Mapping[str, Any]
) -> Iterator[list[str]]:
    """Yield the orders that the parameters may have there, the likeliest first."""
    of_models = [name for name in parameter_names(models).values() if name in set(flat)]
    decayed = {
        f"{prefix}{canonical_name(name)}" for prefix, model in _prefixed(models) for name in _decayed_names(model)
    }
    of_transformers = sorted(of_models, key=lambda name: name not in decayed)
    first = (of_transformers, flat) if given["in_order_of"] == TRAINER else (flat, of_models, of_transformers)
    yield from (names for names in first if len(names) == len(flat))


def _prefixed(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(f"{index}." if len(models) > 1 else "", model) for index, model in enumerate(models)]


def _decayed_names(model: nn.Module) -> set[str]:
    norms = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.LayerNorm))
    return {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(norms) and not _SPARED.search(canonical_name(name).lower())
    }


def _fits(values: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    return all(tuple(one.shape) == shape for one in values.values() if isinstance(one, Tensor) and one.ndim)


def _groups(
    optimizer: Any, models: Sequence[nn.Module], given: Sequence[Mapping[str, Any]], of_number: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the groups of here, with the options that their parameters had there."""
    of_name = {of_number[number]: group for group in given for number in group["params"]}
    names = iter(named_parameters(optimizer, models))
    made: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        own = [next(names) for _ in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        there = list({id(of_name[name]): of_name[name] for name in own}.values())
        unknown = sorted({key for one in there for key in one if key not in (*options, *_HOW, "initial_lr")})
        if unknown:
            raise StateError(
                f"The state is of an optimizer with {', '.join(unknown)}, which {type(optimizer).__name__} does not "
                "know. Make an optimizer of the class that it was there."
            )
        for key in {key for one in there for key in one} - {*_HOW}:
            values = [one[key] for one in there if key in one]
            if all(value == values[0] for value in values):
                options[key] = values[0]
            else:
                _logger.warning(
                    "Parameter group %d of %s has parameters with several values of %s there (%s): here it is %s.",
                    number,
                    type(optimizer).__name__,
                    key,
                    ", ".join(map(str, values[:_SHOWN])),
                    options.get(key),
                )
        made.append({**options, "params": own})
    return made


# -- schedules ---------------------------------------------------------------------------------------------------------


def _schedule(part: Part, state: Any) -> Any:
    own = part.stateful.state_dict()
    if "lr_lambdas" in state and "lr_lambdas" in own:
        # Where it stands; how it goes is for whoever made it here, whose groups of parameters may be others.
        return {**own, **{name: state[name] for name in ("last_epoch", "_step_count")}}
    if state.keys() - {"_is_initial", "_initial_step"} != own.keys() - {"_is_initial", "_initial_step"}:
        raise StateError(
            f"The state of the schedule has {', '.join(sorted(state))}, and {part.class_name} has "
            f"{', '.join(sorted(own))}. Make a schedule of the class that it was there, or convert again with "
            "--without scheduler."
        )
    return state


# -- where in the data -------------------------------------------------------------------------------------------------


def _place(loader: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    own = loader.state_dict()
    batches = 0
    if state["part_of_pass"]:
        try:
            batches = round(state["part_of_pass"] * len(loader))
        except (TypeError, NotImplementedError):
            _logger.warning("How long a pass is cannot be known of this data: it begins anew, and samples come twice.")
    position = min(batches * loader._reader.step, own.get("length") or math.inf)
    return {**own, "epoch": state["epoch"], "position": int(position) if batches else 0, "bookmark": None}
