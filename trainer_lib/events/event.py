"""The table of events: each declared once, in order, with its facts, on its method of `Callback`."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from trainer_lib.foundation.light_dataclasses import frozen_dataclass

_Method = TypeVar("_Method", bound=FunctionType)


@frozen_dataclass
class Event:
    """An event of a run.

    Attributes:
        name: The name of the callbacks' method, such as "on_loss".
        arguments: The names of the method's arguments: `run` and the details.
        description: What happened, or is about to happen.
        per_update: Whether the loop fires it between the first batch of an update and the end of the update; filters
            pass it in the selected updates only.
        changes: What a `Modifier` may change or replace, such as "`run.batch`"; "": nothing.
    """

    name: str
    arguments: tuple[str, ...]
    description: str
    per_update: bool = False
    changes: str = ""


def event(*, per_update: bool = False, changes: str = "") -> Callable[[_Method], _Method]:
    """Declare a method of `Callback` as an event; the arguments are the facts of `Event`."""

    def declare(method: _Method) -> _Method:
        _, *arguments = method.__code__.co_varnames[: method.__code__.co_argcount]
        text = method.__doc__ or ""
        facts = Event(method.__name__, tuple(arguments), " ".join(text.split()), per_update, changes)
        method.__event__ = facts  # type: ignore[attr-defined]
        return method

    return declare


def declared_events(kind: type) -> dict[str, Event]:
    """Return the events that a class declares, by name, in order."""
    methods: dict[str, Any] = dict(vars(kind))
    return {name: method.__event__ for name, method in methods.items() if hasattr(method, "__event__")}
