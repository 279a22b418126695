"""This file is how events reach those who listen, and nobody else."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from trainer_lib.events.callback import EVENTS, Callback, Modifier, overrides
from trainer_lib.events.run import Run
from trainer_lib.foundation.errors import ConfigurationError, StateError, did_you_mean
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

Handler = Callable[..., None]


class Dispatcher:
    """The callbacks of a run, by the events they listen to.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks: list[Callback] = []
        self._keys: dict[int, str] = {}
        self._handlers: dict[str, list[tuple[Callback, Handler]]] = {}
        for callback in callbacks:
            self.add(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, callback: Callback) -> None:
        """Add a callback.

        Raises:
            ConfigurationError: If it is none, is there already, or listens to an event that there is not.
        """
        _check(callback)
        if id(callback) in self._keys:
            raise ConfigurationError(f"callbacks has the same {type(callback).__name__} twice. Give it once.")
        for other in self._callbacks if callback.exclusive_group is not None else ():
            if other.exclusive_group == callback.exclusive_group:
                both = f"{type(other).__name__} and {type(callback).__name__}"
                raise ConfigurationError(
                    f"callbacks has {both}, and only one can {callback.exclusive_group}. Leave one out."
                )
        self._keys[id(callback)] = self._free_key(callback.key or type(callback).__name__)
        self._callbacks.append(callback)
        self._callbacks.sort(key=lambda one: one.order)
        self._arrange()

    def remove(self, callback: Callback | type[Callback]) -> None:
        """Take out a callback, or all of a class; the keys of the others stay as they are."""
        for one in list(self._callbacks):
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                self._callbacks = [other for other in self._callbacks if other is not one]
                del self._keys[id(one)]
        self._arrange()

    def listens(self, event: str) -> bool:
        """Whether anyone listens to `event`; a loop asks once and does not fire what nobody hears."""
        return event in self._handlers

    def modifies(self, event: str) -> bool:
        """Whether anyone who listens to `event` may change training."""
        return any(callback.may_change_training for callback, _ in self._handlers.get(event, ()))

    @contextmanager
    def eval_weights(self, run: Run) -> Generator[None]:
        """Return the context in which models evaluate, predict and are saved for use."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                if isinstance(callback, Modifier):
                    stack.enter_context(callback.eval_weights(run))
            yield

    def fire(self, event: str, run: Run, *details: Any) -> None:
        """Tell those who listen."""
        for callback, handler in self._handlers.get(event, ()):
            try:
                handler(run, *details)
            except ConfigurationError:
                raise
            except Exception as error:
                if callback.may_change_training:
                    raise
                where = f"{event} at step {run.state.step}"
                if event == "on_exception" or run.state.status == "failed":
                    self._leave_out(callback, where, error)
                else:
                    self._switch_off(callback, where, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one, by their keys."""
        states: dict[str, Any] = {}
        for key, callback in self._by_key().items():
            try:
                state = callback.state_dict()
            except Exception as error:
                if callback.may_change_training:
                    raise
                self._switch_off(callback, "state_dict", error)
            else:
                if state:
                    states[key] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have callbacks take up their states.

        Raises:
            StateError: If a state does not fit its callback.
        """
        here = self._by_key()
        for key, own in state.items():
            if key not in here:
                _logger.warning("The checkpoint has a state of the callback %s, which is not here.", key)
                continue
            try:
                here[key].load_state_dict(own)
            except Exception as error:
                raise StateError(f"The state of the callback {key} does not fit: {error!r}.") from error
        for key in self.state_dict():
            if key not in state:
                _logger.warning("The checkpoint has no state of the callback %s, which begins anew.", key)

    def _arrange(self) -> None:
        # A list for each event that is listened to; made anew, since a callback may leave in the middle of one.
        self._handlers = {}
        for callback in self._callbacks:
            for event in EVENTS:
                if overrides(callback, event):
                    self._handlers.setdefault(event, []).append((callback, getattr(callback, event)))

    def _switch_off(self, callback: Callback, where: str, error: Exception) -> None:
        name = self._keys.get(id(callback), type(callback).__name__)  # it may have left in this very event
        self.remove(callback)
        _logger.warning(
            "The callback %s raised in %s and is switched off; training continues.",
            name,
            where,
            exc_info=error,
            main_process_only=False,
        )

    def _leave_out(self, callback: Callback, where: str, error: Exception) -> None:
        """Tell of a callback that raised while a run fails, in one line: the error of the run matters more."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        name = self._keys.get(id(callback), type(callback).__name__)
        self.remove(callback)
        _logger.warning("The callback %s raised in %s: %s", name, where, text, main_process_only=False)

    def _free_key(self, name: str) -> str:
        key, number = name, 1
        while key in self._keys.values():
            number += 1
            key = f"{name}-{number}"
        return key

    def _by_key(self) -> dict[str, Callback]:
        return {self._keys[id(callback)]: callback for callback in self._callbacks}


def _check(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ConfigurationError(
            f"callbacks has the class {callback.__name__}. Give an object: {callback.__name__}(…)."
        )
    if not isinstance(callback, Callback):
        raise ConfigurationError(
            f"callbacks has a {type(callback).__name__}, which is no Callback. Derive it from trainer_lib.Callback."
        )
    methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown:
        raise ConfigurationError(
            f"{type(callback).__name__} listens to {unknown[0]}, and there is no such event."
            f"{did_you_mean(unknown[0], EVENTS)} Known: {', '.join(EVENTS)}."
        )
