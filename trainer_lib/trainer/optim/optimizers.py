"""This file is making an optimizer from its name: torch's own by short names, others by dotted paths."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.trainer.arguments.import_path import check_options, load, parameters_of, takes_any_keyword

# torch has fused kernels of several more, but those of SGD and Adagrad cannot do with the sparse gradients of
# embeddings, which nobody can tell from a parameter.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_DEVICES_WITH_FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})

_ELSEWHERE = {"params": "the model", "lr": "learning_rate", "weight_decay": "weight_decay"}


def build_optimizer(
    name: str,
    parameters: Iterable[Any],
    /,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Optimizer:
    """Return an optimizer.

    Adam and AdamW come fused where device and types allow it, the others with `foreach`; both can be set by `options`.

    Args:
        name: That of one of torch's optimizers in lower case ("adamw", "sgd", "sparse_adam" …), or a dotted path.
        parameters: Parameters, or groups of them as `group_parameters` returns.
        learning_rate: The learning rate of groups that have none of their own.
        weight_decay: The weight decay of groups that have none of their own.
        device: Where the parameters will be when the optimizer steps.
        options: Further options of the optimizer.

    Raises:
        ConfigurationError: If there is no such optimizer or option, or it cannot do with the values.
        UnsupportedError: If it cannot be stepped by a training loop.

    Example:
        >>> optimizer = build_optimizer("adamw", [torch.nn.Parameter(torch.ones(2))], learning_rate=1e-3)
        >>> type(optimizer).__name__, optimizer.defaults["fused"], optimizer.defaults["weight_decay"]
        ('AdamW', True, 0.0)
    """
    kind = _kind(name)
    known = parameters_of(kind)
    told_as = f"optimizer {name!r}"
    check_options(told_as, options, {**known, **options} if takes_any_keyword(kind) else known, _ELSEWHERE)
    if (wrong := _not_an_amount(learning_rate=learning_rate, weight_decay=weight_decay)) is not None:
        raise ConfigurationError(f"{told_as}: {wrong} must be a finite number of at least 0.")
    groups = _groups(parameters, told_as)
    settings = _rates(kind, known, groups, learning_rate, weight_decay, told_as) | options
    settings |= _implementation(kind, known, groups, torch.device(device), options)
    try:
        made = kind(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{told_as} cannot be made: {error}") from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"{told_as} makes a {type(made).__name__}, and that is no torch.optim.Optimizer.")
    return made


def optimizer_names() -> list[str]:
    """Return the short names of torch's optimizers that can be had.

    Example:
        >>> "adamw" in optimizer_names(), "lbfgs" in optimizer_names()
        (True, False)
    """
    return sorted(name for name in _known() if name not in _REFUSED)


_REFUSED = {
    "lbfgs": (
        "it computes the loss again and again within a step, by a closure, and a training loop computes it once. "
        "Take another one, or write the loop with trainer_lib.Accelerator, whose optimizers take closures"
    ),
}


def _known() -> dict[str, type[Optimizer]]:
    found = [one for one in vars(torch.optim).values() if isinstance(one, type) and issubclass(one, Optimizer)]
    names = {"SparseAdam": "sparse_adam"}
    return {names.get(one.__name__, one.__name__.lower()): one for one in found if one is not Optimizer}


def _kind(name: Any) -> Callable[..., Any]:
    if not isinstance(name, str):
        raise ConfigurationError(f'optimizer={name!r}: give a name such as "adamw", or a dotted path.')
    if "." in name:
        kind = load(name, "optimizer")
        short = kind.__name__.lower() if isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS) else ""
    else:
        short = name.lower()
        if short not in _known():
            raise ConfigurationError(unknown("optimizer", name, optimizer_names()) + " Or give a dotted path.")
        kind = _known()[short]
    if short in _REFUSED:
        raise UnsupportedError(f"optimizer={name!r} is not supported: {_REFUSED[short]}.")
    return kind


def _groups(parameters: Iterable[Any], told_as: str) -> list[Any]:
    # Lists, since what is given may be a generator, and is looked at more than once.
    groups = [{**one, "params": list(one["params"])} if isinstance(one, dict) else one for one in parameters]
    if not any(True for _ in _tensors(groups)):
        raise ConfigurationError(f"{told_as} is given no parameters, so there is nothing to train.")
    return groups


def _tensors(groups: list[Any]) -> Iterable[Tensor]:
    for group in groups:
        members = cast("list[Any]", group["params"]) if isinstance(group, dict) else [group]
        # A parameter may come with its name.
        yield from (one[1] if isinstance(one, tuple) else one for one in members)


def _rates(
    kind: Callable[..., Any],
    known: dict[str, Any],
    groups: list[Any],
    learning_rate: float,
    weight_decay: float,
    told_as: str,
) -> dict[str, Any]:
    """Return learning rate and weight decay as the optimizer's own arguments, if it has them."""
    anything = takes_any_keyword(kind)
    if "lr" not in known and not anything:
        raise ConfigurationError(
            f"{told_as} takes no lr, so it would not learn at learning_rate={learning_rate}. It takes: "
            f"{', '.join(known)}. Make it yourself and hand it over."
        )
    if "weight_decay" in known or anything:
        return {"lr": learning_rate, "weight_decay": weight_decay}
    decays = [group.get("weight_decay", weight_decay) if isinstance(group, dict) else weight_decay for group in groups]
    if any(decays):
        raise ConfigurationError(
            f"{told_as} knows no weight decay, and weight_decay={max(decays)} is asked for. Leave it at 0, or take "
            "another optimizer."
        )
    return {"lr": learning_rate}


def _implementation(
    kind: Callable[..., Any], known: dict[str, Any], groups: list[Any], device: torch.device, options: dict[str, Any]
) -> dict[str, bool]:
    """Return which of torch's implementations to take, if nobody said."""
    if any(options.get(name) is not None for name in ("fused", "foreach")) or options.get("differentiable"):
        return {}
    if (
        kind in _FUSED
        and device.type in _DEVICES_WITH_FUSED
        and all(one.is_floating_point() for one in _tensors(groups))
    ):
        return {"fused": True}
    return {"foreach": True} if "foreach" in known and str(getattr(kind, "__module__", "")).startswith("torch.") else {}


def _not_an_amount(**values: Any) -> str | None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            return f"{name}={shown(value)}"
    return None
