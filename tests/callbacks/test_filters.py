"""Tests of LambdaCallback and of the filters every, once, after and before."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from tests.callbacks.by_hand import assert_equal, resumed
from tests.callbacks.loops import go_through, running
from tests.trainer.tasks import Recorder, arguments, points, trainer
from trainer_lib.callbacks import (
    EMA,
    SWA,
    Checkpoint,
    ClipValue,
    EarlyStopping,
    Freeze,
    LabelSmoothing,
    LambdaCallback,
    after,
    before,
    every,
    once,
)
from trainer_lib.events import Callback, Dispatcher, Modifier, Run, RunState
from trainer_lib.events.callback import EVENTS
from trainer_lib.foundation.errors import ConfigurationError

Filter = Callable[[Any, Any], Callback]


class Noting(Callback):
    """Notes the number of each update of which it hears, by event."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}

    def _note(self, event: str, number: int) -> None:
        self.heard.setdefault(event, []).append(number)

    def on_fit_begin(self, run: Run) -> None:
        self._note("fit_begin", run.state.step)

    def on_step_begin(self, run: Run) -> None:
        self._note("step_begin", run.state.step + 1)

    def on_micro_batch_end(self, run: Run) -> None:
        self._note("micro_batch_end", run.state.step + 1)

    def on_step_end(self, run: Run) -> None:
        self._note("step_end", run.state.step)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self._note("log", run.state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.heard = dict(state["heard"])


class Changing(Noting, Modifier):
    pass


def updates(filtered: Filter, amount: Any, steps: int = 12, **state: Any) -> tuple[list[int], list[int]]:
    """Return the updates that a function hears of, and those whose events a callback gets."""
    heard: list[int] = []
    noting = Noting()
    callbacks = [filtered(amount, lambda run: heard.append(run.state.step)), filtered(amount, noting)]
    go_through(callbacks, steps, running(**state))
    events = noting.heard
    assert events.get("step_begin") == events.get("micro_batch_end") == events.get("step_end")
    assert events["fit_begin"] == [state.get("step", 0)]
    return heard, events.get("step_end", [])


@pytest.mark.parametrize(
    ("filtered", "amount", "expected"),
    [
        (every, "4 steps", [4, 8, 12]),
        (every, 5, [5, 10]),
        (once, "4 steps", [4]),
        (after, "9 steps", [10, 11, 12]),
        (before, "4 steps", [1, 2, 3]),
        (every, "1 epoch", [5, 10]),
        (every, "0.4 epochs", [2, 4, 6, 8, 10, 12]),
        (once, "2 epochs", [10]),
        (after, "2 epochs", [11, 12]),
        (before, "1 epoch", [1, 2, 3, 4]),
    ],
)
def test_steps_and_epochs_are_known_when_an_update_begins(filtered: Filter, amount: Any, expected: list[int]) -> None:
    assert updates(filtered, amount, steps_per_epoch=5) == (expected, expected)


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [(every, ([3, 5, 8, 10], [4, 6, 9, 11])), (once, ([3], [4])), (after, ([3, 4, 5], [4, 5]))],
)
def test_samples_are_known_at_the_end_so_a_callback_gets_the_next_update(
    filtered: Filter, expected: tuple[list[int], list[int]]
) -> None:
    heard, gotten = updates(filtered, "10 samples", steps=12)  # 4 samples an update
    assert (heard[: len(expected[0])], gotten[: len(expected[1])]) == expected


def test_after_a_restart_amounts_count_from_the_beginning() -> None:
    assert updates(every, "4 steps", step=6) == ([8, 12], [8, 12])
    assert updates(every, "10 samples", step=6, samples=24)[0] == [8, 10]
    assert updates(once, "4 steps", step=6) == ([], [])
    assert updates(after, "4 steps", step=10) == ([11, 12], [11, 12])
    assert updates(every, "1 epoch", step=6, epoch=1, steps_in_epoch=1, steps_per_epoch=5) == ([10], [10])


def test_passes_of_unknown_length_count_when_they_end() -> None:
    heard: list[tuple[str, int]] = []
    kinds: dict[str, Filter] = {"every": every, "once": once, "after": after}
    callbacks = [
        filtered("1 epoch", lambda run, kind=kind: heard.append((kind, run.state.step)))
        for kind, filtered in kinds.items()
    ]
    events, run = Dispatcher(callbacks), running()
    events.fire("on_fit_begin", run)
    for epoch in (1, 2):
        for _ in range(2):
            run.state.step += 1
            run.state.steps_in_epoch += 1
            events.fire("on_step_end", run)
        run.state.epoch, run.state.steps_in_epoch = epoch, 0
        events.fire("on_epoch_end", run)
    assert heard == [("every", 2), ("once", 2), ("every", 4)]


def test_seconds_go_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [500.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heard: list[int] = []
    callback = every("10 seconds", lambda run: heard.append(run.state.step))
    run = running(seconds=95.0)  # before a restart
    callback.on_fit_begin(run)
    for run.state.step, clock[0] in enumerate((504.0, 505.0, 514.0, 536.0, 537.0), start=1):
        callback.on_step_end(run)
    assert heard == [2, 4]


def test_filters_may_be_put_into_each_other() -> None:
    heard: list[int] = []
    noting = Noting()
    go_through(
        [
            after("5 steps", before("12 steps", every("3 steps", lambda run: heard.append(run.state.step)))),
            after("5 steps", every("3 steps", noting)),
        ],
        15,
    )
    assert heard == [6, 9]
    assert noting.heard["step_end"] == [6, 9, 12, 15]


def test_other_events_are_let_through() -> None:
    noting = Noting()
    go_through([every("4 steps", noting)], 4, log_every=1)
    assert noting.heard["log"] == [1, 2, 3, 4]


def test_a_filter_overrides_the_events_of_its_callback() -> None:
    events = Dispatcher([every(2, Noting())])
    assert {event for event in EVENTS if events.listens(event)} == {
        "on_fit_begin",
        "on_step_begin",
        "on_micro_batch_end",
        "on_step_skipped",  # of its own: what an update is to it
        "on_step_end",
        "on_load_end",
        "on_log",
    }


def test_filters_know_every_event_of_an_update() -> None:
    """All that a run fires between the first batch of an update and its end, skipped updates included."""
    recorder = Recorder()
    fail_at = iter([0.0] * 3 + [math.nan] + [0.0] * 20)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + next(fail_at)

    args = arguments(gradient_accumulation_steps=2, on_nonfinite="skip")
    trainer(args, loss_fn=loss_fn, callbacks=[recorder]).fit()
    events = [f"on_{entry.split()[0]}" for entry in recorder.events]
    inside: set[str] = set()
    for begin, event in enumerate(events):
        if event == "on_step_begin":
            inside |= set(events[begin : events.index("on_step_end", begin) + 1])
    assert inside - {"on_event"} == {
        name for name, event in EVENTS.items() if event.per_update
    }  # a note is the history's, whenever it is made


def test_a_loss_is_changed_behind_a_filter_only_while_it_is_open() -> None:
    losses: list[list[float]] = []
    for callbacks in ([], [after("1 epoch", LabelSmoothing(0.2))], [LabelSmoothing(0.2)]):
        heard: list[float] = []
        seen = LambdaCallback(on_micro_batch_end=lambda run, heard=heard: heard.append(float(run.loss)))
        trainer(arguments(optimizer="sgd", learning_rate=1e-9), callbacks=[*callbacks, seen]).fit()
        losses.append(heard)
    plain, filtered, smoothed = losses
    assert filtered[:5] == plain[:5]
    assert filtered[5:] == pytest.approx(smoothed[5:], abs=1e-6)
    assert plain[5:] != pytest.approx(smoothed[5:], abs=1e-3)


def test_an_average_behind_a_filter_is_evaluated() -> None:
    def evaluated(*callbacks: Callback) -> dict[str, float]:
        averages: dict[str, float] = {}
        looks = LambdaCallback(on_evaluate_end=lambda run, metrics: averages.update(metrics))
        trainer(arguments(seed=3, eval_every="1 epoch"), eval_dataset=points(16), callbacks=[*callbacks, looks]).fit()
        return averages

    plain, averaged = evaluated(), evaluated(EMA(0.9, warmup=False))
    filtered = evaluated(after("1 step", EMA(0.9, warmup=False)))
    assert filtered["eval_loss"] not in (plain["eval_loss"], averaged["eval_loss"])
    with pytest.raises(ConfigurationError, match="only one can average the weights"):
        trainer(callbacks=[EMA(), after("1 epoch", SWA())])


def test_a_filter_takes_over_its_callback_s_attributes(caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping()
    stopping.order = 7
    assert (every(2, stopping).order, every(2, stopping).key) == (7, "EarlyStopping(eval_loss)")
    noting = Noting()
    noting.heard["log"] = [3]
    state = Dispatcher([after(9, every(2, noting))]).state_dict()
    assert state == {"Noting": {"heard": {"log": [3]}}}
    again = Noting()
    Dispatcher([every(5, again)]).load_state_dict(state)
    assert again.heard == {"log": [3]}
    assert every(2, Changing()).may_change_training
    assert after(1, every(2, Changing())).may_change_training
    assert not every(2, noting).may_change_training

    def fail(run: Run) -> None:
        raise RuntimeError("oh")

    with caplog.at_level(logging.WARNING):
        go_through([every(2, fail), every(3, LambdaCallback(on_step_end=fail))], 6)
    assert "The callback fail() raised in on_step_end at step 2" in caplog.text
    assert "The callback LambdaCallback raised in on_step_end at step 3" in caplog.text


def test_what_a_callback_declares_holds_behind_a_filter(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^EarlyStopping needs evaluations"):
        trainer(callbacks=[after(2, EarlyStopping("eval_loss"))]).fit()
    with pytest.raises(ConfigurationError, match=r"^Checkpoint saves checkpoints and needs a folder"):
        trainer(arguments(), callbacks=[after(2, Checkpoint())]).fit()
    with pytest.raises(ConfigurationError, match=r"^keep_last=5 has no effect, because callbacks has a Checkpoint"):
        trainer(arguments(output_dir=tmp_path, keep_last=5), callbacks=[after(2, Checkpoint(keep_last=1))])
    assert every(2, after(3, Freeze("0.*", until=4))).freezes_weights

    kept = every(2, after(3, Checkpoint(keep_last=1)))
    result = trainer(arguments(output_dir=tmp_path, save_every=2), callbacks=[kept]).fit()
    assert result.last_checkpoint is not None
    assert len(list(result.last_checkpoint.parent.iterdir())) == 1


def test_other_objects_than_callbacks_and_functions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"A filter needs a function of the run or a callback \(got 3\)"):
        every("2 steps", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"got <class .*EarlyStopping'>"):
        every("2 steps", EarlyStopping)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="once='2 stps': unknown unit 'stps'"):
        once("2 stps", print)


def test_functions_are_called_at_their_events() -> None:
    heard: list[Any] = []
    callback = LambdaCallback(
        on_step_end=lambda run: heard.append(run.state.step),
        on_log=lambda run, values: heard.append(dict(values)),
        order=3,
    )
    go_through([callback], 2, log_every=2)
    assert heard == [1, 2, {"loss": 0.5}]
    assert callback.order == 3
    assert [event for event in EVENTS if Dispatcher([callback]).listens(event)] == ["on_step_end", "on_log"]


def test_functions_for_unknown_events_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown event 'on_step_ends'.*Did you mean 'on_step_end'\?"):
        LambdaCallback(on_step_ends=print)
    with pytest.raises(ConfigurationError, match=r"LambdaCallback\(on_step_end\) must be a function \(got 3\)"):
        LambdaCallback(on_step_end=3)  # type: ignore[arg-type]


def test_without_a_beginning_amounts_count_from_nothing() -> None:
    heard: list[int] = []
    callback = every(2, lambda run: heard.append(run.state.step))
    for step in (1, 2, 3):
        callback.on_step_end(Run(state=RunState(step=step)))
    assert heard == [2]


def test_a_rewound_run_calls_filters_at_the_same_steps_again(tmp_path: Path) -> None:
    """Step 6 is NaN, and goes back to step 3: step 4 comes again."""
    called: dict[str, list[int]] = {"every": [], "once": [], "after": [], "callback": []}

    class Spoils(Modifier):
        def on_loss(self, run: Run) -> None:
            if run.state.samples == 40:
                assert run.loss_sum is not None
                run.loss_sum = run.loss_sum * math.nan

    args = arguments(max_steps=8, save_every=3, output_dir=tmp_path, on_nonfinite="rewind", shuffle=False)
    callbacks = [
        every("4 steps", lambda run: called["every"].append(run.state.step)),
        once("4 steps", lambda run: called["once"].append(run.state.step)),
        after("3 steps", lambda run: called["after"].append(run.state.step)),
        every("4 steps", LambdaCallback(on_step_end=lambda run: called["callback"].append(run.state.step))),
    ]
    trainer(args, train_dataset=points(80), callbacks=[Spoils(), *callbacks]).fit()
    assert called == {"every": [4, 4, 8], "once": [4, 4], "after": [4, 5, 4, 5, 6, 7, 8], "callback": [4, 4, 8]}


@pytest.mark.parametrize(("amount", "due"), [("2 steps", [2, 4, 4, 6]), ("4 steps", [4, 4]), ("5 steps", [5])])
def test_a_filter_passes_updates_that_a_rewind_leaves_out_by_their_own_number(
    amount: str, due: list[int], tmp_path: Path
) -> None:
    """Update 5 is NaN, and goes back to step 3; its samples are left out the second time."""
    called: dict[str, list[int]] = {"end": [], "skipped": []}

    class Spoils(Modifier):
        def on_loss(self, run: Run) -> None:
            if run.state.samples == 32:
                assert run.loss_sum is not None
                run.loss_sum = run.loss_sum * math.nan

    listener = LambdaCallback(
        on_step_end=lambda run: called["end"].append(run.state.step),
        on_step_skipped=lambda run: called["skipped"].append(run.state.step),
    )
    args = arguments(max_steps=7, save_every=3, output_dir=tmp_path, on_nonfinite="rewind", shuffle=False)
    trainer(args, train_dataset=points(80), callbacks=[Spoils(), every(amount, listener)]).fit()
    assert called == {"end": due, "skipped": [4] if 5 in due else []}


@pytest.mark.parametrize("amount", ["24 samples", "1 epoch"])
def test_a_run_that_resumes_at_a_multiple_filters_the_same_updates(amount: str, tmp_path: Path) -> None:
    """The update after step 6, from whose checkpoint the run resumes, begins at a multiple of 24 samples."""
    data: Any = points() if amount != "1 epoch" else Stream()
    options: dict[str, Any] = {"train_dataset": data, "max_steps": 12, "num_train_epochs": None}
    whole, parts = resumed(lambda: every(amount, ClipValue(1e-3)), tmp_path, **options)
    assert_equal(parts, whole)
    other, _ = resumed(lambda: every("100 epochs", ClipValue(1e-3)), tmp_path / "other", **options)
    assert any(not torch.equal(other[name], weight) for name, weight in whole.items())


class Stream(IterableDataset[Any]):
    """A pass of three updates, whose length is not known."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*points(24), strict=True)))


def test_a_function_is_called_in_the_order_in_which_callbacks_are_given_unless_it_has_an_order() -> None:
    called: list[str] = []

    class Own(Callback):
        def on_step_end(self, run: Run) -> None:
            called.append("own")

    callback = LambdaCallback(on_step_end=lambda run: called.append("function"))
    Dispatcher([callback, Own()]).fire("on_step_end", Run())
    first = LambdaCallback(order=-1, on_step_end=lambda run: called.append("first"))
    Dispatcher([Own(), first]).fire("on_step_end", Run())
    assert called == ["function", "own", "first", "own"]


@pytest.mark.parametrize("make", [lambda listener: every(2, listener), lambda listener: after(1, listener)])
def test_a_filter_passes_the_load_of_a_checkpoint(make: Callable[[Any], Callback]) -> None:
    class Loads(Callback):
        loaded: str = ""

        def on_load_end(self, run: Run, folder: Path) -> None:
            self.loaded = folder.name

    loads = Loads()
    make(loads).on_load_end(Run(), Path("checkpoint-1"))
    assert loads.loaded == "checkpoint-1"
