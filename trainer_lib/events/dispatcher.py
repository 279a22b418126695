"""Dispatch of events to the callbacks that listen to them."""

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from trainer_lib.events.callback import EVENTS, Callback, Modifier, overrides
from trainer_lib.events.run import Run
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, StateError
from trainer_lib.foundation.public_names.signatures import cannot_take, parameter_names
from trainer_lib.logging import get_logger

_logger = get_logger(__name__)

_OF_EVALUATIONS = frozenset(name for name in EVENTS if name.startswith("on_evaluate"))

Handler = Callable[..., None]


class Dispatcher:
    """The callbacks of a run, by the events they listen to.

    Args:
        callbacks: The callbacks.

    Attributes:
        handlers: For each event with listeners, the callbacks and their methods, in the order of the calls. The same
            dict as long as the dispatcher lives: you can keep it.
        outputs_readers: The events in which a callback may read `run.outputs`.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks: list[Callback] = []
        self._keys: dict[int, str] = {}
        self._silent: set[int] = set()
        self.handlers: dict[str, list[tuple[Callback, Handler]]] = {}
        self.outputs_readers: set[str] = set()
        for callback in callbacks:
            self.add(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, callback: Callback) -> None:
        """Add a callback.

        Raises:
            ConfigurationError: If it is not a callback, was added before, or listens to an unknown event.
            SignatureError: If a method cannot take the arguments of its event.
        """
        _check(callback)
        if id(callback) in self._keys:
            raise ConfigurationError(f"callbacks has the same {type(callback).__name__} twice. Give it once.")
        for other in self._callbacks if callback.exclusive_group is not None else ():
            if other.exclusive_group == callback.exclusive_group:
                both = " and ".join(type(each.unfiltered).__name__ for each in (other, callback))
                raise ConfigurationError(
                    f"callbacks has {both}, and only one can {callback.exclusive_group}. Leave one out."
                )
        self._keys[id(callback)] = self._free_key(callback.key or type(callback).__name__)
        self._callbacks.append(callback)
        self._callbacks.sort(key=lambda callback: callback.order)
        self._bind_handlers()

    def remove(self, callback: Callback | type[Callback]) -> None:
        """Remove a callback, or all of a class; the keys of the remaining callbacks do not change."""
        for added in list(self._callbacks):
            if added is callback or (isinstance(callback, type) and isinstance(added, callback)):
                self._callbacks = [remaining for remaining in self._callbacks if remaining is not added]
                del self._keys[id(added)]
        self._bind_handlers()

    def listens(self, event: str) -> bool:
        """Whether a callback listens to `event`; the loop asks once and does not fire events without listeners."""
        return event in self.handlers

    def modifies(self, event: str) -> bool:
        """Whether a callback that listens to `event` may change training."""
        return any(callback.may_change_training for callback, _ in self.handlers.get(event, ()))

    @contextmanager
    def eval_weights(self, run: Run) -> Generator[None]:
        """Return the context in which models evaluate, predict and are saved: the `eval_weights` of all modifiers.

        Weights that differ between ranks are averaged last, so an average over updates (EMA) is averaged too.
        """
        if run.accelerator is not None:
            run.accelerator.checkpoints.background.finish_copies()
        with ExitStack() as stack:
            for callback in self._callbacks:
                if isinstance(callback, Modifier):
                    stack.enter_context(callback.eval_weights(run))
            stack.enter_context(run.averaged_weights())
            yield

    def fire(self, event: str, run: Run, *details: Any) -> None:
        """Call the callbacks that listen to `event`."""
        for callback, handler in self.handlers.get(event, ()):
            try:
                handler(run, *details)
            except ConfigurationError:
                raise
            except Exception as error:
                if callback.may_change_training:
                    raise
                where = f"{event} at step {run.state.step}"
                if event == "on_exception" or run.state.status == "failed":
                    self._remove_with_short_warning(callback, where, error)
                else:
                    self._switch_off(callback, where, error)

    def silence_observers(self) -> None:
        """Call the callbacks that only observe at no event any more; their states are saved and loaded as before."""
        self._silent = {id(callback) for callback in self._callbacks if not callback.may_change_training}
        self._bind_handlers()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by key."""
        return self._states(self._by_key())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of the callbacks.

        Raises:
            StateError: If a state does not fit its callback.
        """
        callbacks = self._by_key()
        for key, saved in state.items():
            if key not in callbacks:
                _logger.warning("The checkpoint has a state of the callback %s, which this run does not have.", key)
                continue
            try:
                callbacks[key].load_state_dict(saved)
            except Exception as error:
                raise StateError(
                    f"The state of the callback {key} in the checkpoint does not fit: {error!r}."
                ) from error
        for key in self.state_dict():
            if key not in state:
                _logger.warning("The checkpoint has no state of the callback %s, which starts from scratch.", key)

    @contextmanager
    def observer_states_kept(self) -> Generator[None]:
        """Return a context that may load states, and leaves the callbacks that only observe as they were."""
        observers = {key: callback for key, callback in self._by_key().items() if not callback.may_change_training}
        states = copy.deepcopy(self._states(observers))
        yield
        for key, state in states.items():
            observers[key].load_state_dict(state)

    def states_before_evaluation(self) -> dict[str, Any]:
        """Return copies of the states that the events of an evaluation may change, by key; empty ones too."""
        listeners = {id(callback) for name in _OF_EVALUATIONS for callback, _ in self.handlers.get(name, ())}
        callbacks = {key: callback for key, callback in self._by_key().items() if id(callback) in listeners}
        states = copy.deepcopy(self._states(callbacks))
        return {key: states.get(key, {}) for key in callbacks}

    def _states(self, callbacks: Mapping[str, Callback]) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for key, callback in callbacks.items():
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

    def _bind_handlers(self) -> None:
        # One list per event that has listeners. New lists, since a callback may be removed while an event is fired.
        self.handlers.clear()
        self.outputs_readers.clear()
        for callback in self._callbacks:
            if id(callback) in self._silent:
                continue
            # Declared in its own class: a subclass of a class that reads no outputs may read them.
            reads_outputs = vars(type(callback)).get("reads_outputs", True)
            for event in EVENTS:
                if overrides(callback, event):
                    self.handlers.setdefault(event, []).append((callback, getattr(callback, event)))
                    if reads_outputs or not _is_of_its_class(callback, event):
                        self.outputs_readers.add(event)

    def _switch_off(self, callback: Callback, where: str, error: Exception) -> None:
        name = self._keys.get(id(callback), type(callback).__name__)  # this event may have removed it
        self.remove(callback)
        _logger.warning(
            "The callback %s raised in %s and is switched off; training continues.",
            name,
            where,
            exc_info=error,
            main_process_only=False,
        )

    def _remove_with_short_warning(self, callback: Callback, where: str, error: Exception) -> None:
        """Warn in one line of a callback that raised while a run fails: the error of the run matters more."""
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


def _is_of_its_class(callback: Callback, event: str) -> bool:
    """Whether a method was written in a class, not set on the callback or on the class later."""
    method = getattr(callback, event)
    written = getattr(method, "__module__", None), getattr(method, "__qualname__", None)
    return any(written == (base.__module__, f"{base.__qualname__}.{event}") for base in type(callback).__mro__)


def _check(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ConfigurationError(
            f"callbacks has the class {callback.__name__}. Give an object: {callback.__name__}(…)."
        )
    if not isinstance(callback, Callback):
        from trainer_lib.foundation.public_names.foreign_classes import instead_of_callback

        name = type(callback).__name__
        instead = instead_of_callback(name) or " Derive it from trainer_lib.Callback."
        raise ConfigurationError(f"callbacks has a {name}, which is not a Callback of trainer_lib.{instead}")
    methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    unknown = [name for name in methods if name not in EVENTS]
    if unknown:
        from trainer_lib.events.foreign_events import instead_of

        raise ConfigurationError(
            f"{type(callback).__name__} listens to {unknown[0]}, and there is no such event."
            f"{instead_of(unknown[0], EVENTS)} Known: {', '.join(EVENTS)}."
        )
    listened = [name for name in methods if overrides(callback, name)]
    for name in listened:
        _check_signature(callback, name, EVENTS[name].arguments)
    if not listened:
        _check_unprefixed(callback)
    if hasattr(callback, "setup") or hasattr(callback, "teardown"):
        _check_stages(callback)


def _check_signature(callback: Callback, name: str, arguments: Sequence[str]) -> None:
    method = getattr(callback, name)
    if (problem := cannot_take(method, *arguments)) is not None:
        raise SignatureError(
            f"{type(callback).__name__}.{name} is called as {name}({', '.join(arguments)}), and {problem}."
        )
    if "logs" in (names := parameter_names(method))[len(arguments) :]:
        raise SignatureError(
            f"{type(callback).__name__}.{name} is called as {name}({', '.join(arguments)}), and takes "
            f"({', '.join(names)}), as in Keras: its {names[0]} would be the run. Write {name}(self, "
            f"{', '.join(arguments)}); run.state has step, epoch and history, and run.metrics the last evaluation."
        )


def _check_stages(callback: Callback) -> None:
    from trainer_lib.events.foreign_events import OF_STAGES

    for name, ours in OF_STAGES.items():
        method = getattr(callback, name, None)
        if callable(method) and "stage" in parameter_names(method):
            raise ConfigurationError(
                f"{type(callback).__name__}.{name} is never called. Write {ours}(self, run) instead, or "
                "on_evaluate_begin and on_predict_begin for calls without training."
            )


def _check_unprefixed(callback: Callback) -> None:
    from trainer_lib.events.foreign_events import UNPREFIXED

    if name := next((name for name in UNPREFIXED if callable(getattr(callback, name, None))), None):
        ours = UNPREFIXED[name]
        raise ConfigurationError(
            f"{type(callback).__name__}.{name} is never called, and the callback listens to no event. Write "
            f"{ours}(self, {', '.join(EVENTS[ours].arguments)})."
        )
