"""What holds random generators in a fit besides models and data: the loss, a trainer's own parts, callbacks."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from trainer_lib.trainer.trainer_interface import TrainerInterface

_LIBRARY = __name__.partition(".")[0]


def generator_holders(trainer: TrainerInterface) -> Mapping[str, Any]:
    """Return objects that the user wrote, by name, whose random generators belong to a checkpoint.

    Args:
        trainer: The trainer: of a class of the user's, its attributes and the functions that its methods call count.
    """
    attributes = {
        name: value
        for name, value in vars(trainer).items()
        if name not in TrainerInterface.__annotations__ and not _is_ours(type(value))
    }
    callbacks = {
        f"{type(callback).__name__}_{index}": callback
        for index, callback in enumerate(trainer.events)
        if not _is_ours(type(callback))
    }
    return {"loss_fn": trainer.loss_fn, "trainer": attributes, "methods": _methods(trainer), "callbacks": callbacks}


def _methods(trainer: TrainerInterface) -> dict[str, Callable[..., Any]]:
    kinds = [kind for kind in type(trainer).__mro__ if not _is_ours(kind)]
    return {
        f"{kind.__name__}.{name}": member
        for kind in kinds
        for name, member in vars(kind).items()
        if isinstance(member, FunctionType)
    }


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _LIBRARY
