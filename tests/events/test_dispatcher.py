"""Tests of the table of events, and of their dispatch to callbacks."""

import logging
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import run_world
from trainer_lib.callbacks import LambdaCallback
from trainer_lib.events import Callback, Dispatcher, Modifier, Run, RunState, foreign_events
from trainer_lib.events.callback import EVENTS
from trainer_lib.events.event import Event
from trainer_lib.foundation.errors import ConfigurationError, SignatureError, StateError
from trainer_lib.state import PartialState

ROOT = Path(__file__).parents[2]


class Noting(Callback):
    def __init__(self, name: str = "", order: int = 0, key: str | None = None) -> None:
        self.name, self.order, self.key = name, order, key
        self.heard: list[Any] = []

    def on_step_end(self, run: Run) -> None:
        self.heard.append(run.state.step)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.heard.append((run.state.step, dict(values)))
        values[self.name] = len(values)

    def state_dict(self) -> dict[str, Any]:
        return {"heard": len(self.heard)} if self.heard else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = ["loaded"] * state["heard"]


class Raising(Callback):
    def on_step_end(self, run: Run) -> None:
        raise RuntimeError("no more paper")


class RaisingTransformer(Modifier):
    def on_step_end(self, run: Run) -> None:
        raise RuntimeError("no more paper")


def test_every_event_is_declared_with_its_facts() -> None:
    assert list(EVENTS) == [name for name in vars(Callback) if name.startswith("on_")]
    assert EVENTS["on_loss"] == Event(
        "on_loss",
        ("run",),
        "The loss of a micro-batch is computed; its gradients are not yet. `run.loss_sum`, a sum over `run.weight` "
        "items, still has its graph.",
        per_update=True,
        changes="`run.loss_sum`, `run.weight`",
    )


def test_the_documentation_lists_every_event_in_order() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `on_")]
    assert rows == [
        f"| `{event.name}({', '.join(event.arguments)})` | {event.description} | {event.changes} |"
        for event in EVENTS.values()
    ]


def test_the_library_fires_declared_events_and_no_others() -> None:
    fired = {
        match
        for path in (ROOT / "trainer_lib" / "trainer").rglob("*.py")
        for match in re.findall(r"fire\(\w*,? ?\"(on_\w+)\"", path.read_text())
    }
    of_batches = {f"on_{what}_batch_{when}" for what, when in product(("evaluate", "predict"), ("begin", "end"))}
    assert fired | of_batches | {"on_event"} == set(EVENTS)


def run_at(step: int) -> Run:
    return Run(state=RunState(step=step))


def test_an_event_reaches_those_who_override_it_with_its_details() -> None:
    noting = Noting("a")
    events = Dispatcher([noting, Callback()])
    events.fire("on_step_end", run_at(3))
    events.fire("on_log", run_at(4), {"loss": 1.0})
    events.fire("on_epoch_end", run_at(5))
    assert noting.heard == [3, (4, {"loss": 1.0})]
    assert [event for event in EVENTS if events.listens(event)] == ["on_step_end", "on_log"]


def test_a_function_set_on_the_object_listens_too() -> None:
    heard: list[int] = []
    callback = Callback()
    callback.on_step_end = lambda run: heard.append(run.state.step)
    events = Dispatcher([callback])
    events.fire("on_step_end", run_at(7))
    assert heard == [7]
    assert not events.listens("on_step_begin")


def test_a_method_that_cannot_take_the_arguments_of_its_event_is_refused() -> None:
    class Transformed(Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # type: ignore[override]
            del args, state, control, kwargs

    with pytest.raises(SignatureError) as caught:
        Dispatcher([Transformed()])
    assert str(caught.value) == (
        "Transformed.on_step_end is called as on_step_end(run), and (args: Any, state: Any, control: Any, **kwargs: "
        "Any) -> None does not fit: missing a required argument: 'state'."
    )
    callback = Callback()
    callback.on_log = lambda run: None  # type: ignore[assignment,misc]
    with pytest.raises(SignatureError, match=r"is called as on_log\(run, values\), and \(run\) does not fit"):
        Dispatcher([callback])


def test_lower_orders_come_first_and_equal_ones_as_given() -> None:
    callbacks = [Noting("b", 1), Noting("c", 1), Noting("a", -1), Noting("d", 2)]
    events = Dispatcher(callbacks[:2])
    events.add(callbacks[3])
    events.add(callbacks[2])
    values: dict[str, float] = {}
    events.fire("on_log", run_at(1), values)
    assert list(values) == ["a", "b", "c", "d"]
    assert [callback.order for callback in events] == [-1, 1, 1, 2]


def test_an_observer_that_raises_is_named_once_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    before, after = Noting("before", -1), Noting("after", 1)
    events = Dispatcher([before, Raising(), after])
    with caplog.at_level(logging.WARNING):
        events.fire("on_step_end", run_at(12))
        events.fire("on_step_end", run_at(13))
    assert before.heard == after.heard == [12, 13]
    [line] = caplog.records
    assert line.getMessage() == (
        "The callback Raising raised in on_step_end at step 12 and is switched off; training continues."
    )
    assert line.exc_info is not None
    assert "no more paper" in str(line.exc_info[1])
    assert list(events) == [before, after]


@pytest.mark.parametrize(("event", "status"), [("on_exception", "running"), ("on_step_end", "failed")])
def test_an_observer_that_raises_while_a_run_fails_is_named_in_one_line(
    event: str, status: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Raising):
        def on_exception(self, run: Run, error: BaseException) -> None:
            raise ValueError

    events = Dispatcher([Failing(), noting := Noting()])
    run = Run(state=RunState(step=3, status=status))
    events.fire(event, run, *([KeyboardInterrupt()] if event == "on_exception" else []))
    what = {"on_exception": "ValueError", "on_step_end": "RuntimeError: no more paper"}[event]
    [line] = caplog.records
    assert line.getMessage() == f"The callback Failing raised in {event} at step 3: {what}"
    assert line.exc_info is None
    assert list(events) == [noting]


def test_each_process_names_its_own() -> None:
    def body() -> tuple[list[int], list[str]]:
        state, lines = PartialState(cpu=True), list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("trainer_lib").addHandler(handler)
        noting = Noting()
        Dispatcher([Raising(), noting] if state.process_index else [noting]).fire("on_step_end", run_at(1))
        return noting.heard, lines

    first, second = run_world(body, timeout=60)
    assert first == ([1], [])
    assert second[0] == [1]
    assert [line.split(" and ")[0] for line in second[1]] == ["The callback Raising raised in on_step_end at step 1"]


def test_an_error_of_a_transformer_ends_the_run() -> None:
    events = Dispatcher([RaisingTransformer()])
    with pytest.raises(RuntimeError, match="no more paper"):
        events.fire("on_step_end", run_at(1))
    assert events.listens("on_step_end")


def test_a_wrong_set_up_and_an_interrupt_end_the_run() -> None:
    def refuse(run: Run) -> None:
        raise ConfigurationError("patience=-1")

    def interrupt(run: Run) -> None:
        raise KeyboardInterrupt

    callback = Callback()
    callback.on_step_end, callback.on_step_begin = refuse, interrupt
    events = Dispatcher([callback])
    with pytest.raises(ConfigurationError, match="patience=-1"):
        events.fire("on_step_end", run_at(1))
    with pytest.raises(KeyboardInterrupt):
        events.fire("on_step_begin", run_at(1))
    assert list(events) == [callback]


def test_a_callback_may_leave_in_the_middle_of_an_event() -> None:
    class Leaving(Callback):
        def on_step_end(self, run: Run) -> None:
            events.remove(self)

    noting = Noting()
    events = Dispatcher([Leaving(), noting])
    for step in (1, 2):
        events.fire("on_step_end", run_at(step))
    assert noting.heard == [1, 2]
    assert list(events) == [noting]


def test_removing_a_class_takes_out_all_of_it() -> None:
    raising = Raising()
    events = Dispatcher([Noting(), raising, Noting()])
    events.remove(Noting)
    assert list(events) == [raising]
    assert not events.listens("on_log")
    events.remove(raising)
    assert list(events) == []


def test_states_are_kept_by_key_and_in_the_order_given() -> None:
    first, second, third = Noting("first", order=5), Noting("second"), Noting("own", key="mine")
    events = Dispatcher([first, Callback(), second, third])
    for step in range(3):
        events.fire("on_step_end", run_at(step))
    first.heard.append("one more")
    state = events.state_dict()
    assert state == {"Noting": {"heard": 4}, "Noting-2": {"heard": 3}, "mine": {"heard": 3}}
    again = [Noting("own", key="mine"), Noting("first"), Noting("second", order=-3)]
    Dispatcher(again).load_state_dict(state)
    assert [len(callback.heard) for callback in again] == [3, 4, 3]


def test_keys_of_the_others_stay_when_one_leaves() -> None:
    first, second = Noting("first"), Noting("second")
    events = Dispatcher([first, second])
    events.fire("on_step_end", run_at(1))
    events.remove(first)
    assert events.state_dict() == {"Noting-2": {"heard": 1}}
    events.add(first)
    assert events.state_dict() == {"Noting-2": {"heard": 1}, "Noting": {"heard": 1}}


def test_states_that_are_missing_on_either_side_are_named(caplog: pytest.LogCaptureFixture) -> None:
    noting = Noting()
    noting.heard.append(0)
    with caplog.at_level(logging.WARNING):
        Dispatcher([noting, Callback()]).load_state_dict({"Gone": {"a": 1}})
    assert [line.getMessage() for line in caplog.records] == [
        "The checkpoint has a state of the callback Gone, which this run does not have.",
        "The checkpoint has no state of the callback Noting, which starts from scratch.",
    ]
    assert noting.heard == [0]


def test_a_state_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        StateError, match=r"The state of the callback Noting in the checkpoint does not fit: KeyError\('heard'\)"
    ):
        Dispatcher([Noting()]).load_state_dict({"Noting": {"seen": 3}})


def test_an_observer_whose_state_cannot_be_had_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    class Stateless(Callback):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("lost")

    class Essential(Stateless, Modifier):
        pass

    noting = Noting()
    noting.heard.append(0)
    events = Dispatcher([Stateless(), noting])
    with caplog.at_level(logging.WARNING):
        assert events.state_dict() == {"Noting": {"heard": 1}}
    assert "The callback Stateless raised in state_dict and is switched off" in caplog.text
    assert list(events) == [noting]
    with pytest.raises(RuntimeError, match="lost"):
        Dispatcher([Essential()]).state_dict()


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"callbacks has the class Noting\. Give an object: Noting\(…\)"):
        Dispatcher([Noting])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="callbacks has a dict, which is not a Callback"):
        Dispatcher([{}])  # type: ignore[list-item]
    theirs: Any = type("EarlyStopping", (), {})()
    with pytest.raises(ConfigurationError, match=r"of trainer_lib\. Use trainer_lib\.callbacks\.EarlyStopping\."):
        Dispatcher([theirs])
    noting = Noting()
    with pytest.raises(ConfigurationError, match="callbacks has the same Noting twice"):
        Dispatcher([noting, noting])


def test_an_event_that_there_is_not_is_refused_with_the_nearest() -> None:
    class Misspelt(Callback):
        on_device = True  # no method, so no event

        def on_step_ends(self, run: Run) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Misspelt listens to on_step_ends.*Did you mean 'on_step_end'\?"):
        Dispatcher([Misspelt()])


@pytest.mark.parametrize(("name", "instead"), foreign_events.RENAMED.items())
def test_an_event_of_another_library_is_answered_with_ours(name: str, instead: str) -> None:
    callback = type("Theirs", (Callback,), {name: lambda self, trainer: None})()
    with pytest.raises(ConfigurationError, match=f"Theirs listens to {name}.* Listen to {instead}\\. Known: "):
        Dispatcher([callback])
    with pytest.raises(ConfigurationError, match=f"Unknown event '{name}'\\. Listen to {instead}\\. Known: "):
        LambdaCallback(order=0, **{name: print})
    assert instead in EVENTS
    assert name not in EVENTS


@pytest.mark.parametrize(("name", "instead"), foreign_events.UNPREFIXED.items())
def test_a_callback_that_listens_only_to_events_of_another_library_is_refused(name: str, instead: str) -> None:
    members = {name: lambda self, state, logger: None}
    with pytest.raises(ConfigurationError, match=rf"Theirs\.{name} is never called.*Write {instead}\(self, run"):
        Dispatcher([type("Theirs", (Callback,), members)()])
    Dispatcher([type("Noting", (Noting,), members)()])  # a method of its own, beside events


@pytest.mark.parametrize(("name", "instead"), foreign_events.OF_STAGES.items())
def test_a_set_up_for_a_stage_is_refused_beside_events_too(name: str, instead: str) -> None:
    of_stage = type("Theirs", (Noting,), {name: lambda self, trainer, pl_module, stage: None})
    with pytest.raises(ConfigurationError, match=rf"Theirs\.{name} is never called\. Write {instead}\(self, run\)"):
        Dispatcher([of_stage()])
    Dispatcher([type("Mine", (Noting,), {name: lambda self: None})()])  # a method of its own


def test_parameters_as_in_keras_are_refused() -> None:
    class Keras(Callback):
        def on_epoch_end(self, epoch: Any, logs: Any = None) -> None: ...  # type: ignore[override]

    with pytest.raises(SignatureError, match=r"takes \(epoch, logs\), as in Keras: its epoch would be the run"):
        Dispatcher([Keras()])
    with pytest.raises(SignatureError, match="as in Keras"):
        Dispatcher([LambdaCallback(on_epoch_end=lambda epoch, logs=None: None)])
    Dispatcher([LambdaCallback(on_log=lambda run, logs: None)])
