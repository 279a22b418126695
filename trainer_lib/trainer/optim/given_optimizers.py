"""A warning of arguments that a given optimizer does not have."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer_lib.logging import get_logger
from trainer_lib.trainer.arguments.training_arguments import TrainingArguments

_logger = get_logger(__name__)

# A schedule keeps the rate that the optimizer was made with, or that a cycle rises to.
_RATES = ("lr", "initial_lr", "max_lr")
_DECAYS = ("weight_decay",)


def warn_of_ignored_arguments(optimizer: Optimizer, args: TrainingArguments) -> None:
    """Warn of arguments that have no effect, since no group of the optimizer has their value.

    Args:
        optimizer: An optimizer that was given, or made by a given function, which may have used the arguments.
        args: The arguments.
    """
    kind = type(optimizer).__name__
    ignored = [option for option, keys, value in _set_arguments(args) if not _has(optimizer, keys, value)]
    if args.optimizer != TrainingArguments.optimizer and _plain(args.optimizer) != _plain(kind):
        ignored.insert(0, f"optimizer={args.optimizer!r}")
    if ignored:
        _logger.warning(
            "%s %s no effect on the %s given as optimizer, which has other values. Set them there, or give its class: "
            "optimizer=%s takes the arguments.",
            " and ".join(dict.fromkeys(ignored)),
            "has" if len(ignored) == 1 else "have",
            kind,
            kind,
        )


def _set_arguments(args: TrainingArguments) -> Iterator[tuple[str, Sequence[str], Any]]:
    """Yield the options that are set, with the names that an optimizer gives them, and their values."""
    if args.learning_rate != TrainingArguments.learning_rate:
        yield f"learning_rate={args.learning_rate}", _RATES, args.learning_rate
    if args.weight_decay:
        yield f"weight_decay={args.weight_decay}", _DECAYS, args.weight_decay
    for name, value in args.optimizer_kwargs.items():
        yield f"optimizer_kwargs[{name!r}]", (name,), value
    for group in args.parameter_groups:
        for keys, value in ((_RATES, group.learning_rate), (_DECAYS, group.weight_decay)):
            if value is not None:
                yield f"parameter_groups[{group.pattern!r}]", keys, value


def _has(optimizer: Optimizer, keys: Sequence[str], value: Any) -> bool:
    values = [group[key] for group in optimizer.param_groups for key in keys if key in group]
    return any(_listed(held) == _listed(value) for held in values)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _plain(name: str) -> str:
    return name.rpartition(".")[2].replace("_", "").lower()
