"""Requests of callbacks: `run.control`."""

import pytest

from trainer_lib.events import Control, Interruption
from trainer_lib.process_group import LoneProcess


def test_nobody_takes_back_what_another_asked_for() -> None:
    control = Control()
    control.save |= False
    assert not control.save
    control.save = True
    control.save = False
    control.save |= False
    assert control.save
    assert [control.log, control.evaluate, control.stop] == [False] * 3


@pytest.mark.parametrize("name", Control.NAMES)
def test_alone_what_is_asked_for_is_to_be_done_once(name: str) -> None:
    control = Control()
    setattr(control, name, True)
    assert getattr(control, name)
    assert control.is_empty  # nothing to do before it is agreed to
    assert not control.take(name)
    control.sync_across_ranks(LoneProcess())
    assert getattr(control, name)
    assert control.is_due(name)
    assert not control.is_empty
    assert control.take(name)
    assert not control.take(name)
    assert control.is_empty
    assert not getattr(control, name)


def test_what_any_process_asked_for_all_do() -> None:
    first, second = Control(), Control()
    first.save = True
    second.stop = True
    numbers = [(a + b) / 2 for a, b in zip(first.to_floats(), second.to_floats(), strict=True)]
    for control in (first, second):
        control.receive(numbers)
        assert [control.is_due(name) for name in Control.NAMES] == [False, False, True, True, False]
        assert control.to_floats() == [0.0] * Control.COUNT  # told once
        assert control.take("save")
        assert control.stop


def test_a_request_made_while_others_are_heard_stays_for_the_next_time() -> None:
    control = Control()
    control.log = True
    floats = control.to_floats()
    control.evaluate = True
    control.receive(floats)
    assert control.is_due("log")
    assert not control.is_due("evaluate")
    assert control.to_floats() == [0.0, 1.0, *[0.0] * 6]


def test_what_all_come_to_by_themselves_need_not_be_told() -> None:
    control = Control()
    control.agree("log")
    assert control.log
    assert control.to_floats() == [0.0] * Control.COUNT
    assert control.take("log")


def test_a_request_that_there_is_not_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Control().saves = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def test_what_did_not_get_to_the_others_is_sent_again() -> None:
    control = Control()
    control.save = True
    assert control.to_floats() == [0.0, 0.0, 1.0, *[0.0] * 5]
    assert control.save  # on its way
    control.send_again()
    assert control.to_floats() == [0.0, 0.0, 1.0, *[0.0] * 5]
    control.receive([])
    assert control.is_empty


def test_what_only_the_loop_asks_for_travels_with_the_rest() -> None:
    first, second = Control(), Control()
    first.ask("flush")
    numbers = [(a + b) / 2 for a, b in zip(first.to_floats(), second.to_floats(), strict=True)]
    second.receive(numbers)
    assert second.take("flush")
    assert second.is_empty


def test_what_a_handler_noted_is_asked_for_when_requests_are_looked_at() -> None:
    alone, in_a_message, first, second = Control(), Control(), Control(), Control()
    for control in (alone, in_a_message, first):
        control.interruption = Interruption("SIGTERM", 143)
        assert control.is_empty
    alone.agree_alone()
    in_a_message.sync_across_ranks(LoneProcess())
    for control in (alone, in_a_message):
        assert control.take("interrupt")
        assert control.is_empty
    floats = first.to_floats()
    for control in (first, second):
        control.receive(floats)
        assert control.take("interrupt")
        assert control.is_empty
