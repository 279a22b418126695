"""Tests of triggers: which updates are due, in each unit, after a resume and after a rewind."""

from typing import Any

import pytest

from trainer_lib.events import RunState, trigger
from trainer_lib.events.trigger import Trigger, When, callback_trigger
from trainer_lib.foundation.duration import Every
from trainer_lib.foundation.errors import ConfigurationError


def due(amount: str, when: When, updates: int = 12, **state: Any) -> list[int]:
    """Return the steps at which a trigger is due, with 4 samples and 10 tokens an update, and 5 updates an epoch."""
    triggered, run_state = Trigger(Every.parse(amount), when), RunState(steps_per_epoch=5, tokens=0, **state)
    triggered.begin(run_state)
    steps = list[int]()
    for _ in range(updates):
        run_state.step += 1
        run_state.samples += 4
        run_state.tokens = 10 * run_state.step
        run_state.epoch, run_state.steps_in_epoch = divmod(run_state.step, 5)
        if triggered.is_due(run_state):
            steps.append(run_state.step)
    return steps


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("4 steps", ([4, 8, 12], [4], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3])),
        ("10 samples", ([3, 5, 8, 10], [3], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2])),
        ("40 tokens", ([4, 8, 12], [4], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3])),
        ("1 epoch", ([5, 10], [5], [6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4])),
        ("0.6 epochs", ([3, 6, 9, 12], [3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2])),
    ],
)
def test_updates_are_selected_by_steps_samples_tokens_and_epochs(amount: str, expected: tuple[list[int], ...]) -> None:
    assert tuple(due(amount, when) for when in ("every", "once", "after", "before")) == expected


def test_fractions_of_an_epoch_are_rounded() -> None:
    triggered, state = Trigger(Every.parse("0.1 epochs")), RunState(steps_per_epoch=10)
    triggered.begin(state)
    steps = list[int]()
    for state.steps_in_epoch in range(1, 10):  # 0.3 / 0.1 is less than 3
        if triggered.is_due(state):
            steps.append(state.steps_in_epoch)
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_large_amounts_are_exact() -> None:
    state = RunState(tokens=0)
    triggered = Trigger(Every(10**12, "tokens"))
    triggered.begin(state)
    state.tokens = 10**12 - 1
    assert not triggered.is_due(state)
    state.tokens = 10**12
    assert triggered.is_due(state)


def test_a_resume_and_a_rewind_continue_the_count() -> None:
    assert due("4 steps", "every", updates=6, step=6) == [8, 12]
    triggered, state = Trigger(Every(4, "steps")), RunState(step=7)
    triggered.begin(state)
    steps = list[int]()
    for state.step in (8, 9, 6, 7, 8, 9):  # step 6 follows a rewind to step 5
        if triggered.is_due(state):
            steps.append(state.step)
    assert steps == [8, 8]


def test_time_counts_what_passed_before_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [500.0]
    monkeypatch.setattr(trigger, "time", type("Clock", (), {"monotonic": lambda: clock[0]}))
    triggered, state = Trigger(Every(10, "seconds")), RunState(seconds=95.0)
    triggered.begin(state)
    answers = list[bool]()
    for clock[0] in (504.0, 505.0, 514.0, 536.0, 537.0):
        answers.append(triggered.is_due(state))
    assert answers == [False, True, False, True, False]
    assert triggered.is_timed


def test_options_of_callbacks_take_no_tokens_and_no_time_where_ranks_must_agree() -> None:
    with pytest.raises(ConfigurationError, match=r'every="5 tokens" must be in steps, epochs, samples or time'):
        callback_trigger("5 tokens", "every")
    assert callback_trigger("5 minutes", "every").is_timed
    with pytest.raises(ConfigurationError, match=r"EMA\(every\) must not be an amount of time.*got '5 minutes'"):
        callback_trigger("5 minutes", "EMA(every)", may_be_time=False)
