"""Tests of EarlyStopping."""

import logging
from typing import Any

import pytest

from tests.callbacks.loops import go_through, running
from tests.trainer.tasks import arguments, points, trainer
from tests.worlds import run_world
from trainer_lib import Accelerator
from trainer_lib.callbacks import EarlyStopping
from trainer_lib.events import Dispatcher, Run
from trainer_lib.foundation.errors import ConfigurationError


def stops_after(stopping: EarlyStopping, *values: float) -> tuple[int | None, str | None]:
    """Return after how many evaluations training is to stop, and why."""
    run = running()
    for number, value in enumerate(values, start=1):
        stopping.on_evaluate_end(run, {stopping.metric: value, "eval_other": 0.0})
        if run.control.stop:
            return number, run.control.reason
    return None, run.control.reason


def test_patience_evaluations_without_improvement_end_training() -> None:
    assert stops_after(EarlyStopping(patience=2), 1.0, 0.5, 0.7, 0.4, 0.4, 0.6) == (
        6,
        "eval_loss was not better than 0.4 in 2 evaluations",
    )
    assert stops_after(EarlyStopping(patience=3), 1.0, 0.5, 0.7, 0.4, 0.4, 0.6) == (None, None)
    assert stops_after(EarlyStopping(), 1.0, 1.0, 1.0, 1.0)[0] == 4


def test_better_is_more_where_the_name_says_so_or_the_user() -> None:
    assert stops_after(EarlyStopping("eval_accuracy", 1), 0.1, 0.2, 0.1)[0] == 3
    assert stops_after(EarlyStopping("eval_harmony", 1, greater_is_better=True), 0.1, 0.2, 0.1)[0] == 3
    assert stops_after(EarlyStopping("eval_harmony", 1, greater_is_better=False), 0.1, 0.2)[0] == 2
    with pytest.raises(ConfigurationError, match="cannot be inferred from the name of the metric 'eval_harmony'"):
        EarlyStopping("eval_harmony")
    with pytest.raises(ConfigurationError, match=r"'eval_acuracy'\. Did you mean 'accuracy'\? Give greater_is_better="):
        EarlyStopping("eval_acuracy")


def test_better_has_to_be_better_by_a_margin() -> None:
    values = 1.0, 0.75, 0.5, 0.25
    assert stops_after(EarlyStopping(patience=1, min_delta=0.25), *values)[0] == 2  # by 0.25 is not by more
    assert stops_after(EarlyStopping(patience=1, min_delta=0.2), *values)[0] is None


@pytest.mark.parametrize(
    ("limits", "values", "expected"),
    [
        ({"stop_below": 0.3}, (1.0, 0.3, 0.2), (3, "eval_loss is good enough: 0.2 is below 0.3")),
        ({"stop_above": 1.0}, (1.0, 1.5), (2, "eval_loss is good enough: 1.5 is above 1")),
        ({"diverged_above": 5.0}, (1.0, 5.0, 6.0), (3, "eval_loss diverged: 6 is above 5")),
        ({"diverged_below": 0.0}, (1.0, 0.0, -1.0), (3, "eval_loss diverged: -1 is below 0")),
    ],
)
def test_limits_end_training_at_once(
    limits: dict[str, Any], values: tuple[float, ...], expected: tuple[int, str]
) -> None:
    assert stops_after(EarlyStopping(patience=None, **limits), *values) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_end_training_unless_check_finite_is_off(value: float) -> None:
    assert stops_after(EarlyStopping(), 1.0, value) == (2, f"eval_loss is {value}")
    lenient = EarlyStopping(patience=2, check_finite=False)
    assert stops_after(lenient, value, value) == (2, "eval_loss was not finite in 2 evaluations")
    assert lenient.state_dict() == {"best": None, "bad_evaluations": 2}
    lenient = EarlyStopping(patience=2, check_finite=False)
    assert stops_after(lenient, 1.0, value, 0.5, value, 0.6)[0] == 5


def test_an_object_that_was_part_of_another_run_starts_over() -> None:
    stopping = EarlyStopping(patience=1, min_delta=0.05)
    steps: list[int] = []
    for _ in range(2):  # as in the folds of a cross-validation
        args = arguments(max_steps=40, eval_every="2 steps")
        steps.append(trainer(args, eval_dataset=points(), callbacks=[stopping]).fit().state.step)
    assert steps == [steps[0]] * 2
    assert steps[0] > 4


def test_without_patience_training_continues() -> None:
    assert stops_after(EarlyStopping(patience=None), *[1.0] * 50) == (None, None)


def test_the_state_is_resumed_under_its_key(caplog: pytest.LogCaptureFixture) -> None:
    before = EarlyStopping(patience=3)
    stops_after(before, 0.5, 0.6, 0.7)
    state = Dispatcher([before]).state_dict()
    assert state == {"EarlyStopping(eval_loss)": {"best": 0.5, "bad_evaluations": 2}}
    after = EarlyStopping(patience=3)
    Dispatcher([EarlyStopping("eval_accuracy"), after]).load_state_dict(state)
    assert stops_after(after, 0.6) == (1, "eval_loss was not better than 0.5 in 3 evaluations")
    # A callback with another metric starts fresh, with a warning.
    with caplog.at_level(logging.WARNING):
        other = EarlyStopping("eval_accuracy")
        Dispatcher([other]).load_state_dict(state)
    assert (other.best, other.bad_evaluations) == (None, 0)
    assert "EarlyStopping(eval_loss), which this run does not have" in caplog.text


def test_evaluations_outside_training_do_not_count() -> None:
    stopping, run = EarlyStopping(patience=1), running()
    stopping.on_evaluate_end(run, {"eval_loss": 0.5})
    for status in ("new", "finished"):
        other = Run()
        other.state.status = status
        stopping.on_evaluate_end(other, {"test_loss": 0.9})
        assert not other.control.stop
    assert (stopping.best, stopping.bad_evaluations) == (0.5, 0)


def test_an_unknown_metric_ends_the_run_with_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"'eval_los'.*It has: eval_loss\. Did you mean 'eval_loss'\?"):
        go_through([EarlyStopping("eval_los", greater_is_better=False)], 2, evaluations={1: {"eval_loss": 1.0}})


@pytest.mark.parametrize("patience", [0, -1, 1.5, True, "3"])
def test_an_invalid_patience_is_refused(patience: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"patience must be a number of evaluations.*\(got {patience!r}\)"):
        EarlyStopping(patience=patience)


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_an_invalid_min_delta_is_refused(margin: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"min_delta must be finite and at least 0 \(got {margin!r}\)"):
        EarlyStopping(min_delta=margin)


def test_all_processes_decide_alike() -> None:
    def body() -> tuple[int | None, str | None]:
        Accelerator(cpu=True)
        return stops_after(EarlyStopping(patience=2), 1.0, 0.5, 0.7, 0.6)

    assert run_world(body, timeout=60) == [(4, "eval_loss was not better than 0.5 in 2 evaluations")] * 2
