"""Optimizers by name: those of torch and of well-known packages by short names, others by dotted paths."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_lib.foundation.device_types import has_fused_adam
from trainer_lib.foundation.error_values import shown
from trainer_lib.foundation.errors import ConfigurationError, UnsupportedError, unknown
from trainer_lib.trainer.arguments.import_path import check_options, load, parameters_of, takes_any_keyword
from trainer_lib.trainer.optim.optimizer_packages import PATHS, load_by_name

# torch has fused kernels for more optimizers, but those of SGD and Adagrad do not support the sparse gradients of
# embeddings, which a parameter does not reveal.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)

_SET_BY_ARGUMENTS = {"params": "the model", "lr": "learning_rate", "weight_decay": "weight_decay"}


def build_optimizer(
    name: str | type[Optimizer],
    parameters: Iterable[Any],
    /,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Optimizer:
    """Return an optimizer.

    Adam and AdamW are fused if device and dtypes allow it, the others use `foreach`; `options` can set both.

    Args:
        name: One of torch's optimizers in lower case ("adamw", "sgd", "sparse_adam" …), one of another package
            ("adamw_8bit", "schedule_free_adamw" …), a dotted path, or a class.
        parameters: Parameters, or groups as `group_parameters` returns them.
        learning_rate: The learning rate of groups that do not set one.
        weight_decay: The weight decay of groups that do not set one.
        device: The device of the parameters during training.
        options: Further options of the optimizer.

    Raises:
        ConfigurationError: If the optimizer or an option is unknown, or a value is not allowed.
        UnsupportedError: If a training loop cannot step the optimizer.

    Example:
        >>> optimizer = build_optimizer("adamw", [torch.nn.Parameter(torch.ones(2))], learning_rate=1e-3)
        >>> type(optimizer).__name__, optimizer.defaults["fused"], optimizer.defaults["weight_decay"]
        ('AdamW', True, 0.0)
    """
    kind = _kind(name)
    known = parameters_of(kind)
    owner = f"optimizer {name.__name__ if isinstance(name, type) else repr(name)}"
    check_options(owner, options, {**known, **options} if takes_any_keyword(kind) else known, _SET_BY_ARGUMENTS)
    if (invalid := _invalid_amount(learning_rate=learning_rate, weight_decay=weight_decay)) is not None:
        raise ConfigurationError(f"{owner}: {invalid} must be a finite number of at least 0.")
    groups = _groups(parameters, owner)
    settings = _rates(kind, known, groups, learning_rate, weight_decay, owner) | options
    settings |= _implementation(kind, known, groups, torch.device(device), options)
    try:
        optimizer = kind(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{owner} cannot be created: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"{owner} must return a torch.optim.Optimizer (got {type(optimizer).__name__}).")
    return optimizer


def optimizer_names() -> list[str]:
    """Return the short names of the supported optimizers, those of packages that may not be installed among them.

    Example:
        >>> "adamw" in optimizer_names(), "adamw_8bit" in optimizer_names(), "lbfgs" in optimizer_names()
        (True, True, False)
    """
    return sorted(name for name in {*_known(), *PATHS} if name not in _REFUSED)


NEEDS_CLOSURE = (
    "it needs a closure that computes the loss several times per step, and the Trainer computes it once. Use "
    "another optimizer, or write the loop with trainer_lib.Accelerator, whose optimizers take closures"
)
_REFUSED = {
    "lomo_optim": (
        'its hooks change weights before the Trainer can weight their gradients. Give the name "lomo" or "adalomo", '
        "which are made for it, or write the loop with trainer_lib.Accelerator and its lomo_backward"
    ),
    "lbfgs": NEEDS_CLOSURE,
}


def _known() -> dict[str, type[Optimizer]]:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    names = {"SparseAdam": "sparse_adam"}
    return {names.get(kind.__name__, kind.__name__.lower()): kind for kind in kinds if kind is not Optimizer}


def _kind(name: Any) -> Callable[..., Any]:
    if not isinstance(name, (str, type)):
        raise ConfigurationError(f'optimizer must be a name such as "adamw", or a dotted path (got {name!r}).')
    if isinstance(name, type) or "." in name:
        kind = name if isinstance(name, type) else load(name, "optimizer")
        is_lbfgs = isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS)
        short = "lbfgs" if is_lbfgs else str(getattr(kind, "__module__", "")).partition(".")[0]
    else:
        short = name.lower()
        if short not in _known() and short not in PATHS and short not in _REFUSED:
            raise ConfigurationError(unknown("optimizer", name, optimizer_names()) + " Or give a dotted path.")
        kind = load_by_name(short) if short in PATHS else _known().get(short, Optimizer)
    if short in _REFUSED:
        shown_name = name.__name__ if isinstance(name, type) else repr(name)
        raise UnsupportedError(f"optimizer={shown_name} is not supported: {_REFUSED[short]}.")
    return kind


def _groups(parameters: Iterable[Any], owner: str) -> list[Any]:
    # Lists, since generators can be read only once.
    groups = [{**item, "params": list(item["params"])} if isinstance(item, dict) else item for item in parameters]
    if not any(True for _ in _tensors(groups)):
        raise ConfigurationError(f"{owner} got no parameters, so there is nothing to train.")
    return groups


def _tensors(groups: list[Any]) -> Iterable[Tensor]:
    for group in groups:
        members = cast("list[Any]", group["params"]) if isinstance(group, dict) else [group]
        # torch also takes (name, parameter).
        yield from (member[1] if isinstance(member, tuple) else member for member in members)


def _rates(
    kind: Callable[..., Any],
    known: dict[str, Any],
    groups: list[Any],
    learning_rate: float,
    weight_decay: float,
    owner: str,
) -> dict[str, Any]:
    """Return learning rate and weight decay as arguments of the optimizer, if it takes them."""
    any_keyword = takes_any_keyword(kind)
    if "lr" not in known and not any_keyword:
        raise ConfigurationError(
            f"{owner} takes no lr, so learning_rate={learning_rate} would have no effect. It takes: "
            f"{', '.join(known)}. Create the optimizer yourself and give it to the Trainer."
        )
    if "weight_decay" in known or any_keyword:
        return {"lr": learning_rate, "weight_decay": weight_decay}
    decays = [group.get("weight_decay", weight_decay) if isinstance(group, dict) else weight_decay for group in groups]
    if any(decays):
        raise ConfigurationError(
            f"{owner} has no weight decay, so weight_decay={max(decays)} would have no effect. Leave it at 0, or use "
            "another optimizer."
        )
    return {"lr": learning_rate}


def _implementation(
    kind: Callable[..., Any], known: dict[str, Any], groups: list[Any], device: torch.device, options: dict[str, Any]
) -> dict[str, bool]:
    """Return which of torch's implementations to use, unless the options set it."""
    if any(options.get(name) is not None for name in ("fused", "foreach")) or options.get("differentiable"):
        return {}
    meshes = {getattr(tensor, "device_mesh", None) for tensor in _tensors(groups) if tensor.dim()}
    if len(meshes) > 1 and not _updates_shards(kind):
        return {"foreach": False} if "foreach" in known else {}  # one by one: some weights are split, others whole
    if (
        kind in _FUSED
        and has_fused_adam(device.type)
        and all(tensor.is_floating_point() for tensor in _tensors(groups))
    ):
        return {"fused": True}
    return {"foreach": True} if "foreach" in known and str(getattr(kind, "__module__", "")).startswith("torch.") else {}


def _updates_shards(kind: Callable[..., Any]) -> bool:
    from trainer_lib.strategies.shard_updates import updates_shards

    return isinstance(kind, type) and issubclass(kind, Optimizer) and updates_shards(kind)


def _invalid_amount(**values: Any) -> str | None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            return f"{name}={shown(value)}"
    return None
